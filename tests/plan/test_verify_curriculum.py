"""Verification holds every step against what the curriculum admits by then."""

import re

import numpy as np
import pytest

from packer.curriculum import parse_curriculum
from packer.errors import ConfigError, InvariantError, MetricsError, PlanError
from packer.plan import verify_curriculum, verify_plan
from packer.planner import PlanConfig, make_plan
from tests import plans

LINEAR = {
    "schedule_type": "fixed_linear",
    "min_difficulty": 10,
    "max_difficulty": 60,
    "total_curriculum_step": 60,
    "difficulty_step": 10,
}
SLOW = LINEAR | {"total_curriculum_step": 100_000}
HALF = {"schedule_type": "fixed_discrete", "difficulty": [10, 30], "max_step": [20]}
PERCENTILES = LINEAR | {"difficulty_type": "percentile", "min_difficulty": 20, "max_difficulty": 100}
CURRICULA = {
    "by value": LINEAR,
    "by percentile": PERCENTILES,
    "a pool that runs dry": SLOW,
    "percentiles that run dry": PERCENTILES | {"total_curriculum_step": 5000},
    "what is never admitted": HALF,
    "percentiles that are never admitted": HALF | {"difficulty_type": "percentile"},
    "another metric": {"curriculum_metrics": {"rarity": LINEAR | {"max_difficulty": 100}}},
    "two metrics": {"curriculum_metrics": {"seqlen": HALF, "rarity": PERCENTILES}},
}
OPTIONS = {
    "whole": {},
    "filtered": {"filter_min": 5, "filter_max": 55, "remainder": "fill"},
    "truncated": {"max_seqlen": 40, "too_long": "truncate"},
    "split": {"max_seqlen": 25, "too_long": "split", "dp_size": 3},
    "dropped": {"max_seqlen": 40, "too_long": "drop", "dp_size": 2, "balance": "tokens", "remainder": "keep"},
    "packed": {"layout": "packed", "max_seqlen": 33, "too_long": "split"},
}


def data(tmp_path, num_samples=1200):
    """Return lengths, and a metrics directory with them and another metric."""
    generator = np.random.default_rng(5)
    seqlens, rarity = generator.integers(1, 61, num_samples), generator.integers(1, 120, num_samples)
    folder = plans.write_metric(tmp_path / "metrics", "seqlen", [int(n) for n in seqlens])
    plans.write_metric(folder, "rarity", [int(n) for n in rarity])
    return seqlens, rarity, folder


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("curriculum", CURRICULA.values(), ids=CURRICULA)
def test_plans_of_the_planner_hold(tmp_path, curriculum, options):
    seqlens, rarity, metrics = data(tmp_path)
    config = PlanConfig(max_tokens=120, epochs=2, curriculum=curriculum, **options)
    plan = make_plan(seqlens, config, metrics={"rarity": rarity})
    assert verify_plan(plan, metrics=metrics).with_curriculum
    assert not verify_plan(plan).with_curriculum


def forged(tmp_path, curriculum, edit, **options):
    """Make a plan, change its header, and return what verification says."""
    seqlens, rarity, metrics = data(tmp_path)
    config = PlanConfig(max_tokens=120, dp_size=2, curriculum=curriculum, **options)
    plan = make_plan(seqlens, config, metrics={"rarity": rarity}).save(tmp_path / "plan")
    verify_plan(plan, metrics=metrics)
    plans.forge(tmp_path / "plan", "plan.json", edit)
    with pytest.raises(InvariantError) as refusal:
        verify_plan(tmp_path / "plan", metrics=metrics)
    return plan, seqlens, rarity, str(refusal.value)


PLACE = r"epoch (\d+), step (\d+), micro-batch (\d+) of rank (\d+) \(row (\d+)\), sample (\d+): "


def slower(header):
    header["config"]["curriculum"] = SLOW


def test_a_sample_that_is_used_too_early_is_named(tmp_path):
    plan, seqlens, _, message = forged(tmp_path, LINEAR, slower)
    found = re.fullmatch(
        PLACE + r"its seqlen is (\d+), step (\d+) of the curriculum admits up to (\d+)", message
    )
    epoch, step, accum, rank, row, sample, difficulty, again, admitted = map(int, found.groups())
    (schedule,) = parse_curriculum(SLOW)
    assert again == step
    assert admitted == schedule.level_at(step) < difficulty == seqlens[sample]
    microbatch = plan.epoch(epoch).microbatch(row)
    assert (microbatch.step, microbatch.accum, microbatch.dp_rank) == (step, accum, rank)
    assert sample in microbatch.sample_ids
    # it is the first one
    earlier = [plan.epoch(epoch).microbatch(at) for at in range(row)]
    assert all(before.max_seqlen <= schedule.level_at(before.step) for before in earlier)


def test_steps_are_counted_over_epochs(tmp_path):
    seqlens, _, metrics = data(tmp_path)
    curriculum = LINEAR | {"total_curriculum_step": 250}
    plan = make_plan(seqlens, PlanConfig(max_tokens=120, epochs=2, curriculum=LINEAR))
    first = plan.epoch(0).num_steps
    plan.save(tmp_path / "plan")
    plans.forge(tmp_path / "plan", "plan.json", lambda header: header["config"].update(curriculum=curriculum))
    with pytest.raises(InvariantError, match="epoch 0"):
        verify_plan(tmp_path / "plan", metrics=metrics)
    assert first > 250  # by the second epoch everything is admitted
    assert verify_plan(plan, metrics=metrics).with_curriculum


