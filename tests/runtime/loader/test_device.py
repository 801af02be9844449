"""Copies to the GPU: right values whatever runs beside them, and nothing that waits for the device."""

from typing import Any

import numpy as np
import pytest
import torch

from packer.runtime import PlanLoader
from tests.runtime.replays import Tokens, lengths, make_plan

SEQLENS = lengths(400, longest=3000)


def test_a_device_without_streams_gets_its_batches_too() -> None:
    plan = make_plan(SEQLENS, steps=5)
    batches = list(PlanLoader(plan, Tokens(SEQLENS), device="cpu").microbatches())
    assert len(batches) == 5
    assert all(tensor.device.type == "cpu" for batch in batches for tensor in batch.values())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_the_gpu_are_those_in_host_memory(layout: str, num_workers: int) -> None:
    def weights(sample_id: int, seqlen: int) -> Any:
        return np.full((seqlen, 64), sample_id, np.float32)

    plan = make_plan(SEQLENS, steps=100, layout=layout)
    dataset = Tokens(SEQLENS, weights=weights)
    here = PlanLoader(plan, dataset).microbatches()
    there = PlanLoader(plan, dataset, device="cuda", num_workers=num_workers).microbatches()
    matrix = torch.randn(4096, 4096, device="cuda")
    kept = []
    for ours, theirs in zip(here, there, strict=True):
        # Work that the copies run beside, and memory that is freed while kernels still read it.
        for _ in range(3):
            matrix = torch.tanh(matrix @ matrix)
        kept.append((ours["weights"].double().sum(), theirs["weights"].double().sum()))
        kept.append((ours["input_ids"].sum(), theirs["input_ids"].sum()))
        if layout == "packed":
            assert isinstance(theirs["max_seqlen"], int)
            kept.append((ours["cu_seqlens"].sum(), theirs["cu_seqlens"].sum()))
        del theirs
    assert all(expected.item() == found.item() for expected, found in kept)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch 2.11 says so
def test_nothing_waits_for_the_device() -> None:
    plan = make_plan(SEQLENS, steps=50)
    loader = PlanLoader(plan, Tokens(SEQLENS), device="cuda", num_workers=1)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in loader:
            for batch in step:
                assert batch.num_tokens > 0
                assert step.num_loss_tokens > 0
                total += batch["input_ids"].sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.item() > 0
