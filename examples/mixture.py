"""Train on a mixture of sources for a number of tokens: plan it, check it, watch the loss of each source.

    python examples/mixture.py                  5 million tokens: half PEPs, 30% code, 20% instructions
    python examples/mixture.py --steps 20       trains the first steps only

The sources are Parquet and JSON Lines with text in columns of different names; each has metrics of its own.
They are smaller than what is asked of them, so that the plan passes through each several times.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from train import DATA, small_decoder

import packer
from packer.runtime.masks import block_diagonal_mask

SOURCES = {
    "peps": (DATA / "peps.parquet", "text"),
    "code": (DATA / "cpython.parquet", "content"),
    "instructions": (DATA / "instructions.jsonl.gz", "text"),
}
MIX = "peps=0.5,code=0.3,instructions=0.2"


def main() -> None:
    """Measure each source, plan them together, verify, train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("mixture-output"), help="metrics and plan")
    parser.add_argument("--total-tokens", default="5M")
    parser.add_argument("--steps", type=int, help="stop after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    metrics = {name: arguments.out / f"metrics-{name}" for name in SOURCES}
    plan = arguments.out / "plan"

    for name, (source, column) in SOURCES.items():
        if not metrics[name].exists():
            text = ["--text-column", column, "--tokenizer", DATA / "tokenizer.json"]
            run("analyze", source, *text, "--out", metrics[name])
    named = [f"{name}={directory}" for name, directory in metrics.items()]
    if not plan.exists():
        amount = ["--mix", MIX, "--total-tokens", arguments.total_tokens]
        # A document longer than a row is split; a step is 8 rows of 2,048 tokens.
        rows = ["--layout", "packed", "--max-tokens", 2048, "--max-seqlen", 2048, "--too-long", "split"]
        run("plan", *named, "--out", plan, *amount, *rows, "--grad-accum", 8)
    run("verify", plan, *(word for directory in named for word in ("--metrics", directory)))
    train(packer.load_plan(plan), metrics, arguments.steps, arguments.device)


def train(plan: packer.Plan, metrics: dict[str, Path], num_steps: int | None, device: str) -> None:
    """Play the plan, and print the loss of each source every ten steps."""
    dataset = packer.open_dataset({name: source for name, (source, _) in SOURCES.items()}, metrics=metrics)
    loader = packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=1, device=device)
    torch.manual_seed(0)
    model = small_decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    # The schedule goes by the tokens that were trained on; it ends with the plan.
    rate = packer.PlanLR(decay, plan, loader, by="tokens")
    names = [source.name for source in plan.sources]
    for step in loader:
        sums, counts = torch.zeros(2, len(names) + 1, device=device)
        for batch in step:
            losses = model(batch, by_position=True, attn_mask=block_diagonal_mask(batch))
            (losses.sum() / step.num_loss_tokens).backward()
            of_position = source_of_positions(batch, len(names))
            sums.index_add_(0, of_position, losses.detach().flatten())
            counts.index_add_(0, of_position, (losses.detach().flatten() > 0).float())
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if step.index % 10 == 0 or step.index + 1 == num_steps:
            shown = zip(names, (sums / counts.clamp(min=1)).tolist(), strict=False)  # padding is no source
            by_source = ", ".join(f"{name} {loss:.3f}" for name, loss in shown)
            tokens = step.tokens_before + step.num_tokens
            print(f"step {step.index}, {tokens:,} tokens, rate {rate.get_last_lr()[0]:.6f}: {by_source}")
        if step.index + 1 == num_steps:
            break


def source_of_positions(batch: packer.runtime.Batch, num_sources: int) -> Tensor:
    """Return (T,) the source of each position of a packed row; padding at its end counts as one more."""
    segments = batch["cu_seqlens"].diff()
    of_segment = torch.full_like(segments, num_sources)
    of_segment[: batch.num_samples] = torch.from_numpy(batch.sources)
    return of_segment.repeat_interleave(segments)


def run(*command: object) -> None:
    """Run packer as its user would."""
    subprocess.run([sys.executable, "-m", "packer", *map(str, command)], check=True)


if __name__ == "__main__":
    main()
