"""The examples of budgets and few shapes, and the benchmarks beside them, run without a GPU."""

import json
import re

import pytest

from tests.examples.launches import EXAMPLES, run

BENCHMARKS = EXAMPLES.parent / "benchmarks"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ["plain", pytest.param("transformers", marks=pytest.mark.frameworks)])
def test_a_budget_is_found_planned_with_and_rehearsed(model: str) -> None:
    printed = run(
        EXAMPLES / "choose_budget.py",
        *("--model", model, "--gigabytes", "0.25", "--step-tokens", "16384", "--max-seconds", "20"),
    )
    assert re.search(r"Next: packer plan \S+ --out plan --max-tokens \d+", printed)
    assert "The plan fits: its peak is" in printed


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_plan_of_few_shapes_trains(layout: str) -> None:
    printed = run(EXAMPLES / "few_shapes.py", "--layout", layout, "--steps", "3")
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_calibrated_budget_is_held_against_brute_force() -> None:
    printed = run(
        BENCHMARKS / "calibrate_gpu.py", "--tiny", "--max-seconds", "20", "--only", "tiny packed recomputed"
    )
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    found = {line.pop("what"): line for line in lines}
    assert list(found) == ["calibrate", "rehearse", "train", "brute force"]
    assert found["rehearse"]["fits"]
    assert not found["train"]["out_of_memory"]
    assert found["train"]["told_by_actual"] == pytest.approx(1, abs=0.03)
    assert 0.97 <= found["brute force"]["found"] <= 1


def test_every_way_of_small_micro_batches_is_timed() -> None:
    printed = run(BENCHMARKS / "few_shapes_gpu.py", "--tiny", "--seconds", "1", "--only", "8 × 4k")
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["variant"] for line in lines] == [
        f"8 × 4k {layout}, {kind}" for layout in ("packed", "padded") for kind in ("eager", "graphs")
    ]
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert lines[1]["shapes"] == 1
