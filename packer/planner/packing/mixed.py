"""Mixed: packed rows that are each a random draw of the data set, and about as full as best-fit's.

See ``packer.kernels.mixed`` for the rule. The order is cut into blocks, which threads pack side by side. What
the last samples of a block leave unfilled is a small part of it, so a block leaves its pool over, and the
pools of all blocks are packed in turn as an order of their own.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from packer.kernels import mixed as kernels
from packer.kernels.bitmap import bitmap_levels
from packer.kernels.limits import Limits
from packer.planner.order.orders import (
    entries_in_order,
    histogram,
    permutation,
    shuffled_entries,
    split_entries,
    subkey,
    take,
)
from packer.planner.order.threads import run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches, compact_owners

POOL = 1536
"""Samples among which the longest that fits is looked for."""

_BLOCK = 1 << 17
_MANY_CLASSES = 1 << 18


def mixed(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    *,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None = None,
) -> MicroBatches:
    """Pack samples in random order, every gap filled with the longest samples that fit.

    Args:
        lengths: (1, n) int32 lengths of the samples, each at most the room of a row.
        owners: (n,) the sample of each piece; None where no sample is cut.
        limits: bounds of a row.
        key: of the random choices.
        phase_starts: where phases begin, whose samples stay apart, and the samples stand in a random order in
            which they are to be used; None where the order is still to be made.
    """
    if phase_starts is None:
        entries = shuffled_entries(lengths[0], subkey(key, 0))
        phase_starts = np.zeros(1, np.int64)
    else:
        entries = entries_in_order(lengths[0])
    longest = int(lengths.max())
    # a class for every length up to the longest, or for those that there are
    classes = np.empty(0, np.int64)
    if longest > _MANY_CLASSES:
        classes = histogram(lengths[0])[0][::-1].copy()
    of_piece, num_owners = compact_owners(owners)
    stretches = []
    for first, stop in pairwise([*phase_starts.tolist(), len(entries)]):
        while first < stop:  # entries before it are in rows
            edges = _block_edges(first, stop)
            keep = POOL if len(edges) > 2 else 0
            rows, first = _fill_blocks(entries, edges, classes, longest, of_piece, num_owners, limits, keep)
            stretches.append(rows)
    # neighbours share what the pool happened to hold: rows come in random order
    rows = np.concatenate(stretches, axis=1)
    order = permutation(rows.shape[1], subkey(key, 1))
    pieces, seqlens = split_entries(entries)
    return MicroBatches(
        pieces=pieces,
        seqlens=seqlens,
        starts=take(rows[0], order),
        sizes=take(rows[1], order),
        leftover=pieces[:0],
    )


def _block_edges(first: int, stop: int) -> NDArray[np.int64]:
    """Cut entries into blocks of about equal size; return their edges."""
    blocks = max(1, (stop - first) // _BLOCK)
    return first + np.arange(blocks + 1, dtype=np.int64) * (stop - first) // blocks


def _fill_blocks(
    entries: NDArray[np.int64],
    edges: NDArray[np.int64],
    classes: NDArray[np.int64],
    longest: int,
    owners: NDArray[np.int32],
    num_owners: int,
    limits: Limits,
    keep: int,
) -> tuple[NDArray[np.int64], int]:
    """Pack blocks of entries, and move what they leave over behind all rows.

    Returns:
        (2, M) starts and sizes of the rows; where the entries left over begin.
    """
    levels = bitmap_levels(len(classes) or longest)

    def fill(block: int, _first: int, _stop: int) -> tuple[NDArray[np.int64], int]:
        span = edges[block : block + 2]
        room = np.empty((2, int(span[1] - span[0])), np.int64)
        left = np.empty(1, np.int64)
        num_rows = kernels.fill_rows(
            entries,
            span,
            classes,
            longest,
            levels,
            owners,
            num_owners,
            int(limits.budgets[0]),
            limits.segment_multiple,
            limits.max_samples,
            limits.max_attention,
            POOL,
            keep,
            room[0],
            room[1],
            left,
        )
        return room[:, :num_rows].copy(), int(left[0])

    results = run_chunks(fill, np.arange(len(edges), dtype=np.int64))
    behind = [entries[stop - left : stop].copy() for stop, (_, left) in zip(edges[1:], results, strict=True)]
    target = int(edges[0])
    for start, stop, (rows, left) in zip(edges[:-1], edges[1:], results, strict=True):
        filled = int(stop - start) - left
        entries[target : target + filled] = entries[start : start + filled]
        rows[0] -= start - target
        target += filled
    entries[target : int(edges[-1])] = np.concatenate(behind)
    return np.concatenate([rows for rows, _ in results], axis=1), target
