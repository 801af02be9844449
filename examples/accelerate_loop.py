r"""A training loop of one's own under accelerate, on a plan.

    packer analyze examples/data/instructions.jsonl.gz --out metrics \
        --text-column text --tokenizer examples/data/tokenizer.json
    packer plan metrics --out plan --layout packed --max-tokens 4096 --dp-size 2 --grad-accum 2
    accelerate launch --num_processes 2 examples/accelerate_loop.py --metrics metrics --plan plan

Model, optimizer and schedule go through ``accelerator.prepare``; the loader does not.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from accelerate import Accelerator
from hf_trainer import DATA, small_decoder

import packer
from packer.integrations.accelerate import AcceleratedPlan
from packer.integrations.labels import shifted_labels


def main() -> None:
    """Train a small decoder, and print the loss of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, default=DATA / "instructions.jsonl.gz")
    parser.add_argument("--metrics", type=Path, default=Path("metrics"))
    parser.add_argument("--plan", type=Path, default=Path("plan"))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = small_decoder("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Steps are the plan's, so the schedule advances once a step: accelerate would do so once a process.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    dataset = packer.open_dataset(arguments.source, metrics=arguments.metrics)
    training = AcceleratedPlan(
        accelerator, packer.load_plan(arguments.plan), dataset, model=model, optimizer=optimizer
    )
    for step in islice(training.loader, arguments.steps):
        total = torch.zeros((), device=accelerator.device)
        for batch in training.microbatches(step):
            inputs = {
                name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch
            }
            # Without a cache, the samples of a packed row are told apart by their positions.
            logits = model(**inputs, use_cache=False).logits
            loss_sum = F.cross_entropy(logits.flatten(0, 1), shifted_labels(batch).flatten(), reduction="sum")
            training.backward(loss_sum, step)
            total += loss_sum.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        # For the report alone.
        loss = accelerator.reduce(total, "sum").item() / max(step.num_loss_tokens, 1)
        rate = training.rate.get_last_lr()[0]
        accelerator.print(
            f"step {step.index}: loss {loss:.6f} at rate {rate:.3g}, {step.num_samples} samples"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
