"""The whole way on real data, on the CPU, in two minutes: analyze, plan, verify, train.

The same small decoder is then trained on the same data in the usual way, with shuffled batches of a fixed
number of samples, as many as fit into the same memory. Both runs use the same loader and the same loop
(``train.py``); only the plan differs. What is learnt from the same tokens should not.
"""

import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from train import DATA, small_decoder, train_epoch

import packer
from packer.runtime.ulysses import UlyssesAttention

OUT = Path("demo-output")
SOURCE, TOKENIZER = DATA / "instructions.jsonl.gz", DATA / "tokenizer.json"

MAX_TOKENS = 8448  # about what eight batches of eight shuffled samples hold: both runs take as many updates
MAX_SEQLEN = 1024
STEPS = 30
NUM_HELD_OUT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one training run did."""

    num_updates: int
    num_tokens: int
    num_padded_tokens: int
    largest_microbatch: int
    seconds: float
    design_effect: float
    """How much more the steps differ in their lengths than random samples would make them."""
    held_out_loss: float

    @property
    def padding(self) -> float:
        """Share of the tensors that is padding."""
        return 1 - self.num_tokens / self.num_padded_tokens


def main() -> None:
    """Go through all stages, twice through the last."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    metrics, plan, fixed, held_out = (OUT / name for name in ("metrics", "plan", "fixed", "held-out"))

    title(f"1. Measure {SOURCE.name}: real instructions and chats, see examples/data/README.md")
    run("analyze", SOURCE, "--text-column", "text", "--tokenizer", TOKENIZER, "--out", metrics)
    train_ids, held_out_ids = split(metrics)

    title("2. Plan: which samples are in which micro-batch of which step")
    limits = ["--max-tokens", MAX_TOKENS, "--max-seqlen", MAX_SEQLEN, "--too-long", "drop"]
    run("plan", metrics, "--out", plan, *limits, "--layout", "packed", "--sample-ids", train_ids)

    title("3. Verify: every invariant, from the files alone")
    run("verify", plan, "--metrics", metrics)

    title("4. The usual way, for comparison: shuffled batches of a fixed number of samples")
    num_samples = MAX_TOKENS // MAX_SEQLEN
    print(
        f"As many samples as surely fit: {num_samples}, since one of them may be {MAX_SEQLEN} long. So that "
        "both\ntake an update after as many tokens, several of these batches make a step.\n"
    )
    every = ["--packing", "next-fit", "--min-samples", num_samples, "--max-samples", num_samples]
    accumulated = ["--grad-accum", steps_of_equal_tokens(plan, metrics, num_samples)]
    run("plan", metrics, "--out", fixed, *limits, "--sample-ids", train_ids, *every, *accumulated)
    run("plan", metrics, "--out", held_out, *limits, "--order", "seqlen", "--sample-ids", held_out_ids)

    title(f"5. Train the same decoder on both, from the same weights, {STEPS} updates of the plan")
    planned = train(plan, metrics, held_out, num_tokens=None)
    shuffled = train(fixed, metrics, held_out, num_tokens=planned.num_tokens)

    title("6. Side by side")
    print_table(planned, shuffled)


def train(path: Path, metrics: Path, held_out: Path, *, num_tokens: int | None) -> Outcome:
    """Train for ``STEPS`` updates, or for as many as come nearest to ``num_tokens`` real tokens."""
    plan = packer.load_plan(path)
    dataset = packer.open_dataset(SOURCE, metrics=metrics)
    loader = packer.PlanLoader(plan, dataset)
    torch.manual_seed(0)
    model = small_decoder()
    model.attention = UlyssesAttention(attend_each)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=8)
    warm_up(model)
    seen = padded = largest = updates = 0
    start = time.perf_counter()
    for step, loss in train_epoch(model, loader, optimizer, scheduler):
        seen += step.num_tokens
        areas = areas_of(plan, step.index)
        padded += sum(areas)
        largest = max(largest, *areas)
        updates += 1
        if updates % 6 == 0:
            seconds = time.perf_counter() - start
            print(
                f"{path.name:>6}  update {updates:3}  {seen:8,} tokens  loss {loss:5.2f}  "
                f"{seen / seconds:7,.0f} real tokens/s"
            )
        if updates == STEPS if num_tokens is None else seen + step.num_tokens / 2 >= num_tokens:
            break
    seconds = time.perf_counter() - start
    return Outcome(
        num_updates=updates,
        num_tokens=seen,
        num_padded_tokens=padded,
        largest_microbatch=largest,
        seconds=seconds,
        design_effect=plan.header["epochs"][0]["design_effect"]["seqlen"],
        held_out_loss=evaluate(model, packer.PlanLoader(packer.load_plan(held_out), dataset)),
    )


def attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:
    """Attend within each sample of a packed row, or each row of a padded batch.

    (T, heads, dim) of each, as ``flash_attn_varlen_func`` takes them; torch has no kernel for it on a CPU.
    """
    lengths = cu_seqlens_q.diff().tolist()
    heads_first = (tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value))
    samples = (
        scaled_dot_product_attention(*(part[None] for part in sample), is_causal=causal)[0]
        for sample in zip(*heads_first, strict=True)
    )
    return torch.cat(list(samples), dim=1).transpose(0, 1)


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: packer.PlanLoader) -> float:
    """Return the mean loss per token over samples that no run has trained on."""
    total = num_loss_tokens = 0.0
    for batch in loader.microbatches():
        total += model(batch).item()
        num_loss_tokens += batch.num_loss_tokens
    return total / num_loss_tokens


def warm_up(model: torch.nn.Module) -> None:
    """Pay for what the first forward and backward set up before the clock runs."""
    ids = torch.zeros((1, 64), dtype=torch.long)
    model({"input_ids": ids, "labels": ids, "position_ids": torch.arange(64)[None]}).backward()
    model.zero_grad()


def areas_of(plan: packer.Plan, step: int) -> list[int]:
    """Return B × S, or T, of a step's micro-batches."""
    rows = [plan.epoch(0).microbatch(step * plan.grad_accum + accum) for accum in range(plan.grad_accum)]
    return [row.padded_seqlen * (1 if plan.layout == "packed" else row.num_samples) for row in rows]


def split(metrics: Path) -> tuple[Path, Path]:
    """Write down which samples to train on and which to hold out."""
    held_out = np.linspace(0, packer.open_metrics(metrics).num_samples - 1, NUM_HELD_OUT).astype(int)
    everything = np.arange(packer.open_metrics(metrics).num_samples)
    paths = OUT / "train-ids.npy", OUT / "held-out-ids.npy"
    np.save(paths[0], np.setdiff1d(everything, held_out))
    np.save(paths[1], held_out)
    return paths


def steps_of_equal_tokens(plan: Path, metrics: Path, num_samples: int) -> int:
    """Return how many batches of ``num_samples`` hold as many tokens as a step of the plan, on average."""
    seqlens = packer.open_metrics(metrics).metric("seqlen")
    of_a_batch = num_samples * seqlens[seqlens <= MAX_SEQLEN].mean()
    epoch = packer.load_plan(plan).epoch(0)
    of_a_step = np.mean([epoch.step(index).num_tokens for index in range(epoch.num_steps)])
    return max(1, round(of_a_step / of_a_batch))


def print_table(planned: Outcome, shuffled: Outcome) -> None:
    """Print what the two runs did, one column each."""
    rows = [
        ("real tokens trained on", "{:,}", lambda run: run.num_tokens),
        ("updates", "{}", lambda run: run.num_updates),
        ("largest micro-batch", "{:,}", lambda run: run.largest_microbatch),
        ("tokens computed, padding included", "{:,}", lambda run: run.num_padded_tokens),
        ("share of padding", "{:.1%}", lambda run: run.padding),
        ("seconds", "{:.1f}", lambda run: run.seconds),
        ("real tokens per second", "{:,.0f}", lambda run: run.num_tokens / run.seconds),
        ("design effect of a step", "{:.2f}", lambda run: run.design_effect),
        (f"loss on {NUM_HELD_OUT} samples held out", "{:.3f}", lambda run: run.held_out_loss),
    ]
    print(f"{'':36}{'planned':>12}{'fixed size':>12}")
    for name, form, value in rows:
        print(f"{name:36}{form.format(value(planned)):>12}{form.format(value(shuffled)):>12}")
    speedup = planned.num_tokens / planned.seconds / (shuffled.num_tokens / shuffled.seconds)
    print(f"\nThe same tokens {speedup:.1f} times as fast, in the same memory.")
    print(f"Everything is in {OUT}/; next: examples/train.py, the loop to copy.")


def run(*arguments: object) -> None:
    """Run a ``packer`` command and show it."""
    words = [str(argument) for argument in arguments]
    print(f"$ packer {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "packer", *words], check=True)
    print()


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


if __name__ == "__main__":
    main()
