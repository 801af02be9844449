"""How many updates the Trainer makes, and what is said where the arguments name another number."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from packer.errors import ConfigError
from packer.integrations.hf_limits import choose_max_steps
from packer.planner import PlanConfig, make_plan


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
