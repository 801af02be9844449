"""Does fine-tuning by a plan learn what plain fine-tuning learns? One model, the same chats, three trainers.

The chats and questions of examples/data are one file of chats, the loss is on what the assistant writes, and
every tenth chat is held out. From the same weights, with the same chats an epoch and as nearly as they come
the same tokens a step, train

- plain: transformers' own Trainer, shuffled, a fixed number of chats a batch, padded;
- padded: PlanTrainer on a padded plan;
- packed: PlanTrainer on a plan of packed rows, ``mixed``.

    PYTHONPATH=. python benchmarks/fine_tuning_curves.py --out curves.jsonl           (one GPU)
    PYTHONPATH=. python benchmarks/fine_tuning_curves.py --out curves.jsonl --tiny    (CPU)

The table goes to the standard output, a line a training to ``--out``. A seed sets the weights and the order.
The loss of a quarter is the mean over its steps of each one's loss per loss token, as the Trainer logs it;
the held-out loss is the mean over all loss tokens held out, in 32 bits, by the same code for each.
"""

import argparse
import gzip
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import packer
from packer.integrations.hf import PlanTrainer

DATA = Path(__file__).parent.parent / "examples" / "data"
HOLD_OUT_EVERY = 10
"""One chat in so many is held out."""
SEEDS = (0, 1)
IGNORED = -100

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of a run."""

    hidden_size: int
    num_layers: int
    take_every: int
    """Use one chat in so many of the files."""
    epochs: int
    packed_tokens: int
    """``max_tokens`` of the packed plan."""
    padded_tokens: int
    """``max_tokens`` of the padded plan: larger, so that with its padding it holds as many real ones."""
    step_tokens: int
    plain_batch_size: int
    """Chats of a batch of the plain Trainer, at most; half as many at least."""
    learning_rate: float
    warmup_steps: int


FULL = Setting(
    hidden_size=320,
    num_layers=6,
    take_every=1,
    epochs=6,
    packed_tokens=2560,
    padded_tokens=2944,
    step_tokens=8192,
    plain_batch_size=20,
    learning_rate=1e-3,
    warmup_steps=10,
)
TINY = Setting(
    hidden_size=64,
    num_layers=2,
    take_every=8,
    epochs=2,
    packed_tokens=2560,
    padded_tokens=2944,
    step_tokens=4096,
    plain_batch_size=20,
    learning_rate=3e-3,
    warmup_steps=3,
)


class StepLog:
    """In front of a Trainer: notes the tokens and the loss tokens of every step that it takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[int, int]] = []

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_loss_tokens = super().get_batch_samples(*args, **kwargs)
        self.steps.append((sum(_num_tokens(batch) for batch in batches), int(num_loss_tokens)))
        return batches, num_loss_tokens


class PlainTrainer(StepLog, Trainer):
    """The stock Trainer."""


class PlannedTrainer(StepLog, PlanTrainer):
    """The Trainer on a plan."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a training")
    parser.add_argument("--tiny", action="store_true", help="a small model and fewer chats, for the CPU")
    arguments = parser.parse_args()
    setting = TINY if arguments.tiny else FULL
    runs = []
    with tempfile.TemporaryDirectory() as folder, arguments.out.open("w") as out:
        samples, metrics = read_samples(setting, Path(folder))
        for seed in SEEDS:
            for run in compare(setting, samples, metrics, seed, Path(folder)):
                runs.append(run)
                out.write(json.dumps(run | {"setting": asdict(setting)}) + "\n")
                out.flush()
    print("\n".join(table(runs)))


def read_samples(setting: Setting, folder: Path) -> tuple[list[Sample], packer.metrics.Metrics]:
    """Measure the chats, and make each one's ids and labels once, for all trainings."""
    rows = read_rows("chats")
    for row in read_rows("questions"):
        turns = [{"from": "human", "value": row["question"]}, {"from": "gpt", "value": row["answer"]}]
        rows.append({"conversations": turns, "tools": "[]"})
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows[:: setting.take_every]), encoding="utf-8")
    result = packer.analyze(
        chats, out=folder / "metrics", messages_column="conversations", tokenizer=DATA, workers=1
    )
    print(f"loss on {result.num_loss_tokens:,} of {result.main.total:,} tokens ({result.trained_part})\n")
    metrics = packer.open_metrics(folder / "metrics")
    dataset = packer.open_dataset(chats, metrics=metrics, tokenizer=str(DATA))
    return [dataset[row] for row in range(len(dataset))], metrics


