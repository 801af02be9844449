"""``packer verify`` as a user types it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from cli.main import cli
from packer.analyzer import analyze
from packer.metrics import open_metrics
from packer.plan import plan_in_memory
from packer.plan.sources import PlanSource
from packer.planner import PlanConfig, make_plan
from tests import plans


def run(*arguments):
    return CliRunner().invoke(cli, ["verify", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    plan, seqlens = plans.whole_plan()
    plan.save(tmp_path / "plan")
    plans.write_metric(tmp_path / "metrics", "seqlen", seqlens)
    return tmp_path


def test_a_good_plan(folder):
    result = run(folder / "plan", "--metrics", folder / "metrics")
    assert result.exit_code == 0, result.output
    assert "every invariant holds" in result.stdout
    assert "every length as in the metrics" in result.stdout
    assert result.stderr == ""


def test_a_good_plan_for_machines(folder):
    result = json.loads(run(folder / "plan", "--json").stdout)
    assert (result["num_steps"], result["num_epochs"], result["with_metrics"]) == (4, 2, False)


def test_a_broken_plan_is_one_line_and_exit_code_1(folder):
    plans.forge(folder / "plan", "plan.json", lambda header: header["config"].update(max_tokens=13))
    result = run(folder / "plan")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(
        "Error: epoch 0, step 1, micro-batch 0 of rank 0 (row 2): its tensor has 14"
    )
    assert result.stderr.count("\n") == 1


def test_what_is_no_plan_is_exit_code_1(tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "does not exist" in result.stderr


class TestSource:
    """A plan over a real file, held against the file."""

    @pytest.fixture
    def made(self, tmp_path):
        tokens = [[1] * n for n in (5, 3, 8, 2)]
        pq.write_table(pa.table({"input_ids": tokens}), tmp_path / "data.parquet")
        analyze(tmp_path / "data.parquet", out=tmp_path / "metrics", tokens_column="input_ids")
        metrics = open_metrics(tmp_path / "metrics")
        rows = [plans.Row(pieces=[(0, 5), (1, 3)]), plans.Row(pieces=[(2, 8), (3, 2)])]
        facts = plans.PlanFacts(
            config=plans.config(),
            sources=[
                PlanSource(
                    num_samples=4,
                    num_tokens=18,
                    fingerprint=metrics.fingerprint,
                    files=metrics.sources,
                    definition=metrics.definition,
                )
            ],
            loss_tokens="seqlen - 1",
        )
        plan_in_memory(facts, [plans.epoch(rows)], dropped=plans.drops()).save(tmp_path / "plan")
        return tmp_path

    def test_the_same_source(self, made):
        result = run(made / "plan", "--metrics", made / "metrics", "--source", made / "data.parquet")
        assert result.exit_code == 0, result.output
        assert "4 samples of the source measured again" in result.stdout
        result = run(made / "plan", "--source", made / "data.parquet", "--measure", 2, "--json")
        assert json.loads(result.stdout)["num_measured"] == 2

    def test_another_source(self, made):
        pq.write_table(pa.table({"input_ids": [[2] * n for n in (5, 3, 8, 2)]}), made / "data.parquet")
        result = run(made / "plan", "--source", made / "data.parquet")
        if result.exit_code == 0:  # the footers of two files may be equal, as their lengths are
            assert "4 samples of the source" in result.stdout
        pq.write_table(pa.table({"input_ids": [[1] * n for n in (5, 3, 8, 2, 1)]}), made / "longer.parquet")
        result = run(made / "plan", "--source", made / "longer.parquet")
        assert result.exit_code == 1
        assert "has 5 rows, the plan is of 4" in result.stderr
        pq.write_table(pa.table({"input_ids": [[1] * n for n in (5, 3, 8, 3)]}), made / "other.parquet")
        result = run(made / "plan", "--source", made / "other.parquet")
        assert result.exit_code == 1
        assert "other.parquet is not the file that was planned" in result.stderr

    def test_a_length_that_changed_under_the_same_identity(self, made):
        plans.forge(made / "plan", "plan.json", lambda header: header["sources"][0].update(files=[]))
        pq.write_table(pa.table({"input_ids": [[1] * n for n in (5, 3, 8, 3)]}), made / "data.parquet")
        result = run(made / "plan", "--source", made / "data.parquet")
        assert result.exit_code == 1
        assert "epoch 0, sample 3: the plan says 2 tokens, the source has 3" in result.stderr

    def test_lengths_of_unknown_kind(self, made):
        plans.forge(made / "plan", "plan.json", lambda header: header["sources"][0].update(definition=None))
        result = run(made / "plan", "--source", made / "data.parquet")
        assert result.exit_code == 2
        assert "does not say what the length of a sample is" in result.stderr


def test_a_curriculum_is_checked_with_the_metrics(tmp_path):
    lengths = [1 + at % 9 for at in range(60)]
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", lengths)
    curriculum = {"schedule_type": "fixed_discrete", "difficulty": [4, 9], "max_step": [2]}
    make_plan(lengths, PlanConfig(max_tokens=20, curriculum=curriculum), out=tmp_path / "plan")
    alone = run(tmp_path / "plan")
    assert alone.exit_code == 0
    assert "not checked: its curriculum, which takes --metrics" in alone.stdout
    arguments = (tmp_path / "plan", "--metrics", metrics)
    assert "no sample before the curriculum admits it" in run(*arguments).stdout
    slower = curriculum | {"max_step": [50]}
    plans.forge(tmp_path / "plan", "plan.json", lambda header: header["config"].update(curriculum=slower))
    result = run(*arguments)
    assert result.exit_code == 1
    assert "of the curriculum admits up to 4" in result.stderr
    assert len(result.stderr.splitlines()) == 1


class TestSources:
    """A plan over two real data sets, held against their metrics and files by name."""

    @pytest.fixture
    def made(self, tmp_path):
        for name, lengths in (("web", [5, 3, 8, 2]), ("code", [4, 6])):
            tokens = [[1] * n for n in lengths]
            pq.write_table(pa.table({"input_ids": tokens}), tmp_path / f"{name}.parquet")
            analyze(tmp_path / f"{name}.parquet", out=tmp_path / f"m-{name}", tokens_column="input_ids")
        metrics = {name: tmp_path / f"m-{name}" for name in ("web", "code")}
        make_plan(metrics, PlanConfig(max_tokens=10), out=tmp_path / "plan")
        return tmp_path

    def named(self, option, folder, pattern):
        return [word for name in ("web", "code") for word in (option, f"{name}={folder}/{pattern % name}")]

    def test_all_of_it(self, made):
        metrics, files = self.named("--metrics", made, "m-%s"), self.named("--source", made, "%s.parquet")
        result = run(made / "plan", *metrics, *files)
        assert result.exit_code == 0, result.output
        assert "every length as in the metrics" in result.stdout
        assert "6 samples of the source measured again" in result.stdout
        alone = run(made / "plan", "--source", f"code={made}/code.parquet", "--json")
        assert json.loads(alone.stdout)["num_measured"] == 2

    def test_a_source_of_another_length_is_named(self, made):
        pq.write_table(pa.table({"input_ids": [[1] * 4]}), made / "code.parquet")
        result = run(made / "plan", *self.named("--source", made, "%s.parquet"))
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: code: the source has 1 rows, the plan is of 2")

    def test_swapped_sources_are_named(self, made):
        swapped = ["--source", f"web={made}/code.parquet", "--source", f"code={made}/web.parquet"]
        assert "Error: web: the source has 2 rows" in run(made / "plan", *swapped).stderr
        swapped = ["--metrics", f"web={made}/m-code", "--metrics", f"code={made}/m-web"]
        result = run(made / "plan", *swapped)
        assert result.exit_code == 1
        assert "source 'web' of the plan was made from metrics" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--metrics", "m-web"], "2 sources: give metrics for each: --metrics web=METRICS"),
            (["--metrics", "web=m-web"], "no metrics are given for 'code'"),
            (["--metrics", "web=m-web", "--metrics", "web=m-web"], "of source web is one directory"),
            (["--source", "pages=web.parquet"], "given for 'pages', the plan's sources are web, code"),
            (["--source", "web.parquet"], "2 sources: give data sets for each: --source web=SOURCE"),
        ],
    )
    def test_what_is_named_otherwise_is_refused(self, made, monkeypatch, arguments, message):
        monkeypatch.chdir(made)
        result = run("plan", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
