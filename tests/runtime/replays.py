"""Small plans, data sets whose tokens tell where they come from, and replays of a loader."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from packer.plan import Plan, plan_in_memory
from packer.runtime import PlanLoader
from tests import plans

VOCABULARY = 1000


def tokens_of(sample_id: int, seqlen: int) -> np.ndarray[Any, Any]:
    """Return tokens that differ between samples and within one."""
    return ((sample_id * 31 + np.arange(seqlen) * 7) % (VOCABULARY - 1) + 1).astype(np.int32)


class Tokens:
    """A map-style data set of given lengths that notes which samples were read."""

    def __init__(self, seqlens: Sequence[int], **fields: Any) -> None:
        self.seqlens = list(seqlens)
        self.fields = fields
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.seqlens)

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        self.read.append(sample_id)
        sample = {"input_ids": tokens_of(sample_id, self.seqlens[sample_id])}
        return sample | {name: make(sample_id, self.seqlens[sample_id]) for name, make in self.fields.items()}


class BatchedTokens(Tokens):
    """The same, read many at a time."""

    def __getitems__(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        return [self[sample_id] for sample_id in sample_ids]


def make_plan(
    seqlens: Sequence[int],
    *,
    steps: int,
    per_microbatch: int = 2,
    epochs: int = 1,
    dp_size: int = 1,
    grad_accum: int = 1,
    layout: str = "padded",
    **options: Any,
) -> Plan:
    """Plan ``per_microbatch`` samples a micro-batch, in another order each epoch."""
    num_rows = steps * dp_size * grad_accum
    assert num_rows * per_microbatch <= len(seqlens)
    planned = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(seqlens)).tolist()
        rows = [
            plans.Row(
                pieces=[(i, seqlens[i]) for i in order[row * per_microbatch : (row + 1) * per_microbatch]]
            )
            for row in range(num_rows)
        ]
        scales = [1.0 + 0.5 * step for step in range(steps)]
        planned.append(
            plans.epoch(rows, dp_size=dp_size, grad_accum=grad_accum, layout=layout, lr_scales=scales)
        )
    facts = plans.facts(
        list(seqlens), dp_size=dp_size, grad_accum=grad_accum, layout=layout, epochs=epochs, **options
    )
    return plan_in_memory(facts, planned, dropped=plans.drops())


def lengths(count: int, *, longest: int = 40) -> list[int]:
    """Return uneven lengths, from 1 on."""
    return [1 + (7 * i * i + 3 * i) % longest for i in range(count)]


def replay(loader: PlanLoader) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (step, accum, sample ids) of one epoch."""
    for step in loader:
        for batch in step:
            yield step.index, batch.accum, batch.sample_ids.tolist()
