"""Sequence: whole steps in the order in which the sources' running totals stay nearest to their shares."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from packer.kernels import sequence as kernels
from packer.kernels.streams import SAMPLE_UNITS
from packer.options.config import PlanConfig
from packer.planner.compose.deal import Block
from packer.planner.order.orders import take
from packer.planner.order.threads import chunk_edges, run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches

_STRETCH = 800
"""Micro-batches over which a source may be off by a hundredth of its share, or by its longest sample."""


def put_in_sequence(
    order: NDArray[np.int64],
    microbatches: MicroBatches,
    sources: IntArray,
    blocks: Sequence[Block],
    fractions: Sequence[Sequence[Fraction]],
    config: PlanConfig,
) -> NDArray[np.int64]:
    """Return (M,) micro-batches with their whole steps in another order; what fills no step stays.

    Args:
        order: (M,) micro-batches in the order of their steps.
        microbatches: what they are.
        sources: (n,) the source of each of their pieces.
        blocks: stretches of one mix.
        fractions: (H, S) the sources' shares in each block.
        config: the options.
    """
    step_size = config.microbatches_per_step
    sums = np.zeros(len(fractions[0]), np.int64)
    order = order.copy()
    for block, shares in zip(blocks, fractions, strict=True):
        num_steps = (block.stop - block.first) // step_size
        if num_steps < 2:
            continue
        rows = order[block.first : block.first + num_steps * step_size]
        held = held_by_step(microbatches, sources, rows, len(sums), config)
        longest = _longest(microbatches, sources, rows, len(sums), config)
        deviations = _deviations(held, shares, longest, config)
        steps = np.empty(num_steps, np.int64)
        kernels.sequence(deviations, 0, num_steps, sums, steps)
        rows[:] = take(rows.reshape(num_steps, step_size), steps).reshape(-1)
    return order


def held_by_step(
    microbatches: MicroBatches,
    sources: IntArray,
    rows: NDArray[np.int64],
    num_sources: int,
    config: PlanConfig,
) -> NDArray[np.int64]:
    """Return (T, S) what each source gives each step, in the units that the shares count.

    Args:
        microbatches: M of them.
        sources: (n,) the source of each of their pieces.
        rows: (T · E,) the micro-batches of whole steps.
        num_sources: S.
        config: the options.
    """
    step_size = config.microbatches_per_step
    held = np.empty((len(rows) // step_size, num_sources), np.int64)
    run_chunks(
        lambda _, first, last: kernels.hold(
            microbatches.seqlens,
            sources,
            microbatches.starts,
            microbatches.sizes,
            rows,
            step_size,
            first,
            last,
            SAMPLE_UNITS if config.mix_by == "samples" else 0,
            held,
        ),
        chunk_edges(len(held), min_chunk=1 << 10),
    )
    return held


def _longest(
    microbatches: MicroBatches,
    sources: IntArray,
    rows: NDArray[np.int64],
    num_sources: int,
    config: PlanConfig,
) -> NDArray[np.int64]:
    """Return (S,) the longest sample of each source, in the units that the shares count."""
    if config.mix_by == "samples":
        return np.full(num_sources, SAMPLE_UNITS, np.int64)
    edges = chunk_edges(len(rows), min_chunk=1 << 14)
    longest = np.zeros((len(edges) - 1, num_sources), np.int64)
    run_chunks(
        lambda chunk, first, last: kernels.longest_of(
            microbatches.seqlens,
            sources,
            microbatches.starts,
            microbatches.sizes,
            rows,
            first,
            last,
            longest[chunk],
        ),
        edges,
    )
    most: NDArray[np.int64] = longest.max(axis=0)
    return most


def _deviations(
    held: NDArray[np.int64], shares: Sequence[Fraction], longest: NDArray[np.int64], config: PlanConfig
) -> NDArray[np.int64]:
    """Return (T, S) how far each step is from the shares, in 2^-12 of what is tolerated of a source."""
    sizes = held.sum(axis=1)
    share_bits = min(28, 62 - int(sizes.max()).bit_length())
    whole = int(sizes.sum()) // (len(sizes) * config.microbatches_per_step)  # of a micro-batch
    least = longest if config.layout == "packed" else np.maximum(longest, whole)
    tolerances = [
        max(1, int(bound), int(share * whole * _STRETCH) // 100)
        for bound, share in zip(least, shares, strict=True)
    ]
    units = np.array([int(share * (1 << share_bits)) for share in shares], np.int64)
    out = np.empty_like(held)
    run_chunks(
        lambda _, first, last: kernels.deviations_of(
            held, units, share_bits, np.array(tolerances, np.int64), first, last, out
        ),
        chunk_edges(len(held), min_chunk=1 << 14),
    )
    return out
