"""The mixes that the steps of an epoch are to have, and which micro-batches are dealt for each."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.options.config import PlanConfig
from packer.planner.compose.deal import Block
from packer.planner.compose.mix import Mix
from packer.planner.order.stream import Draw
from packer.planner.packing.microbatches import MicroBatches, mean_pieces


class Mixture(NamedTuple):
    """The mixes that the steps of an epoch are to have: one a phase."""

    mixes: tuple[Mix, ...]
    """(H,)"""
    fractions: tuple[tuple[Fraction, ...], ...]
    """(H, S) the shares of the sources, where they were asked for; (H, 0) else."""
    num_sources: int

    @classmethod
    def of(cls, drawn: Draw, num_sources: int, fractions: Sequence[Sequence[Fraction]] = ((),)) -> "Mixture":
        """Return the mixes of what an epoch is packed from."""
        starts = drawn.phase_starts
        mixes = []
        for start, stop in zip(starts, np.append(starts[1:], len(drawn.pieces)), strict=True):
            sources = None if drawn.sources is None else drawn.sources[start:stop]
            mixes.append(Mix.of(drawn.pieces.seqlens[start:stop], sources, num_sources))
        return cls(mixes=tuple(mixes), fractions=tuple(map(tuple, fractions)), num_sources=num_sources)


def phases_of(microbatches: MicroBatches, drawn: Draw, config: PlanConfig) -> NDArray[np.int64]:
    """Return (H,) the first step of every phase: that whose rows, on the whole, are the first of it."""
    starts = drawn.phase_starts
    if len(starts) == 1:
        return np.zeros(1, np.int64)
    means = mean_pieces(microbatches)
    rows = np.array([np.count_nonzero(means < start) for start in starts], np.int64)
    size = config.microbatches_per_step
    phases: NDArray[np.int64] = (rows + size // 2) // size
    return phases


def blocks_of(
    microbatches: MicroBatches, phases: NDArray[np.int64], mixture: Mixture, config: PlanConfig
) -> list[Block]:
    """Return the micro-batches that are dealt among each other, phase by phase."""
    dealt = len(microbatches) if microbatches.num_dealt is None else microbatches.num_dealt
    edges = np.minimum(np.append(phases * config.microbatches_per_step, dealt), dealt).tolist()
    return [
        Block(first=first, stop=stop, mix=mix)
        for first, stop, mix in zip(edges[:-1], edges[1:], mixture.mixes, strict=True)
    ]
