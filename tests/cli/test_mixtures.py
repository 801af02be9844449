"""``packer plan`` of several sources as a user types it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from cli.inputs import whole_number
from cli.main import cli
from packer.plan import load_plan, verify_plan
from tests import plans
from tests.cli.test_plan import refused

LENGTHS = {
    name: np.random.default_rng(number).integers(1, 60, 500).tolist()
    for number, name in enumerate(["web", "code"])
}


@pytest.fixture
def sources(tmp_path):
    """Return ``NAME=METRICS`` of two sources."""
    for name, lengths in LENGTHS.items():
        plans.write_metric(tmp_path / f"m-{name}", "seqlen", lengths)
    return [f"{name}={tmp_path}/m-{name}" for name in LENGTHS]


def run(out, *arguments):
    return CliRunner().invoke(cli, ["plan", "--out", str(out), "--max-tokens", "256", *map(str, arguments)])


def test_a_mixture_with_a_phase(sources, tmp_path):
    arguments = ["--mix", "web=0.7,code=0.3", "--mix", "@0.5:web=0.4,code=0.6", "--total-tokens", "20K"]
    result = run(tmp_path / "plan", *sources, *arguments)
    assert result.exit_code == 0, result.output
    plan = load_plan(tmp_path / "plan")
    assert plan.config["total_tokens"] == 20_000
    assert [phase["shares"] for phase in plan.header["phases"]] == [
        {"web": 0.7, "code": 0.3},
        {"web": 0.4, "code": 0.6},
    ]
    assert [source.name for source in plan.sources] == ["web", "code"]
    verify_plan(plan)
    for source in sources:
        assert f"--metrics {source}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "check"),
    [
        (["--repeat", "code=2.5"], lambda plan: plan.sources[1].passes == 2.5),
        (["--total-steps", "12"], lambda plan: plan.epoch(0).num_steps == 12),
        (["--total-tokens", "2e4", "--max-passes", "3"], lambda plan: plan.sources[0].num_passes == 1),
        (
            ["--total-tokens", "0.05M", "--max-passes", "web=3,code=9"],
            lambda plan: plan.sources[0].num_passes == 2,
        ),
        (
            ["--mix", "web=1,code=0", "--mix-by", "samples", "--total-steps", 3],
            lambda plan: not plan.sources[1].passes,
        ),
        ([], lambda plan: plan.num_samples == 1000),
    ],
    ids=str,
)
def test_passes_and_totals(sources, tmp_path, arguments, check):
    result = run(tmp_path / "plan", *sources, *arguments, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan_directory"] == str(tmp_path / "plan")
    assert check(load_plan(tmp_path / "plan"))


@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        (
            ["--mix", "web=0.7,code=0.2", "--total-steps", 3],
            "sum to 0.9, not to 1; give web=0.777778,code=0.22",
            1,
        ),
        (["--mix", "web=0.7,code=0.3"], "add --total-tokens or --total-steps", 1),
        (["--mix", "web=0.7", "--total-steps", 3], "sum to 0.7, not to 1; give web=1", 1),
        (["--mix", "web=1", "--total-steps", 3], "gives source 'code' no share; add code=SHARE", 1),
        (["--mix", "web=0.5,core=0.5", "--total-steps", 3], "names source 'core', and there is only", 1),
        (["--mix", "web,code", "--total-steps", 3], "'web' of 'web,code' is not NAME=NUMBER", 2),
        (["--mix", "web=0.5,web=0.5", "--total-steps", 3], "names 'web' twice", 2),
        (["--mix", "web=a,code=0.3", "--total-steps", 3], "'a' is not a number", 2),
        (["--mix", "@0.5,web=1", "--total-steps", 3], "is not @START:NAME=SHARE", 2),
        (["--mix", "@0.5:web=0.5,code=0.5", "--total-steps", 3], "the first one starts at 0.5", 1),
        (
            ["--mix", "web=0.5,code=0.5", "--mix", "web=0.1,code=0.9", "--total-steps", 3],
            "@0 does not start after the phase before it, @0",
            1,
        ),
        (["--total-steps", 3, "--total-tokens", 3], "give one of them", 1),
        (["--total-steps", 3, "--epochs", 2], "leave --epochs 2 out", 1),
        (["--total-steps", 3, "--repeat", "web=2"], "leave one of them out", 1),
        (["--total-steps", 3, "--order", "seqlen"], "choose --order random", 1),
        (["--repeat", "web=0"], "web=0.0 is not a number of passes above 0", 1),
        (["--max-passes", 2], "add one, or leave it out", 1),
        (["--total-tokens", "90K", "--max-passes", 2], r"over --max-passes 2; .*\(to [\d,]+ tokens\)", 1),
        (["--total-tokens", "lots"], "'lots' is not a whole number, such as 20000, 1.5M, 20B or 2e9", 2),
        (["--total-tokens", "1.5"], "'1.5' is not a whole number", 2),
    ],
    ids=str,
)
def test_refusals(sources, tmp_path, arguments, message, exit_code):
    result = run(tmp_path / "plan", *sources, *arguments)
    refused(result, message, result.exit_code)
    assert result.exit_code in (exit_code, 2)
    assert not (tmp_path / "plan").exists()


def test_sources_without_a_name_or_of_one_name(sources, tmp_path):
    refused(run(tmp_path / "plan", sources[0], tmp_path / "m-code"), "has no name, and there are 2", 2)
    refused(run(tmp_path / "plan", sources[0], sources[0]), "two sources have the name 'web'", 2)
    refused(run(tmp_path / "plan", sources[0], "code=/nowhere"), "/nowhere is not a directory")


def test_a_source_without_a_metric_that_is_asked_for(sources, tmp_path):
    plans.write_metric(tmp_path / "m-web", "source", LENGTHS["web"])
    result = run(tmp_path / "plan", *sources, "--max-tokens", "source=99,seqlen=99")
    refused(result, "names metric 'source', and of source 'code' is measured only seqlen", result.exit_code)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path):
    folder = plans.write_metric(tmp_path / "lr=3", "seqlen", [5] * 9)
    result = run(tmp_path / "plan", str(folder))
    assert result.exit_code == 0, result.output
    assert load_plan(tmp_path / "plan").sources[0].name is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("5M", 5_000_000), ("2b", 2_000_000_000), ("1e9", 10**9), ("1.5K", 1500), ("1T", 10**12)],
)
def test_amounts(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "K", "M5", "1.0001K", "nan", "inf", "1e99", "0x10", "5 M B", "-"])
def test_what_is_no_amount(text):
    with pytest.raises(ValueError, match="is not a whole number"):
        whole_number(text)