def test_a_raise_that_is_not_recorded_is_missed(tmp_path):
    def forget(header):
        raises = header["epochs"][0]["figures"]["curriculum_raises"]
        assert raises
        raises.clear()

    *_, message = forged(tmp_path, SLOW, forget)
    assert re.match(PLACE + r"its seqlen is \d+, step \d+ of the curriculum admits up to 10", message)


def test_a_raise_that_is_recorded_too_late_is_missed(tmp_path):
    def delay(header):
        raised = header["epochs"][0]["figures"]["curriculum_raises"][-1]
        assert raised["beyond"] > 0
        raised["step"] += 5

    plan, *_, message = forged(tmp_path, HALF, delay)
    step = plan.header["epochs"][0]["figures"]["curriculum_raises"][-1]["step"]
    assert step <= int(re.match(PLACE, message)[2]) < step + 5


def test_percentiles_and_other_metrics_are_named_as_such(tmp_path):
    def slow_percentiles(header):
        header["config"]["curriculum"]["curriculum_metrics"]["rarity"]["total_curriculum_step"] = 10_000

    _, _, rarity, message = forged(
        tmp_path, {"curriculum_metrics": {"rarity": dict(PERCENTILES)}}, slow_percentiles
    )
    found = re.fullmatch(
        PLACE + r"its rarity is percentile (\d+), step \d+ of the curriculum admits up to percentile (\d+)",
        message,
    )
    sample, percentile, admitted = map(int, found.groups()[5:])
    below = int(np.count_nonzero(rarity < rarity[sample]))
    within = int(np.count_nonzero(rarity <= rarity[sample]))
    assert below // 12 + 1 <= percentile <= (within - 1) // 12 + 1
    assert admitted == 20


def test_a_plan_that_does_not_say_how_samples_were_split(tmp_path):
    seqlens, rarity, metrics = data(tmp_path)
    config = PlanConfig(max_tokens=120, curriculum=LINEAR, max_seqlen=25, too_long="split")
    plan = make_plan(seqlens, config, metrics={"rarity": rarity})
    assert plan.header["max_seqlen"] == 25
    plan.save(tmp_path / "plan")
    for limit, message in (
        (None, "max_seqlen is null"),
        (1, "max_seqlen is 1 in plan.json, the options give 25"),
    ):
        plans.forge(tmp_path / "plan", "plan.json", lambda header, to=limit: header.update(max_seqlen=to))
        with pytest.raises(PlanError, match=message):
            verify_plan(tmp_path / "plan", metrics=metrics)


def test_a_curriculum_that_is_none(tmp_path):
    seqlens, _, metrics = data(tmp_path)
    make_plan(seqlens, PlanConfig(max_tokens=120, curriculum=LINEAR)).save(tmp_path / "plan")
    for curriculum, kind, message in (
        ([1], PlanError, "config.curriculum is"),
        ({}, ConfigError, "schedule_type of seqlen is None"),
        (LINEAR | {"metric": "nothing"}, MetricsError, "no metric 'nothing'"),
    ):
        plans.forge(
            tmp_path / "plan",
            "plan.json",
            lambda header, to=curriculum: header["config"].update(curriculum=to),
        )
        with pytest.raises(kind, match=message):
            verify_plan(tmp_path / "plan", metrics=metrics)


def test_pieces_of_a_plan_that_says_it_truncates(tmp_path):
    seqlens, _, metrics = data(tmp_path)
    config = PlanConfig(max_tokens=120, curriculum=PERCENTILES, max_seqlen=25, too_long="split")
    make_plan(seqlens, config).save(tmp_path / "plan")
    plans.forge(tmp_path / "plan", "plan.json", lambda header: header["config"].update(too_long="truncate"))
    with pytest.raises(InvariantError, match="is percentile"):
        verify_plan(tmp_path / "plan", metrics=metrics)


def test_raises_that_are_no_raises_are_refused(tmp_path):
    seqlens, _, _ = data(tmp_path)
    plan = make_plan(seqlens, PlanConfig(max_tokens=120, curriculum=HALF))
    for number, odd in enumerate((3, [1], [{"step": 1}], [{"step": -1, "as_of": 0, "beyond": 0}])):
        folder = tmp_path / str(number)
        plan.save(folder)
        plans.forge(
            folder,
            "plan.json",
            lambda header, odd=odd: header["epochs"][0]["figures"].update(curriculum_raises=odd),
        )
        with pytest.raises(PlanError, match="curriculum_raises"):
            verify_plan(folder)


def test_progress_counts_both_passes(tmp_path):
    seqlens, _, metrics = data(tmp_path)
    plan = make_plan(seqlens, PlanConfig(max_tokens=120, curriculum=LINEAR))
    told = []
    verify_plan(plan, metrics=metrics, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == 2 * plan.epoch(0).num_microbatches


@pytest.mark.parametrize("whole", [3, 10, 100])
@pytest.mark.parametrize("size", [0, 2, 9, 10, 11, 250])
def test_percentiles_are_parts_of_equal_size(whole, size):
    values = np.random.default_rng(size).integers(0, 7, size)
    found = verify_curriculum._percentiles(values, whole)
    ordered = sorted(range(size), key=lambda at: (values[at], at))
    for place, at in enumerate(ordered):
        expected = whole if size < whole else min(place // (size // whole) + 1, whole)
        assert found[at] == expected
