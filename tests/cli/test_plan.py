"""``packer plan`` as a user types it."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from cli.main import cli
from packer.plan import load_plan, verify_plan
from tests import invariants, plans

SEQLENS = [int(n) for n in np.random.default_rng(0).integers(1, 60, 500)]

# What scripts rely on.
OPTIONS = """
    --max-tokens --layout --count --order --seed --epochs --packing --window --dp-size --grad-accum
    --accum-multiple --same-num-samples --same-seqlen --pipeline --min-samples --max-samples --sp-size
    --pad-multiple --pad-segments-to --fixed-seqlen --num-shapes --max-attention --max-seqlen --too-long
    --filter-min --filter-max --sample-ids --remainder --balance --hidden-size --balance-steps --lr-scaling
    --lr-by --lr-base --lr-max-scale --curriculum --except --out --overwrite --json --mix --mix-by --repeat
    --total-tokens --total-steps --max-passes
"""


@pytest.fixture
def metrics(tmp_path):
    return plans.write_metric(tmp_path / "metrics", "seqlen", SEQLENS)


def run(metrics, out, *arguments):
    return CliRunner().invoke(cli, ["plan", *map(str, [metrics, "--out", out, *arguments])])


def refused(result, message, exit_code=1):
    """Check that a run ended with one line of error and nothing on stdout."""
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("Error: ")
    assert re.search(message, lines[-1]), lines[-1]
    if exit_code == 1:
        assert len(lines) == 1


def test_a_plan_and_its_summary(metrics, tmp_path):
    result = run(metrics, tmp_path / "plan", "--max-tokens", 256, "--dp-size", 2, "--epochs", 2)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    text = result.stdout
    assert f"{tmp_path}/plan: " in text
    for part in ("steps", "in 2 epochs, each of 2 ranks", "samples planned", "padding", "tokens per step"):
        assert part in text
    assert "Note: the metrics have no manifest" in text
    assert f"Next: packer verify {tmp_path}/plan --metrics {metrics}" in text
    invariants.check(tmp_path / "plan", SEQLENS)
    assert verify_plan(tmp_path / "plan", metrics=metrics).num_epochs == 2


def test_a_summary_for_machines(metrics, tmp_path):
    result = run(metrics, tmp_path / "plan", "--max-tokens", 256, "--json")
    summary = json.loads(result.stdout)
    plan = load_plan(tmp_path / "plan")
    assert summary["content_hash"] == plan.fingerprint
    assert summary["num_steps"] == plan.epoch(0).num_steps
    assert summary["source_samples"] == 500


def test_the_same_command_writes_the_same_bytes(metrics, tmp_path):
    for name in ("a", "b"):
        assert run(metrics, tmp_path / name, "--max-tokens", 256, "--lr-scaling", "sqrt").exit_code == 0
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    assert str(tmp_path) not in (tmp_path / "a" / "plan.json").read_text()


def test_help_names_every_option_in_groups(metrics):
    text = CliRunner().invoke(cli, ["plan", "--help"], terminal_width=110).stdout
    for option in OPTIONS.split():
        assert re.search(rf"^  {option}\b", text, re.MULTILINE), option
    for group in ("What a micro-batch may hold:", "Steps:", "Shapes:", "Learning rate:"):
        assert f"\n{group}\n" in text
    for source in ("Goyal 2017", "Malladi 2022"):
        assert source in " ".join(text.split())


def test_every_option_reaches_the_configuration(metrics, tmp_path):
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(map(str, range(400))))
    result = run(
        *(metrics, tmp_path / "plan", "--max-tokens", 256, "--layout", "padded", "--count", "real"),
        *("--order", "random", "--seed", 3, "--epochs", 2, "--packing", "windowed", "--window", 8),
        *("--dp-size", 2, "--grad-accum", 2, "--accum-multiple", 2, "--pipeline", "--min-samples", 2),
        *("--max-samples", 9, "--sp-size", 2, "--pad-multiple", 8, "--max-attention", 100_000),
        *("--max-seqlen", 50, "--too-long", "drop", "--filter-min", 5, "--filter-max", 55),
        *("--sample-ids", ids, "--remainder", "drop", "--balance", "none", "--hidden-size", 64),
        *("--balance-steps", 2, "--lr-scaling", "linear", "--lr-by", "tokens", "--lr-base", 500.5),
        *("--lr-max-scale", 1.5),
    )
    assert result.exit_code == 0, result.output
    config = load_plan(tmp_path / "plan").config
    expected = {
        "max_tokens": 256, "count": "real", "seed": 3, "epochs": 2, "window": 8, "dp_size": 2,
        "grad_accum": 2, "accum_multiple": 2, "same_num_samples": True, "same_seqlen": True,
        "min_samples": 2, "max_samples": 9,
        "sp_size": 2, "pad_multiple": 8, "max_attention": 100_000, "max_seqlen": 50, "too_long": "drop",
        "filter_min": 5, "filter_max": 55, "hidden_size": 64, "balance_steps": 2, "lr_scaling": "linear",
        "lr_by": "tokens", "lr_base": 500.5, "lr_max_scale": 1.5,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert config["sample_ids"]["count"] == 400
    invariants.check(tmp_path / "plan", SEQLENS)


def test_ids_as_an_array(metrics, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(100))
    result = run(
        metrics, tmp_path / "plan", "--max-tokens", 99, "--sample-ids", tmp_path / "ids.npy", "--json"
    )
    assert json.loads(result.stdout)["dropped"]["filtered"]["num_samples"] == 400


class TestBadInput:
    """One clear error each, the right exit code, nothing left behind."""

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, tmp_path):
        yield
        assert not (tmp_path / "plan").exists()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    def test_a_sample_over_the_budget(self, metrics, tmp_path):
        result = run(metrics, tmp_path / "plan", "--max-tokens", 30)
        refused(result, r"sample \d+ has \d+ tokens, over the limit of 30.*--too-long truncate")

    def test_a_budget_smaller_than_everything(self, tmp_path):
        metrics = plans.write_metric(tmp_path / "metrics", "seqlen", [10, 20])
        result = run(metrics, tmp_path / "plan", "--max-tokens", 5, "--too-long", "drop")
        refused(result, "no .*|over")

    def test_an_empty_data_set(self, tmp_path):
        metrics = plans.write_metric(tmp_path / "metrics", "seqlen", [])
        refused(run(metrics, tmp_path / "plan", "--max-tokens", 5), "no sample|no step|empty")

    def test_fewer_micro_batches_than_ranks(self, metrics, tmp_path):
        refused(run(metrics, tmp_path / "plan", "--max-tokens", 9000, "--dp-size", 64), "step")

    def test_no_metrics(self, tmp_path):
        refused(run(tmp_path / "nowhere", tmp_path / "plan", "--max-tokens", 5), "nowhere")

    def test_a_metric_that_is_not_there(self, metrics, tmp_path):
        result = run(metrics, tmp_path / "plan", "--max-tokens", "source=9,target=9")
        refused(result, "source", exit_code=result.exit_code)
        assert result.exit_code in (1, 2)

    @pytest.mark.parametrize("content", ["1\nx\n", "1.5\n", "1e3\n", "99999999999999999999999\n"])
    def test_ids_that_are_no_numbers(self, metrics, tmp_path, content):
        (tmp_path / "ids.txt").write_text(content)
        result = run(
            metrics, "--out", tmp_path / "plan", "--max-tokens", 99, "--sample-ids", tmp_path / "ids.txt"
        )
        refused(result, "ids.txt must hold one whole number a line")

    def test_ids_of_a_wrong_kind(self, metrics, tmp_path):
        for array in (np.zeros((2, 2), int), np.zeros(3)):
            np.save(tmp_path / "ids.npy", array)
            result = run(
                *(
                    metrics,
                    "--out",
                    tmp_path / "plan",
                    "--max-tokens",
                    99,
                    "--sample-ids",
                    tmp_path / "ids.npy",
                )
            )
            refused(result, "not a list of ids")
        (tmp_path / "ids.npy").write_bytes(b"junk")
        result = run(
            metrics, "--out", tmp_path / "plan", "--max-tokens", 99, "--sample-ids", tmp_path / "ids.npy"
        )
        refused(result, "must hold one whole number a line")

    def test_ids_and_curricula_that_are_not_there(self, metrics, tmp_path):
        for option in ("--sample-ids", "--curriculum"):
            result = run(
                metrics, "--out", tmp_path / "plan", "--max-tokens", 99, option, tmp_path / "nowhere"
            )
            refused(result, f"cannot read {option} .*nowhere: No such file")

    def test_a_curriculum_that_is_no_object(self, metrics, tmp_path):
        for text, message in (("[1]", "must hold a JSON object"), ("{", "is not JSON")):
            (tmp_path / "c.json").write_text(text)
            result = run(
                *(
                    metrics,
                    "--out",
                    tmp_path / "plan",
                    "--max-tokens",
                    99,
                    "--curriculum",
                    tmp_path / "c.json",
                )
            )
            refused(result, message)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--max-tokens", "x"], "'x' is not a whole number"),
            (["--max-tokens", "a=1,a=2"], "METRIC=N,METRIC=N with each metric once"),
            (["--max-tokens", "a=1,2"], "'' is not a whole number|METRIC=N"),
            (["--max-tokens", "0"], "--max-tokens 0 is not an integer from 1"),
            (["--max-tokens", "9", "--packing", "best-fit"], "add --layout packed"),
            (["--max-tokens", "9", "--layout", "packed", "--same-num-samples"], "--layout padded"),
            (["--max-tokens", "9", "--layout", "odd"], "'odd' is not one of"),
            ([], "Missing option '--max-tokens'"),
        ],
    )
    def test_options_without_meaning(self, metrics, tmp_path, arguments, message):
        refused(run(metrics, tmp_path / "plan", *arguments), message, exit_code=2)


def test_an_existing_target_is_kept_until_asked(metrics, tmp_path):
    assert run(metrics, tmp_path / "plan", "--max-tokens", 256).exit_code == 0
    before = load_plan(tmp_path / "plan").fingerprint
    refused(run(metrics, tmp_path / "plan", "--max-tokens", 128), "exists already.*--overwrite")
    assert load_plan(tmp_path / "plan").fingerprint == before
    assert run(metrics, tmp_path / "plan", "--max-tokens", 128, "--overwrite").exit_code == 0
    assert load_plan(tmp_path / "plan").fingerprint != before


def test_a_run_goes_on_with_another_plan(metrics, tmp_path):
    assert run(metrics, tmp_path / "old", "--max-tokens", 300).exit_code == 0
    options = ["--max-tokens", 200, "--layout", "packed", "--packing", "wrapped"]
    result = run(metrics, tmp_path / "rest", *options, "--except", f"{tmp_path / 'old'}@0:7")
    assert result.exit_code == 0, result.output
    assert "goes on from         epoch 0, step 7 of plan" in result.stdout
    assert verify_plan(tmp_path / "rest", metrics=metrics).with_metrics
    invariants.check(tmp_path / "rest", SEQLENS)
    place = f"{tmp_path / 'old'}@0:999"
    refused(run(metrics, tmp_path / "other", *options, "--except", place), "and no step 999")
    refused(run(metrics, tmp_path / "other", *options, "--except", tmp_path / "none"), "does not exist")
    listed = CliRunner().invoke(cli, ["export", str(tmp_path / "old"), "--to", "samples", "--step", "7"])
    assert listed.exit_code == 0, listed.output
    assert (tmp_path / "old-samples" / "samples.parquet").is_file()
