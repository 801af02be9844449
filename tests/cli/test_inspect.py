"""``packer inspect``, ``packer compare`` and ``packer export`` as a user types them."""

import json
import re

import fsspec
import pytest
from click.testing import CliRunner

from cli.main import cli
from packer.planner import PlanConfig, make_plan
from tests import plans
from tests.sources.counted import forget


def run(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    plan, _ = plans.whole_plan()
    return plan.save(tmp_path / "plan").path


class TestInspect:
    def test_the_whole_plan(self, folder):
        result = run("inspect", folder)
        assert result.exit_code == 0, result.output
        for part in (
            "plan plan",
            "20 tokens a micro-batch, padding counted",
            "4 in 2 epochs",
            "36.0%",
            "too_long",
            "12.0%",
        ):
            assert part in result.stdout
        assert "▁" in result.stdout  # a sparkline
        assert max(map(len, result.stdout.splitlines())) <= 110

    def test_a_step(self, folder):
        result = run("inspect", folder, "--step", 1)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0].startswith("step 1 of epoch 0: 4 samples, 18 tokens, learning-rate factor 1.067")
        assert lines[1].startswith("mean length 4, the epoch's 5; design effect of its steps ")
        assert "2 × 7" in lines[3]
        assert "█" in lines[3]
        assert "░" in lines[3]
        assert "2 × 6" in lines[4]
        assert "2 × 9" in run("inspect", folder, "--step", 0, "--epoch", 1).stdout

    def test_copies_are_marked(self, tmp_path):
        for kind, word in (("keep", "filler"), ("fill", "repeat")):
            plan, _ = plans.copying_plan(kind)
            plan.save(tmp_path / kind)
            assert word in run("inspect", tmp_path / kind, "--step", 1).stdout

    def test_for_machines(self, folder):
        result = json.loads(run("inspect", folder, "--json").stdout)
        assert (result["num_steps"], result["config"]["dp_size"]) == (4, 2)
        result = json.loads(run("inspect", folder, "--step", 1, "--json").stdout)
        assert [row["sample_ids"] for row in result["microbatches"]] == [[4, 5], [6, 7]]

    def test_a_page(self, folder, tmp_path):
        result = run("inspect", folder, "--html", tmp_path / "report.html")
        assert result.exit_code == 0, result.output
        assert "report written" in result.stdout
        assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")

    @pytest.mark.parametrize("step", [-1, 2])
    def test_steps_that_are_not_planned(self, folder, step):
        for extra in ([], ["--json"]):
            result = run("inspect", folder, "--step", step, *extra)
            assert result.exit_code == 1
            assert f"step {step} is not planned: epoch 0 has steps 0 to 1" in result.stderr
        assert "epoch 7 is not planned" in run("inspect", folder, "--step", 0, "--epoch", 7).stderr

    def test_an_epoch_without_a_step(self, folder):
        result = run("inspect", folder, "--epoch", 1)
        assert result.exit_code == 2
        assert "--epoch says whose --step is meant" in result.stderr


class TestCompare:
    def test_a_plan_with_itself(self, folder):
        result = run("compare", folder, folder)
        assert result.exit_code == 0, result.output
        assert "the same plan" in result.stdout

    def test_two_plans(self, folder, tmp_path):
        plan, _ = plans.copying_plan("keep")
        plan.save(tmp_path / "other")
        result = run("compare", folder, tmp_path / "other")
        assert result.exit_code == 0, result.output
        assert "options differ" in result.stdout
        for part in ("max_tokens", "remainder", "padding", "dropped too_long", "-50.0%"):
            assert part in result.stdout
        found = json.loads(run("compare", folder, tmp_path / "other", "--json").stdout)
        assert found["options"]["max_tokens"] == [20, 64]
        assert found["effects"]["steps"] == {"left": 4, "right": 2, "change": -0.5}
        assert not found["same_content"]

    def test_a_choice_of_samples_is_a_number_and_no_blob(self, tmp_path):
        metrics = plans.write_metric(tmp_path / "metrics", "seqlen", [5] * 9)
        for name, ids in (("one", [1, 2, 3]), ("two", [4, 5, 6])):
            config = PlanConfig(max_tokens=10, sample_ids=ids)
            make_plan(metrics, config, out=tmp_path / name)
        shown = run("compare", tmp_path / "one", tmp_path / "two").stdout
        (line,) = [line for line in shown.splitlines() if "sample_ids" in line]
        left, right = re.fullmatch(r"sample_ids +3 \((\w{8})\) +3 \((\w{8})\) *", line).groups()
        assert left != right


class TestExport:
    @pytest.mark.parametrize("to", ["deepspeed", "npz", "parquet"])
    def test_each_format(self, folder, to):
        result = run("export", folder, "--to", to)
        assert result.exit_code == 0, result.output
        assert (folder.parent / f"plan-{to}" / "export.json").is_file()
        assert "Next: " in result.stdout
        result = run("export", folder, "--to", to)
        assert result.exit_code == 1
        assert "--overwrite" in result.stderr
        result = run("export", folder, "--to", to, "--overwrite", "--json")
        assert "epoch-0000" in json.loads(result.stdout)["files"][-1]

    def test_an_unknown_format(self, folder):
        assert run("export", folder, "--to", "csv").exit_code == 2


class TestUrls:
    URL = "counted://plans/plan"

    @pytest.fixture(autouse=True)
    def uploaded(self, folder):
        memory = fsspec.filesystem("memory")
        memory.put(str(folder), "memory://plans/plan", recursive=True)
        forget()
        yield
        memory.rm("/plans", recursive=True)

    def test_every_command_that_reads_a_plan_takes_a_url(self, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for command in (["inspect"], ["verify"], ["compare", folder]):
            result = run(*command, self.URL, "--json")
            assert result.exit_code == 0, result.output
        assert run("export", self.URL, "--to", "npz").exit_code == 0
        assert (tmp_path / "plan-npz").is_dir()

    def test_none_there_is_one_line(self):
        result = run("inspect", f"{self.URL}-none")
        assert result.exit_code == 1
        assert result.stderr == (
            "Error: counted://plans/plan-none holds no plan.json, so it is no plan; check the path\n"
        )
