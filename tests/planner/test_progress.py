"""Planning tells how far it is, and learns how long it will take."""

from itertools import groupby

import numpy as np
import pytest

from packer.planner import PlanConfig, make_plan
from packer.planner import progress as module
from packer.planner.progress import Pace, Phase

SEQLENS = np.random.default_rng(0).integers(1, 60, 3000)


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only element is the time."""
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def stages(**options):
    """Return what planning told, one entry a stage."""
    told = []
    make_plan(SEQLENS, PlanConfig(max_tokens=256, **options), progress=told.append)
    fractions = [state.fraction for state in told]
    assert fractions == sorted(fractions)
    assert fractions[0] >= 0
    assert 0.5 < fractions[-1] <= 1
    assert all(state.num_samples == len(SEQLENS) for state in told)
    return [name for name, _ in groupby(state.stage for state in told)]


def test_one_epoch():
    assert stages() == ["packing", "laying out", "writing", "flushing to disk"]


def test_several_epochs():
    one = ["packing epoch {} of 2", "laying out epoch {} of 2", "writing epoch {} of 2"]
    assert stages(epochs=2) == [*(name.format(n) for n in (1, 2) for name in one), "flushing to disk"]


def test_a_base_over_all_epochs_comes_before_they_are_written():
    told = stages(epochs=2, lr_scaling="sqrt")
    assert told.index("packing epoch 2 of 2") < told.index("writing epoch 1 of 2")
    assert told.count("packing epoch 1 of 2") == 1


def test_a_base_over_epochs_too_large_to_hold_takes_a_pass_of_its_own(monkeypatch):
    small = PlanConfig(max_tokens=90, epochs=2, lr_scaling="sqrt")
    held = make_plan([9] * 40, small)
    monkeypatch.setattr("packer.planner.epochs._HELD_PIECES", 0)
    assert make_plan([9] * 40, small).fingerprint == held.fingerprint
    told = stages(epochs=2, lr_scaling="sqrt")
    assert told.count("packing epoch 1 of 2") == 2
    assert told.index("writing epoch 1 of 2") > told.index("laying out epoch 2 of 2")


def test_a_curriculum_tells_stretch_by_stretch():
    curriculum = {
        "schedule_type": "fixed_linear",
        "min_difficulty": 10,
        "max_difficulty": 60,
        "total_curriculum_step": 200,
        "difficulty_step": 10,
    }
    told = []
    make_plan(SEQLENS, PlanConfig(max_tokens=256, curriculum=curriculum), progress=told.append)
    assert sum(state.phase == Phase.PACK for state in told) >= 5


def test_the_metrics_are_checked_and_record_batches_written(tmp_path):
    told = []
    many = np.full(70_000, 7)  # micro-batches: two record batches
    make_plan(many, PlanConfig(max_tokens=7), out=tmp_path / "plan", progress=told.append)
    assert [state.phase for state in told].count(Phase.WRITE) == 1 + 2
    assert told[-1].phase == Phase.FLUSH
    assert told[-1].seconds_left is not None


def test_times_are_learnt(clock):
    told = []
    pace = Pace(told.append, num_samples=10, num_epochs=2)
    pace.advance(0.0)
    assert (told[-1].phase, told[-1].seconds_left, told[-1].fraction) == (Phase.CHECK, None, 0.0)
    clock[0] += 4
    pace.begin(Phase.PACK, 0)
    # nothing but the check is known: all else in proportion
    assert told[-1].seconds_left == pytest.approx(4 * (2 * 4.0 + 2 * 2.0 + 2 * 3.5 + 1.0) / 0.4)
    clock[0] += 8
    pace.begin(Phase.LAY_OUT, 0)
    clock[0] += 2
    pace.begin(Phase.WRITE, 0)
    clock[0] += 3
    pace.advance(0.5)
    clock[0] += 3
    pace.begin(Phase.PACK, 1)
    flush = 1.0 * (4 + 8 + 2 + 6) / (0.4 + 4.0 + 2.0 + 3.5)
    assert told[-1].seconds_left == pytest.approx(8 + 2 + 6 + flush)
    assert told[-1].seconds == 20
    assert told[-1].fraction == pytest.approx(20 / (20 + 16 + flush))
    assert told[-1].stage == "packing epoch 2 of 2"


def test_the_share_that_is_done_never_falls(clock):
    told = []
    pace = Pace(told.append, num_samples=10, num_epochs=1)
    clock[0] += 1
    pace.begin(Phase.PACK, 0)
    clock[0] += 1
    pace.begin(Phase.LAY_OUT, 0)
    before = told[-1].fraction
    clock[0] += 1000  # far longer than expected
    pace.begin(Phase.WRITE, 0)
    assert told[-1].fraction >= before
    assert told[-1].seconds_left > 100
