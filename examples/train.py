"""Train a small decoder by a plan: the training loop to copy.

    python examples/train.py                 analyzes and plans the shipped data, then trains
    python examples/train.py                 again: goes on where the last checkpoint was taken

Put your own model and data set in; what is packer's are the lines with ``packer``, ``loader`` and ``step``.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from decoder import Decoder, DecoderConfig
from torch.nn.functional import scaled_dot_product_attention

import packer
from packer.runtime.sequence_parallel import UlyssesAttention

DATA = Path(__file__).parent / "data"


def main() -> None:
    """Plan what is not planned, resume what was begun, train, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, default=DATA / "instructions.jsonl.gz", help="JSONL with a column text"
    )
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizer.json")
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="metrics, plan and checkpoint")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of one micro-batch, padding included")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    metrics, checkpoint = arguments.out / "metrics", arguments.out / "checkpoint.pt"

    plan = make_or_load_plan(arguments, metrics, arguments.out / "plan")
    dataset = packer.open_dataset(arguments.source, metrics=metrics)
    loader = packer.PlanLoader(plan, dataset, device=arguments.device)

    torch.manual_seed(0)
    model = small_decoder().to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        loader.load_state_dict(state["loader"])

    while loader.epoch < plan.num_epochs:
        for step, loss in train_epoch(model, loader, optimizer, scheduler):
            print(f"epoch {step.epoch} step {step.index}: loss {loss:.3f} over {step.num_samples} samples")
            if (step.index + 1) % 10 == 0 or step.index + 1 == len(loader):
                parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
                torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)


def train_epoch(
    model: torch.nn.Module,
    loader: packer.PlanLoader,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> Iterator[tuple[packer.Step, float]]:
    """Play one epoch, or what is left of it; yield each step with its mean loss per token."""
    for step in loader:  # one optimizer update
        if not step.num_loss_tokens:  # on every rank: a mean over no token is no number
            continue
        total = torch.zeros((), device=loader.device)
        for batch in step:  # this rank's micro-batches, on the device
            loss_sum = model(batch)
            # The mean over the tokens of the whole step, not a mean of micro-batches' means.
            (loss_sum / step.num_loss_tokens).backward()
            total += loss_sum.detach()
        with packer.scaled_lr(optimizer, step.lr_scale):  # the schedule below keeps the base rate
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield step, total.item() / step.num_loss_tokens


def make_or_load_plan(arguments: argparse.Namespace, metrics: Path, plan: Path) -> packer.Plan:
    """Measure the samples and plan the epochs, once; the command line does the same."""
    if not metrics.exists():
        packer.analyze(arguments.source, out=metrics, text_column="text", tokenizer=arguments.tokenizer)
    if not plan.exists():
        config = packer.PlanConfig(max_tokens=arguments.max_tokens, epochs=arguments.epochs, grad_accum=2)
        packer.make_plan(metrics, config, out=plan)
    return packer.load_plan(plan)


def small_decoder() -> Decoder:
    """Return a decoder that trains on a CPU; its vocabulary is that of the shipped tokenizer."""
    config = DecoderConfig(
        vocab_size=4096, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=256
    )
    return Decoder(config, UlyssesAttention(scaled_dot_product_attention))


if __name__ == "__main__":
    main()
