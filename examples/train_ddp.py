"""Data-parallel training by a plan, in plain torch.

    torchrun --nproc-per-node 2 examples/train_ddp.py

Each rank finds its micro-batches in the plan. Gradients are exchanged in a step's last micro-batch only, and
add up to that of the mean over all tokens of the step, however unevenly the ranks share them.
"""

import argparse
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from decoder import Decoder, DecoderConfig
from launched import any_batch, finish, plan_once, start
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import packer
from packer.runtime.sequence_parallel import UlyssesAttention

DATA = Path(__file__).parent / "data"


def main() -> None:
    """Plan what is not planned, train, say what happened."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--source", type=Path, default=DATA / "instructions.jsonl.gz", help="with a column text"
    )
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizer.json")
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="metrics and plan")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of one micro-batch, padding included")
    parser.add_argument("--steps", type=int, default=20, help="that this run takes")
    arguments = parser.parse_args()

    device = start()
    config = packer.PlanConfig(
        max_tokens=arguments.max_tokens, dp_size=dist.get_world_size(), grad_accum=2, lr_scaling="sqrt"
    )
    plan = plan_once(arguments.source, arguments.tokenizer, arguments.out, config)
    dataset = packer.open_dataset(arguments.source, metrics=arguments.out / "metrics")
    loader = packer.PlanLoader(plan, dataset, device=device)  # rank and world: torch.distributed's

    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=4096, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256
    )
    decoder = Decoder(shape, UlyssesAttention(scaled_dot_product_attention)).to(device)
    model = DistributedDataParallel(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    # Who reduces the gradients divides them too, or not; one backward tells what makes up for it.
    multiplier = packer.measure_loss_multiplier(model, lambda: model(any_batch(device)))
    for step in islice(loader, arguments.steps):
        if not step.num_loss_tokens:  # on every rank: a mean over no token is no number
            continue
        total = torch.zeros((), device=device)
        for batch in step:
            is_last = batch.accum + 1 == loader.grad_accum
            with nullcontext() if is_last else model.no_sync():
                loss_sum = model(batch)
                (loss_sum * multiplier / step.num_loss_tokens).backward()
            total += loss_sum.detach()
        with packer.scaled_lr(optimizer, step.lr_scale):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)  # for the report alone
        if dist.get_rank() == 0:
            loss = total.item() / step.num_loss_tokens
            print(f"step {step.index}: loss {loss:.6f} over {step.num_samples} samples")


if __name__ == "__main__":
    main()
    finish()
