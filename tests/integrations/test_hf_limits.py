"""How many updates the Trainer makes, and what is said where the arguments name another number."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from packer.errors import ConfigError
from packer.integrations.hf_eval_batches import require_each_sample_once
from packer.integrations.hf_limits import choose_max_steps
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader


def arguments(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"max_steps": -1, "num_train_epochs": 3.0, "process_index": 0} | given)


@pytest.fixture
def plan():
    return make_plan([4] * 12, PlanConfig(max_tokens=8, epochs=2))


def test_the_plans_steps_are_trained_and_other_default_epochs_are_mentioned(plan, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose_max_steps(arguments(num_train_epochs=2), plan) == 12
        assert choose_max_steps(arguments(max_steps=5), plan) == 5
        assert choose_max_steps(arguments(process_index=1), plan) == 12
        assert not caplog.records
        assert choose_max_steps(arguments(), plan) == 12
    (record,) = caplog.records
    assert "the plan holds 2 epochs" in record.getMessage()
    assert "set num_train_epochs=2" in record.getMessage()


def test_epochs_that_were_asked_for_are_held_against_the_plan(plan):
    with pytest.raises(ConfigError, match="num_train_epochs=4"):
        choose_max_steps(arguments(num_train_epochs=4), plan)
    with pytest.raises(ConfigError, match="max_steps=13"):
        choose_max_steps(arguments(max_steps=13), plan)


@pytest.mark.parametrize("total", [{"total_steps": 7}, {"total_tokens": 100}])
def test_a_plan_that_ends_with_a_total_is_one_epoch_of_that_many_updates(total):
    sources = {"web": [4] * 30, "code": [3] * 5}
    plan = make_plan(sources, PlanConfig(max_tokens=12, mix={"web": 0.7, "code": 0.3}, **total))
    steps = choose_max_steps(arguments(num_train_epochs=1), plan)
    assert steps == plan.epoch(0).num_steps
    loader = PlanLoader(plan, {name: [None] * len(lengths) for name, lengths in sources.items()})
    assert steps == len(loader)
    if "total_steps" in total:
        assert steps == 7
    option = "--" + next(iter(total)).replace("_", "-")
    with pytest.raises(ConfigError, match=rf"max_steps=99, .*plan more with {option}, or lower"):
        choose_max_steps(arguments(max_steps=99), plan)


def test_an_evaluation_passes_once_through_its_sources():
    once = make_plan({"web": [4] * 6, "code": [3] * 4}, PlanConfig(max_tokens=12, remainder="keep"))
    require_each_sample_once(once, "eval_plan")
    twice = make_plan({"web": [4] * 6}, PlanConfig(max_tokens=12, remainder="keep", repeat={"web": 2.0}))
    with pytest.raises(
        ConfigError, match="eval_plan passes through web 2 times, and an evaluation counts each"
    ):
        require_each_sample_once(twice, "eval_plan")