def read_rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def compare(
    setting: Setting, samples: list[Sample], metrics: packer.metrics.Metrics, seed: int, folder: Path
) -> list[dict[str, Any]]:
    """Train all three; return a record each."""
    trained = [row for row in range(len(samples)) if row % HOLD_OUT_EVERY]
    held_out = samples[::HOLD_OUT_EVERY]
    plans = {}
    for layout, max_tokens in (("padded", setting.padded_tokens), ("packed", setting.packed_tokens)):
        config = packer.PlanConfig(
            max_tokens=max_tokens,
            step_tokens=setting.step_tokens,
            layout=layout,
            packing="mixed" if layout == "packed" else None,
            epochs=setting.epochs,
            seed=seed,
            sample_ids=trained,
            remainder="keep",  # as the plain Trainer, which leaves nothing out
        )
        plans[layout] = packer.make_plan(metrics, config, out=folder / f"{layout}-{seed}")
    # The plain Trainer takes an epoch in as many steps as the plans do in the mean, or nearly so.
    num_steps = [epoch["num_steps"] for plan in plans.values() for epoch in plan.header["epochs"]]
    batch_size, accum = plain_step(math.ceil(len(trained) / np.mean(num_steps)), setting.plain_batch_size)

    runs = []
    for name in ("plain", "padded", "packed"):
        model = make_model(setting, seed)  # the same weights each time
        if name == "plain":
            trainer: Any = PlainTrainer(
                model=model,
                args=training_arguments(setting, seed, folder, accum, batch_size),
                train_dataset=[samples[row] for row in trained],
                data_collator=pad,
            )
        else:
            plan = plans[name]
            trainer = PlannedTrainer(
                plan=plan,
                model=model,
                args=training_arguments(setting, seed, folder, plan.grad_accum, 1),
                train_dataset=samples,
            )
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        # The Trainer leaves 16-bit arithmetic in the forward of its model; a fresh one computes in 32.
        learnt = make_model(setting, seed)
        learnt.load_state_dict(model.state_dict())
        runs.append(
            {
                "trainer": name,
                "seed": seed,
                "parameters": model.num_parameters(),
                "grad_accum": trainer.args.gradient_accumulation_steps,
                **curve(trainer),
                "held_out_loss": held_out_loss(learnt.to(trainer.args.device), held_out),
                "seconds": seconds,
            }
        )
    return runs


def plain_step(num_chats: int, most: int) -> tuple[int, int]:
    """Return the batch size and the accumulation whose product comes nearest to ``num_chats``."""
    sizes = range(most // 2, most + 1)
    choices = [(size, max(1, round(num_chats / size))) for size in sizes]
    return min(choices, key=lambda choice: abs(math.prod(choice) - num_chats))


def make_model(setting: Setting, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=setting.hidden_size,
        intermediate_size=3 * setting.hidden_size,
        num_hidden_layers=setting.num_layers,
        num_attention_heads=setting.hidden_size // 32,
        max_position_embeddings=4096,
        tie_word_embeddings=setting is TINY,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def training_arguments(
    setting: Setting, seed: int, folder: Path, accum: int, batch_size: int
) -> TrainingArguments:
    on_gpu = torch.cuda.is_available() and setting is not TINY
    return TrainingArguments(
        output_dir=str(folder / "trained"),
        num_train_epochs=setting.epochs,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accum,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=setting.warmup_steps,
        seed=seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    )


def pad(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """``(B, S)``: a sample a row, padded on the right."""
    ids = [torch.as_tensor(sample["input_ids"]).long() for sample in samples]
    labels = [torch.as_tensor(sample["labels"]).long() for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def curve(trainer: Any) -> dict[str, Any]:
    """Tokens until the end of each quarter of the steps, and the loss in it."""
    losses = np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    tokens, loss_tokens = np.array(trainer.steps).T
    assert len(losses) == len(tokens), (len(losses), len(tokens))
    quarters = np.array_split(np.arange(len(losses)), 4)
    return {
        "num_steps": len(losses),
        "mean_step_tokens": float(tokens.mean()),
        "tokens": [int(tokens[: quarter[-1] + 1].sum()) for quarter in quarters],
        "loss_tokens": [int(loss_tokens[: quarter[-1] + 1].sum()) for quarter in quarters],
        "loss": [float(losses[quarter].mean()) for quarter in quarters],
        "loss_by_tokens": [
            float(np.average(losses[quarter], weights=loss_tokens[quarter])) for quarter in quarters
        ],
    }


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, held_out: Sequence[Sample]) -> float:
    """Mean over all loss tokens: one chat at a time, so that neither padding nor packing has a part in it."""
    model.eval()
    total, count = 0.0, 0
    for sample in held_out:
        batch = {name: values.to(model.device) for name, values in pad([sample]).items()}
        logits = model(input_ids=batch["input_ids"]).logits[0, :-1].float()
        labels = batch["labels"][0, 1:]
        total += float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        count += int((labels != IGNORED).sum())
    return total / count


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table: a row a training."""
    lines = [
        "| seed | trainer | steps | tokens a step | thousand tokens at 25 / 50 / 75 / 100 % "
        "| training loss of each quarter | held-out loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        tokens = " / ".join(f"{number / 1000:,.0f}" for number in run["tokens"])
        losses = " / ".join(f"{loss:.3f}" for loss in run["loss"])
        lines.append(
            f"| {run['seed']} | {run['trainer']} | {run['num_steps']} | {run['mean_step_tokens']:,.0f} "
            f"| {tokens} | {losses} | {run['held_out_loss']:.4f} |"
        )
    return lines


def _num_tokens(batch: dict[str, Any]) -> int:
    """Tokens of a micro-batch without padding; those of a filler, which trains nothing, are none."""
    labels = batch["labels"] if "labels" in batch else batch["shift_labels"]
    if not bool((labels != IGNORED).any()):
        return 0
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())


if __name__ == "__main__":
    main()
