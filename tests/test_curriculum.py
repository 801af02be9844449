"""The curriculum's schedule: DeepSpeed's, in integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.curriculum import BEYOND, parse_curriculum
from packer.errors import ConfigError
from packer.planner import PlanConfig
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
    (
        {
            "schedule_type": "fixed_linear",
            "min_difficulty": 0,
            "max_difficulty": 2**40,
            "total_curriculum_step": 9,
            "difficulty_step": 1,
        },
        "difficulty_step 1 of seqlen makes 1099511627776 levels, over 1048576; raise it",
    ),
    (
        {
            "schedule_type": "fixed_root",
            "min_difficulty": 0,
            "max_difficulty": 9,
            "total_curriculum_step": 9,
            "difficulty_step": 1,
            "root_degree": 10**9,
        },
        "root_degree of seqlen is 1000000000; it must be an integer from 1 to 64",
    ),
    (
        {"schedule_type": "fixed_discrete", "difficulty": [2, 3], "max_step": [2**40]},
        "max_step of seqlen is 1099511627776",
    ),
    ({"curriculum_metrics": 3}, "must be a JSON object"),
]


@pytest.mark.parametrize(("curriculum", "named"), REFUSED)
def test_broken_curricula_are_refused(curriculum, named):
    with pytest.raises(ConfigError, match="--curriculum") as refusal:
        parse_curriculum(curriculum)
    assert named in str(refusal.value)
    with pytest.raises(ConfigError, match="--curriculum") as refusal:
        PlanConfig(max_tokens=9, curriculum=curriculum)
    assert named in str(refusal.value)
