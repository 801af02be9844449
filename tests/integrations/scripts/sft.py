"""TRL's SFTTrainer on a plan, with and without adapters; one function a test."""

import json
import os
import sys
from typing import Any

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainingArguments
from trl import DPOTrainer, SFTConfig, SFTTrainer

from packer.errors import PackerError
from packer.integrations.hf import PlanTrainer, PlanTrainerMixin
from packer.integrations.trl import PlanSFTTrainer
from tests.integrations import tiny
from tests.integrations.processes import report

DEFAULTS: dict[str, Any] = {
    "per_device_eval_batch_size": 4,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "disable_tqdm": True,
    "use_cpu": True,
    "max_steps": 1,
}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"<{i}>": i for i in range(tiny.VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<1>", pad_token="<2>")


def make_trainer(folder: str, data, plan, *, model=None, config=None, **options: Any) -> PlanSFTTrainer:
    given = {"gradient_checkpointing": False, "bf16": False, "max_length": None}
    given["gradient_accumulation_steps"] = 4 // int(os.environ["WORLD_SIZE"])
    return PlanSFTTrainer(
        plan=plan,
        model=model or tiny.decoder(),
        processing_class=tokenizer(),
        train_dataset=data,
        args=SFTConfig(output_dir=folder, **DEFAULTS | given | (config or {})),
        **options,
    )


def update(trainer, data, by_hand: torch.nn.Module) -> dict[str, Any]:
    """Make one update, and compare what it changed with the gradient worked out by hand."""
    plan = trainer.plan
    loss, gradient = tiny.step_gradient(data, tiny.step_samples(plan), by_hand)
    gradient = gradient * plan.epoch(0).step(0).lr_scale
    before = tiny.weights(trainer.model)
    trainer.train()
    change = before - tiny.weights(trainer.model)
    return {
        "error": float((change - gradient).abs().max() / gradient.abs().max()),
        "frozen": float((change == 0).double().mean()),
        "loss": trainer.state.log_history[0]["loss"],
        "expected_loss": loss,
        "rate": trainer.state.log_history[0]["learning_rate"],
        "lr_scale": plan.epoch(0).step(0).lr_scale,
    }


def gradients(folder: str) -> dict[str, Any]:
    """One step's gradient: of all weights, of an adapter that TRL makes, of one that was made before."""
    data = tiny.Tokens(prompts=True)
    packed, padded = (tiny.plan(data, loss_tokens=True, layout=layout) for layout in ("packed", "padded"))
    found = {"whole": update(make_trainer(folder, data, packed), data, tiny.decoder())}
    for layout, plan in (("packed", packed), ("padded", padded)):
        trainer = make_trainer(folder, data, plan, peft_config=LoraConfig(**LORA))
        by_hand = get_peft_model(tiny.decoder(), LoraConfig(**LORA))
        by_hand.load_state_dict(trainer.model.state_dict())
        found[f"adapter, {layout}"] = update(trainer, data, by_hand)
    adapted = get_peft_model(tiny.decoder(), LoraConfig(**LORA))
    args = TrainingArguments(
        output_dir=folder, **DEFAULTS, gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"])
    )
    stock = PlanTrainer(plan=packed, model=adapted, args=args, train_dataset=data)
    found["adapter, stock"] = update(stock, data, adapted)
    return found


def evaluation(folder: str) -> dict[str, Any]:
    """The loss, planned and plain, before and after training."""
    data = tiny.Tokens(21, prompts=True)
    plan = tiny.plan(data, layout="packed", remainder="keep", loss_tokens=True)
    trainer = make_trainer(
        folder,
        data,
        plan,
        eval_dataset={"planned": data, "plain": data},
        eval_plan={"planned": plan},
        config={"max_steps": -1, "num_train_epochs": 1, "eval_strategy": "epoch", "learning_rate": 0.1},
    )
    expected = tiny.mean_loss(tiny.decoder(), data, range(21)).item()
    found = trainer.evaluate()
    trainer.train()
    after = [entry for entry in trainer.state.log_history if "epoch" in entry]
    return {
        "before": [found["eval_planned_loss"], found["eval_plain_loss"]],
        "expected": expected,
        "after": [
            next(entry[f"eval_{name}_loss"] for entry in reversed(after) if f"eval_{name}_loss" in entry)
            for name in ("planned", "plain")
        ],
    }


def refusals(folder: str) -> dict[str, str]:
    """What TRL would decide anew is refused by the name of its argument; so are losses over two answers."""
    data = tiny.Tokens()
    plan = tiny.plan(data, dp_size=1, grad_accum=4)
    cases: dict[str, dict[str, Any]] = {
        "packing": {"config": {"packing": True}},
        "padding_free": {"config": {"padding_free": True}},
        "max_length": {"config": {"max_length": 8}},
        "dataset_text_field": {"config": {"dataset_text_field": "content"}},
        "assistant_only_loss": {"config": {"assistant_only_loss": True}},
        "completion_only_loss": {"config": {"completion_only_loss": True}},
        "pad_to_multiple_of": {"config": {"pad_to_multiple_of": 8}},
        "formatting_func": {"formatting_func": str},
        "train_dataset": {"data": [{"text": "no ids"}]},
        "a PROMPT_TUNING adapter": {
            "model": get_peft_model(
                tiny.decoder(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
            )
        },
    }
    refused = {}
    for reason, options in cases.items():
        try:
            make_trainer(folder, options.pop("data", data), plan, **options)
        except PackerError as error:
            refused[reason] = f"{type(error).__name__}: {error}"
    for other in (SFTTrainer, DPOTrainer):
        kind = type("Planned", (PlanTrainerMixin, other), {})
        try:
            kind(plan=plan, model=tiny.decoder(), train_dataset=data)
        except PackerError as error:
            refused[other.__name__] = f"{type(error).__name__}: {error}"
    make_trainer(folder, data, plan, config={"max_length": 12})  # holds the longest: nothing would be cut
    return refused


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[2:])
    report(json.loads(json.dumps(result)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
