"""A worker's own memory stays what it is: the plan is mapped, not copied."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packer.plan import PlannedEpoch, PlanSource, load_plan, write_plan
from packer.runtime import PlanLoader
from tests import plans

NUM_SAMPLES = 20_000_000
PER_MICROBATCH = 2_000
EPOCHS = 2
SEQLEN = 3


class OneTokens:
    """Twenty million samples that take no memory."""

    def __init__(self) -> None:
        self._tokens = np.arange(SEQLEN)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return {"input_ids": self._tokens}


def big_epoch(epoch: int) -> PlannedEpoch:
    rows = NUM_SAMPLES // PER_MICROBATCH
    ids = np.roll(np.arange(NUM_SAMPLES, dtype=np.int32), epoch * 7)
    return PlannedEpoch(
        sample_ids=ids,
        seqlens=np.full(NUM_SAMPLES, SEQLEN, np.int32),
        starts=None,
        offsets=np.arange(0, NUM_SAMPLES + 1, PER_MICROBATCH),
        padded_seqlens=np.full(rows, SEQLEN, np.int32),
        costs=np.full(rows, SEQLEN * PER_MICROBATCH),
        is_filler=np.zeros(rows, np.bool_),
        is_repeat=np.zeros(rows, np.bool_),
        step_num_samples=np.full(rows, PER_MICROBATCH),
        step_num_tokens=np.full(rows, PER_MICROBATCH * SEQLEN),
        step_num_loss_tokens=np.full(rows, PER_MICROBATCH * (SEQLEN - 1)),
        step_max_seqlen=np.full(rows, SEQLEN, np.int32),
        lr_scales=np.ones(rows),
        dropped=plans.drops(),
    )


def own_bytes(pid: int) -> int:
    """Memory of a process that no file backs. A fork inherits some; it does not grow by what the parent
    does."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Anonymous")))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_workers_own_memory_does_not_grow_over_two_epochs(context: str, tmp_path: Path) -> None:
    source = PlanSource(num_samples=NUM_SAMPLES, num_tokens=NUM_SAMPLES * SEQLEN)
    facts = replace(plans.facts([SEQLEN], epochs=EPOCHS), sources=[source])
    write_plan(tmp_path / "plan", facts, map(big_epoch, range(EPOCHS)), dropped=plans.drops())
    loader = PlanLoader(
        load_plan(tmp_path / "plan"),
        OneTokens(),
        collate=only_ids,
        num_workers=1,
        multiprocessing_context=context,
    )
    seen = 0
    used: dict[int, list[int]] = {}
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader.microbatches()):
            seen += batch.num_samples
            if number % 500 == 100:  # the first hundred are the warm-up
                used.setdefault(batch["worker"], []).append(own_bytes(batch["worker"]))
    assert seen == NUM_SAMPLES * EPOCHS
    assert len(used) == 1  # one worker, kept from epoch to epoch
    (sizes,) = used.values()
    assert len(sizes) > 30
    assert max(sizes) - sizes[0] < 20e6


def only_ids(samples: Any, shape: Any) -> dict[str, Any]:
    """Collate little, since it is not what is measured; say who did it."""
    return {"input_ids": torch.zeros(shape.size), "worker": os.getpid()}
