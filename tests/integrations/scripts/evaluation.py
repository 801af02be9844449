"""Evaluation under Hugging Face's Trainer on a plan; one function a test."""

import json
import math
import os
import sys
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainingArguments

from packer.errors import PackerError
from packer.integrations.hf import PlanTrainer
from tests.integrations import tiny
from tests.integrations.processes import report

DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
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
}


class Metrics:
    """What ``compute_metrics`` is handed: rows, and how often the next token is the likeliest one."""

    def __call__(self, found) -> dict[str, float]:
        labels = found.label_ids[:, 1:]
        hits = (found.predictions[:, :-1].argmax(-1) == labels)[labels != -100]
        return {"rows": len(labels), "tokens": hits.size, "hits": int(hits.sum())}


def make_trainer(folder: str, *, model=None, callbacks=None, data=None, plan=None, **options: Any):
    own = {
        name: options.pop(name)
        for name in ("eval_dataset", "eval_plan", "compute_metrics", "data_collator")
        if name in options
    }
    data = data or tiny.Tokens(40)
    return PlanTrainer(
        plan=plan or tiny.plan(data, dp_size=1),
        model=model or tiny.decoder(),
        args=TrainingArguments(output_dir=folder, **DEFAULTS | options),
        train_dataset=data,
        callbacks=callbacks,
        **own,
    )


def alone(data: tiny.Tokens) -> dict[str, float]:
    """Work out loss and metrics from the samples one by one."""
    model = tiny.decoder()
    hits = tokens = 0
    with torch.no_grad():
        loss = tiny.mean_loss(model, data, range(len(data))).item()
        for sample in data.samples:
            ids = torch.from_numpy(sample["input_ids"]).long()
            labels = torch.from_numpy(sample["labels"])[1:]
            likeliest = model(input_ids=ids[None]).logits[0, :-1].argmax(-1)
            hits += int((likeliest == labels)[labels != -100].sum())
            tokens += int((labels != -100).sum())
    return {"loss": loss, "rows": len(data), "tokens": tokens, "hits": hits}


def figures(folder: str) -> dict[str, Any]:
    """Loss and metrics of every way to evaluate, by name, beside what the samples give one by one."""
    data = tiny.Tokens(21, prompts=True)
    keep = {"dp_size": 2, "grad_accum": 2, "remainder": "keep", "loss_tokens": True}
    padded = tiny.plan(data, **keep)
    packed = tiny.plan(data, layout="packed", **keep)
    assert padded.header["epochs"][0]["num_fillers"] > 0
    world = int(os.environ["WORLD_SIZE"])
    trained = {"plan": tiny.plan(tiny.Tokens(40)), "gradient_accumulation_steps": 4 // world}
    several = make_trainer(
        folder,
        eval_dataset={"plain": data, "padded": data, "packed": data},
        eval_plan={"padded": padded, "packed": packed},
        compute_metrics=Metrics(),
        **trained,
    )
    found = several.evaluate()
    seconds = {name: found[f"eval_{name}_runtime"] for name in ("plain", "padded", "packed")}
    alone_planned = {"eval_dataset": data, "eval_plan": packed, "dataloader_num_workers": 1}
    only = make_trainer(folder, **alone_planned, **trained).evaluate()
    predicted = several.predict(data)
    order = [
        np.array_equal(row[: len(sample["labels"])], sample["labels"])
        for row, sample in zip(predicted.label_ids, data.samples, strict=True)
    ]
    return {
        "alone": alone(data),
        "found": {
            **{
                name: {key: found[f"eval_{name}_{key}"] for key in ("loss", "rows", "tokens", "hits")}
                for name in seconds
            },
            "predict": {
                key.removeprefix("test_"): predicted.metrics[key]
                for key in ("test_loss", "test_rows", "test_tokens", "test_hits")
            },
        },
        "only": only["eval_loss"],
        "only steps": only["eval_steps_per_second"] * only["eval_runtime"],
        "in order": all(order),
        "samples": {name: found[f"eval_{name}_samples_per_second"] * seconds[name] for name in seconds},
        "steps": {name: found[f"eval_{name}_steps_per_second"] * seconds[name] for name in seconds},
        "planned steps": {
            name: plan.epoch(0).num_steps * 2 for name, plan in {"padded": padded, "packed": packed}.items()
        },
        "same model": torch.equal(tiny.weights(several.model), tiny.weights(tiny.decoder())),
    }


def training(folder: str) -> dict[str, Any]:
    """Stopping early, the best model at the end, and how many samples a second were trained on."""
    data, held_out = tiny.Tokens(80), tiny.Tokens(9, prompts=True)
    trainer = make_trainer(
        folder,
        data=data,
        plan=tiny.plan(data, dp_size=1, grad_accum=2, epochs=2),
        eval_dataset={"held out": held_out, "other": tiny.Tokens(3)},
        eval_plan={"held out": tiny.plan(held_out, dp_size=1, grad_accum=1, loss_tokens=True)},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_held out_loss",
        learning_rate=4.0,  # it soon gets worse
    )
    result = trainer.train()
    history = trainer.state.log_history
    losses = [entry["eval_held out_loss"] for entry in history if "eval_held out_loss" in entry]
    steps = trainer.state.global_step
    samples = sum(trainer.plan.epoch(0).step(step).num_samples for step in range(steps))
    return {
        "losses": losses,
        "planned": trainer.state.max_steps,
        "best": trainer.state.best_metric,
        "loaded": tiny.mean_loss(trainer.model, held_out, range(9)).item(),
        "samples": [result.metrics["train_samples_per_second"] * result.metrics["train_runtime"], samples],
        "logged": next(entry for entry in history if "train_runtime" in entry)["train_samples_per_second"]
        == result.metrics["train_samples_per_second"],
        "finite": all(map(math.isfinite, losses)),
    }


def refusals(folder: str) -> dict[str, str]:
    """What could not be evaluated right, at construction."""
    data = tiny.Tokens(21)
    one = {"dp_size": 1, "grad_accum": 2}
    cases: dict[str, dict[str, Any]] = {
        "drops": {"eval_plan": tiny.plan(data, **one), "eval_dataset": data},
        "repeats": {"eval_plan": tiny.plan(data, remainder="fill", **one), "eval_dataset": data},
        "epochs": {"eval_plan": tiny.plan(data, remainder="keep", epochs=2, **one), "eval_dataset": data},
        "no data": {"eval_plan": tiny.plan(data, remainder="keep", **one)},
        "names": {
            "eval_plan": {"b": tiny.plan(data, remainder="keep", **one)},
            "eval_dataset": {"a": data},
        },
        "other data": {
            "eval_plan": tiny.plan(data, remainder="keep", **one),
            "eval_dataset": tiny.Tokens(20),
        },
        "texts": {"eval_dataset": {"a": data, "b": [{"text": "no ids"}]}},
        "no sample": {"eval_dataset": []},
        "by batch": {"eval_dataset": data, "batch_eval_metrics": True},
        "inputs": {
            "eval_plan": tiny.plan(data, remainder="keep", layout="packed", **one),
            "eval_dataset": data,
            "include_for_metrics": ["inputs"],
        },
    }
    refused = {}
    for reason, options in cases.items():
        try:
            make_trainer(folder, plan=tiny.plan(tiny.Tokens(40), dp_size=1), **options)
        except PackerError as error:
            refused[reason] = f"{type(error).__name__}: {error}"
    return refused


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[2:])
    report(json.loads(json.dumps(result)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
