"""What a training script does first where torchrun started several of it."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: its functions would keep the group as their default

import packer


def start() -> torch.device:
    """Join the process group; return this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def finish() -> None:
    """Leave the process group when every rank has done its work."""
    dist.barrier()
    dist.destroy_process_group()


def any_batch(device: torch.device) -> dict[str, torch.Tensor]:
    """Return a row, or a slice of one, for what does not depend on the data."""
    ids = torch.ones((1, 8), dtype=torch.int64, device=device)
    return {"input_ids": ids, "shift_labels": ids, "position_ids": torch.arange(8, device=device)[None]}


def plan_once(source: Path, tokenizer: Path, out: Path, config: packer.PlanConfig) -> packer.Plan:
    """Measure the samples and plan the epochs in ``out``, where that was not done before.

    ``packer analyze`` and ``packer plan`` do the same before the job starts, which is the better time.
    """
    metrics, plan = out / "metrics", out / "plan"
    _on_the_first_rank(
        lambda: packer.analyze(source, out=metrics, text_column="text", tokenizer=tokenizer), unless=metrics
    )
    _on_the_first_rank(lambda: packer.make_plan(packer.open_metrics(metrics), config, out=plan), unless=plan)
    return packer.load_plan(plan)


def _on_the_first_rank(make: Callable[[], object], *, unless: Path) -> None:
    if dist.get_rank() == 0 and not unless.exists():
        make()
    dist.barrier()
