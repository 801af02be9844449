"""TRL's SFTTrainer on a plan: our data set, adapters, evaluation; what it would decide anew is refused."""

from typing import Any

import pytest

from tests.integrations.processes import SCRIPTS, run_script

pytestmark = pytest.mark.frameworks


def run_case(name: str, folder: object, *, processes: int) -> list[Any]:
    return run_script(SCRIPTS / "sft.py", name, folder, processes=processes)


def test_one_steps_gradient_is_that_of_one_big_batch_with_and_without_adapters(tmp_path):
    for rank in run_case("gradients", tmp_path, processes=2):
        assert rank.keys() == {"whole", "adapter, packed", "adapter, padded", "adapter, stock"}
        for name, result in rank.items():
            assert result["error"] < 3e-6
            assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-5)
            assert result["rate"] == pytest.approx(result["lr_scale"])
            assert (result["frozen"] > 0.5) == name.startswith("adapter")


def test_evaluation_planned_and_plain_gives_the_loss_of_the_samples_one_by_one(tmp_path):
    for rank in run_case("evaluation", tmp_path, processes=2):
        assert rank["before"] == pytest.approx([rank["expected"]] * 2, rel=1e-5)
        planned, plain = rank["after"]
        assert planned == pytest.approx(plain, rel=1e-5)
        assert planned < rank["expected"]


def test_what_trl_would_decide_anew_is_refused_by_name(tmp_path):
    (refused,) = run_case("refusals", tmp_path, processes=1)
    expected = {
        "packing": "plan with --layout packed",
        "padding_free": "plan with --layout packed",
        "max_length": "max_length=8 is below the 12 tokens",
        "dataset_text_field": "--text-column content",
        "assistant_only_loss": "--train-on assistant",
        "completion_only_loss": "--train-on completion",
        "pad_to_multiple_of": "--pad-multiple 8",
        "formatting_func": "--text-template",
        "train_dataset": "packer.open_dataset",
        "a PROMPT_TUNING adapter": "such as LoRA",
    }
    others = {
        "SFTTrainer": "take packer.integrations.trl: PlanSFTTrainer",
        "DPOTrainer": "play the plan with PlanLoader",
    }
    assert refused.keys() == expected.keys() | others.keys()
    for argument, cure in expected.items():
        assert refused[argument].startswith(f"ConfigError: {argument}")
        assert cure in refused[argument]
    for name, cure in others.items():
        assert refused[name].startswith(f"ConfigError: {name}.compute_loss")
        assert cure in refused[name]
