"""Rehearsals and calibrations on several ranks, wrapped as they train: one answer, and nobody waits."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import packer
from packer.budget import HostDevice, trial
from tests.budget.models import VOCABULARY
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow  # each starts processes that import the planner

LENGTHS = np.random.default_rng(0).integers(2, 100, 600)


class Plain(nn.Module):
    """Without statistics of a batch, which DDP would broadcast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def wrapped(kind: str) -> dict[str, Any]:
    model: nn.Module = Plain()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {
        "train_step": lambda batch: model(batch["input_ids"], batch["labels"]),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
    }


def rehearsals(_: torch.device, kind: str, limits: list[int]) -> dict[str, Any]:
    trained = wrapped(kind)
    before = [getattr(p, "_local_tensor", p).detach().clone() for p in trained["model"].parameters()]
    plan = packer.make_plan(LENGTHS, packer.PlanConfig(max_tokens=1000, dp_size=2, num_shapes=5))
    device = HostDevice(limits[dist.get_rank()])
    found = packer.rehearse(plan, device=device, **trained)
    after = [getattr(p, "_local_tensor", p).detach() for p in trained["model"].parameters()]
    return {
        "fits": found.fits,
        "fits_here": found.fits_here,
        "text": str(found),
        "peaks": [one.peak.allocated for one in found.others],
        "is_as_before": all(map(torch.equal, before, after)) and not trained["optimizer"].state,
    }


def test_every_rank_tells_and_the_first_sums_up() -> None:
    for kind in ("ddp", "fsdp2"):
        first, second = run_ranks(rehearsals, 2, kind, [10**9, 10**9])
        assert first["fits"]
        assert second["fits"]
        assert first["peaks"] == second["peaks"]
        assert len(first["peaks"]) == 2
        assert "rank 1: peak" in first["text"]
        assert "rank 1: peak" not in second["text"]
        assert first["is_as_before"]
        assert second["is_as_before"]


def test_what_does_not_fit_one_rank_is_played_by_none() -> None:
    (needed, _) = run_ranks(rehearsals, 2, "ddp", [10**9, 10**9])[0]["peaks"]
    first, second = run_ranks(rehearsals, 2, "ddp", [10**9, int(needed * 0.8)])
    assert not first["fits"]
    assert not second["fits_here"]
    assert "rank 1: peak" in first["text"]
    assert "would take about" in second["text"]
    assert "plan with --max-tokens" in second["text"]


def calibrations(_: torch.device, kind: str) -> dict[str, Any]:
    trial.LAP_SECONDS = 0.0  # a clock means nothing here
    limit = 3_000_000 if dist.get_rank() == 0 else 2_000_000
    config = packer.PlanConfig(max_tokens=128, dp_size=2, step_tokens=8192)
    found = packer.calibrate(seqlens=LENGTHS, config=config, device=HostDevice(limit), **wrapped(kind))
    return {
        "largest": found.largest,
        "sure": found.is_largest_sure,
        "command": found.command,
        "trials": [(one.budget, one.fits) for one in found.trials],
        "speeds": [one.tokens_per_second for one in found.speeds],
    }


def test_a_calibration_goes_by_the_smallest_rank_and_all_get_one_answer() -> None:
    first, second = run_ranks(calibrations, 2, "ddp")
    assert first == second
    assert first["sure"]
    assert 800 < first["largest"] < 2000
    assert "--dp-size 2" in first["command"]
