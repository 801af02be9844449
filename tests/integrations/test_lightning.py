"""Lightning on a plan: nothing sharded, cut or read ahead; its checkpoints keep the place."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.processes import SCRIPTS, run_script

pytestmark = pytest.mark.frameworks


def run_case(name: str, folder: object, processes: int = 2) -> list[Any]:
    return run_script(SCRIPTS / "lightning_runs.py", name, processes, folder, processes=processes)


def test_one_steps_gradient_is_that_of_one_big_batch(tmp_path):
    for rank in run_case("gradient", tmp_path):
        assert rank["padded"] < 3e-6
        assert rank["packed"] < 3e-6


def test_epochs_of_different_lengths_are_played_whole_with_the_factor_under_a_schedule(tmp_path):
    for rank in run_case("epochs", tmp_path):
        assert len(set(rank["lengths"])) > 1
        assert rank["samples"] == rank["planned"]
        assert rank["rates"] == pytest.approx(rank["expected"])


def test_a_checkpoint_goes_on_at_the_very_step(tmp_path):
    for rank in run_case("resume", tmp_path):
        played = 2 * rank["stop"]
        assert len(rank["rest"]) > 2
        assert rank["rest"] == rank["whole"][played:]
        whole, rest = rank["rates"]
        assert rest == pytest.approx(whole[rank["stop"] :])
        assert rank["error"] < 1e-7
        assert rank["refused"]["other plan"].startswith("StateError")


def test_a_strategy_that_divides_by_something_else_is_refused_by_name():
    from packer.errors import ConfigError
    from packer.integrations.lightning import PlanDataModule
    from packer.planner import PlanConfig, make_plan

    class DeepSpeedStrategy:
        pass

    plan = make_plan([3, 4, 5], PlanConfig(max_tokens=8))
    data = PlanDataModule(plan, [None, None, None])
    data.trainer = SimpleNamespace(strategy=DeepSpeedStrategy())
    with pytest.raises(ConfigError, match="DeepSpeedStrategy"):
        data.setup("fit")


def test_what_would_cut_an_epoch_or_a_step_short_is_refused(tmp_path):
    (refused,) = run_case("refusals", tmp_path, processes=1)
    assert refused.keys() == {"accumulate_grad_batches", "limit_train_batches", "max_epochs"}
    for argument, message in refused.items():
        assert message.startswith("ConfigError: " + argument)
