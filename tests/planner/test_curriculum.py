"""No step uses a sample before it is admitted, and a pool that runs dry says so."""

import numpy as np
import pytest

from packer.curriculum import parse_curriculum
from packer.planner import PlanConfig, make_plan


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
    assert plan.header["epochs"][0]["figures"]["curriculum_raises"] == []
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
    (raised,) = figures["curriculum_raises"]
    assert raised["step"] <= 4
    assert (raised["as_of"], raised["beyond"]) == (1000, 0)
    assert plan.header["epochs"][0]["num_samples"] == len(seqlens)
