"""Hugging Face's Trainer on a plan: loss, rate, resume, refusals; alone, with DeepSpeed, and with Ulysses."""

from typing import Any

import pytest

from tests.integrations.processes import SCRIPTS, run_script

pytestmark = pytest.mark.frameworks

FLOAT32 = 3e-6


def run_case(name: str, *arguments: object, processes: int = 2) -> list[Any]:
    return run_script(SCRIPTS / "trainer.py", name, *arguments, processes=processes)


def assert_exact(result: dict[str, float], *, logged: bool = True) -> None:
    """The update is rate × factor × the gradient of the mean over all tokens of the step."""
    assert result["error"] < FLOAT32
    assert result["rate"] == pytest.approx(result["lr_scale"])
    if logged:
        assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)


def test_one_steps_gradient_is_that_of_one_big_batch(tmp_path):
    for rank in run_case("gradients", tmp_path):
        assert len(rank) == 8
        for result in rank.values():
            assert_exact(result)


def test_a_mixture_is_trained_for_the_steps_that_its_total_gives(tmp_path):
    for rank in run_case("mixture", tmp_path):
        assert_exact(rank["first"])
        assert rank["steps"] == 6
        assert max(rank["passes"]) > 1


def test_a_models_own_loss_does_not_matter(tmp_path):
    for rank in run_case("losses_of_their_own", tmp_path):
        assert rank.keys() == {"shifts", "mean of its own", "experts", "pairs"}
        for result in rank.values():
            assert_exact(result)


def test_steps_without_a_token_to_learn_change_nothing(tmp_path):
    (run,) = run_case("untrainable", tmp_path, processes=1)
    assert run["untouched"]
    assert run["trained"]
    assert run["finite"]
    first, *_, last = run["losses"]
    assert first == 0 < last


def test_a_trial_saves_its_place_beside_its_checkpoints_and_is_held_against_the_plan(tmp_path):
    (trial,) = run_case("search", tmp_path, processes=1)
    steps = range(2, trial["steps"] + 1, 2)
    assert trial["saved"] == sorted(f"trial-7/checkpoint-{step}/packer_position.json" for step in steps)
    assert trial["rates"] == pytest.approx(trial["expected"])
    assert trial["refused"].keys() == {"num_train_epochs", "gradient_accumulation_steps"}
    for argument, message in trial["refused"].items():
        assert message.startswith(f"ConfigError: {argument}")


def test_the_factor_goes_with_any_schedule(tmp_path):
    for rank in run_case("schedules", tmp_path):
        assert len(rank) == 5
        for found in rank.values():
            assert found["rates"] == pytest.approx(found["expected"])
            assert found["logged"] == pytest.approx(found["expected"])
            assert found["epochs"][-1] == 2
            assert found["evaluated"] == [1, 2]


def assert_resumed(rank: dict[str, Any]) -> None:
    """A run broken off twice is the run that was not."""
    runs = rank["runs"]
    assert len(runs["whole"]["samples"]) == rank["steps"]
    joined = {
        key: runs["whole"][key][:3] + runs["first"][key] + runs["second"][key] for key in ("samples", "rates")
    }
    assert joined["samples"] == runs["whole"]["samples"]
    assert joined["rates"] == pytest.approx(runs["whole"]["rates"])
    assert runs["second"]["weights"] == pytest.approx(runs["whole"]["weights"], rel=1e-6)
    assert rank["refused"]["other plan"].startswith("StateError")
    assert "packer_position.json" in rank["refused"]["no position"]


def test_a_checkpoint_goes_on_at_the_very_step(tmp_path):
    for rank in run_case("resume", tmp_path):
        assert_resumed(rank)


def test_what_contradicts_the_plan_is_refused(tmp_path):
    (refused,) = run_case("refusals", tmp_path, processes=1)
    assert refused.keys() == {
        "max_steps",
        "num_train_epochs",
        "gradient_accumulation_steps",
        "auto_find_batch_size",
        "Weighted.compute_loss",
    }
    for argument, message in refused.items():
        assert message.startswith(f"ConfigError: {argument}")


def test_every_zero_stage_gives_that_gradient_and_a_configured_schedule_its_factor(tmp_path):
    for rank in run_case("deepspeed_gradients", tmp_path):
        schedule = rank.pop("config schedule")
        assert schedule["rates"] == pytest.approx(schedule["expected"])
        assert len(rank) == 5
        for result in rank.values():
            # accelerate takes each process for the only one on the CPU, and logs what that one knows.
            assert_exact(result, logged=False)


def test_a_checkpoint_of_deepspeed_goes_on_at_the_very_step(tmp_path):
    for rank in run_case("deepspeed_resume", tmp_path):
        assert_resumed(rank)


def test_ranks_that_share_rows_give_that_gradient_on_every_zero_stage(tmp_path):
    for rank in run_case("deepspeed_ulysses", tmp_path, 0, 1, 2, 3):
        evaluation = rank.pop("evaluation")
        assert evaluation["found"] == pytest.approx(evaluation["expected"], rel=1e-5)
        assert rank.keys() == {"zero 0", "zero 1", "zero 2", "zero 3", "packed"}
        for result in rank.values():
            assert_exact(result)


def test_attention_that_would_mix_samples_up_is_refused_by_name(tmp_path):
    for rank in run_case("deepspeed_refusals", tmp_path):
        assert "attn_implementation='eager'" in rank["eager"]
        assert "attn_implementation='sdpa' with packed rows" in rank["sdpa"]
        assert "--layout packed, or with --max-samples 1" in rank["rows"]
