"""The curriculum's schedule, and that no step uses a sample before it is admitted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ConfigError
from packer.planner import PlanConfig, make_plan
from packer.planner.curriculum import BEYOND, parse_curriculum
from tests import naive


@given(
    st.integers(0, 30),
    st.integers(0, 60),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_levels_equal_naive(least, span, total, multiple, degree):
    schedule = {
        "schedule_type": "fixed_root",
        "min_difficulty": least,
        "max_difficulty": max(1, least + span),
        "total_curriculum_step": total,
        "difficulty_step": multiple,
        "root_degree": degree,
    }
    (parsed,) = parse_curriculum(schedule)
    for step in range(2 * total):
        if schedule["max_difficulty"] > least:
            assert parsed.level_at(step) == naive.difficulty(step + 1, schedule)
    assert parsed.level_at(10**9) == schedule["max_difficulty"]


@pytest.mark.frameworks
@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3))
def test_levels_equal_deepspeeds(least, span, total, multiple, degree):
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    config = {"total_curriculum_step": total, "difficulty_step": multiple, "root_degree": degree}
    theirs = {
        "min_difficulty": least,
        "max_difficulty": least + span,
        "schedule_type": "fixed_root",
        "schedule_config": config,
    }
    (ours,) = parse_curriculum({"curriculum_metrics": {"seqlen": theirs}})
    scheduler = CurriculumScheduler(theirs)
    for step in range(1, 2 * total):
        share = step**1 * span**degree
        # where the exact value is an integer DeepSpeed's floating point may fall on either side of it
        exact = any(share == value**degree * total for value in range(2 * span + 2))
        if not exact:
            assert ours.level_at(step - 1) == scheduler.get_difficulty(step)


@pytest.mark.frameworks
def test_discrete_levels_equal_deepspeeds():
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    theirs = {
        "min_difficulty": 2,
        "max_difficulty": 9,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [2, 5, 9], "max_step": [3, 7]},
    }
    (ours,) = parse_curriculum(theirs)
    scheduler = CurriculumScheduler(theirs)
    assert [ours.level_at(step - 1) for step in range(1, 12)] == [
        scheduler.get_difficulty(step) for step in range(1, 12)
    ]


def test_admissions_by_value_and_percentile():
    discrete = {"schedule_type": "fixed_discrete", "difficulty": [2, 5], "max_step": [10]}
    (by_value,) = parse_curriculum(discrete)
    assert by_value.admissions(np.array([1, 2, 3, 5, 6, 9, 6])).tolist() == [
        0,
        0,
        10,
        10,
        BEYOND,
        BEYOND + 1,
        BEYOND,
    ]
    (by_percentile,) = parse_curriculum(
        discrete | {"difficulty_type": "percentile", "difficulty": [50, 100], "max_difficulty": 100}
    )
    values = np.arange(200)[::-1]
    assert np.array_equal(by_percentile.admissions(values), np.where(values < 100, 0, 10))
    assert by_percentile.admissions(np.arange(3)).tolist() == [10, 10, 10]


REFUSED = [
    ({"schedule_type": "fixed_linear"}, "min_difficulty"),
    ({"schedule_type": "fixed_discrete", "difficulty": [3, 2], "max_step": [1]}, "must rise"),
    ({"schedule_type": "fixed_discrete", "difficulty": [2, 3], "max_step": [1, 2]}, "all but the last"),
    ({"schedule_type": "fixed_discrete", "difficulty": [2, 3], "colour": 1}, "'colour'"),
    ({"schedule_type": "fixed_discrete", "difficulty": [2], "difficulty_type": "rank"}, "choose value"),
    ({"schedule_type": "fixed_discrete", "difficulty": [2], "enabled": False}, "enabled"),
    ({"curriculum_metrics": {}}, "names no metric"),
    ({"curriculum_metrics": 3}, "must be a JSON object"),
]


@pytest.mark.parametrize(("curriculum", "named"), REFUSED)
def test_broken_curricula_are_refused(curriculum, named):
    with pytest.raises(ConfigError, match="--curriculum") as refusal:
        PlanConfig(max_tokens=9, curriculum=curriculum)
    assert named in str(refusal.value)


def step_rows(plan, epoch=0):
    return [plan.epoch(epoch).step(step) for step in range(plan.epoch(epoch).num_steps)]


def longest_by_step(plan, epoch=0):
    return [step.max_seqlen for step in step_rows(plan, epoch)]


@pytest.mark.parametrize("packing", ["windowed", "next-fit"])
@pytest.mark.parametrize("balance", ["none", "tokens"])
@pytest.mark.parametrize("pipeline", [False, True])
def test_no_step_uses_what_is_not_admitted(packing, balance, pipeline):
    seqlens = np.random.default_rng(0).integers(1, 101, 5000)
    curriculum = {
        "schedule_type": "fixed_linear",
        "min_difficulty": 20,
        "max_difficulty": 100,
        "total_curriculum_step": 60,
        "difficulty_step": 10,
    }
    config = PlanConfig(
        max_tokens=400,
        dp_size=2,
        grad_accum=2,
        epochs=2,
        packing=packing,
        balance=balance,
        same_num_samples=pipeline,
        same_seqlen=pipeline,
        curriculum=curriculum,
    )
    plan = make_plan(seqlens, config)
    (schedule,) = parse_curriculum(curriculum)
    first = longest_by_step(plan)
    assert len(first) > 60
    assert all(longest <= schedule.level_at(step) for step, longest in enumerate(first))
    assert first[0] <= 20
    assert "curriculum_raises" not in plan.header["epochs"][0]["figures"]
    # steps are counted over epochs: by the second one everything is admitted
    assert max(longest_by_step(plan, 1)[:20]) > 90
    # many short samples first, few long ones later
    sizes = [step.num_samples for step in step_rows(plan)]
    assert sum(sizes[:10]) > 2 * sum(sizes[-10:])


def test_a_dry_pool_raises_the_difficulty_and_says_so():
    seqlens = np.array([1] * 8 + [50] * 400)
    curriculum = {
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 50], "max_step": [1000]},
    }
    config = PlanConfig(max_tokens=100, dp_size=2, curriculum=curriculum, remainder="keep")
    plan = make_plan(seqlens, config)
    figures = plan.header["epochs"][0]["figures"]
    assert figures["curriculum_raises"] == 1
    assert figures["curriculum_first_raise"] <= 4
    assert plan.header["epochs"][0]["num_samples"] == len(seqlens)
