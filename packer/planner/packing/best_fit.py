"""Best-fit: packed rows filled by best-fit-decreasing over the whole data set.

The decision is taken on the histogram of lengths. Samples of each length are shuffled and dealt to the
patterns it decides, and the packs come in random order. See ``packer.kernels.best_fit``.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from packer.kernels import best_fit as kernels
from packer.kernels.bitmap import bitmap_levels
from packer.kernels.limits import UNLIMITED, Limits
from packer.planner.order.orders import by_length, id_dtype, permutation, shuffle_within, subkey, take
from packer.planner.order.threads import chunk_edges, run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches, concatenate

_STRETCH = 1 << 17
"""Samples of an order that are packed together where it is to be kept, about."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / φ."""


def best_fit_in_order(
    lengths: IntArray, limits: Limits, phase_starts: NDArray[np.int64], *, key: np.uint64
) -> MicroBatches:
    """Pack samples by best-fit-decreasing, stretch by stretch of their order, which is random already.

    Packs are alike in length, and come so that any run of them is like all of their stretch. Each takes of
    every length the samples that are next in the order: what goes with their order, as sources do, stays.
    """
    num_samples = lengths.shape[1]
    stretches = max(1, num_samples // _STRETCH)
    edges = np.arange(stretches + 1, dtype=np.int64) * num_samples // stretches
    edges = np.union1d(edges, phase_starts)
    parts = []
    for number, (start, stop) in enumerate(pairwise(edges.tolist())):
        part = best_fit(
            np.ascontiguousarray(lengths[:, start:stop]), limits, key=subkey(key, number), is_ordered=True
        )
        parts.append(replace(part, pieces=(part.pieces + np.int64(start)).astype(id_dtype(num_samples))))
    return concatenate(parts)


def best_fit(lengths: IntArray, limits: Limits, *, key: np.uint64, is_ordered: bool = False) -> MicroBatches:
    """Pack samples by best-fit-decreasing.

    Args:
        lengths: (1, n) int32 lengths of the samples, each at most the room of a row.
        limits: bounds of a row.
        key: of the random choices.
        is_ordered: samples of one length are to be used in their order, which is random already.
    """
    order, distinct, offsets = by_length(lengths[0])
    if not is_ordered:
        shuffle_within(order, offsets, subkey(key, 0))
    # classes run from the longest to the shortest
    class_lengths = distinct[::-1].copy()
    counts = np.diff(offsets)[::-1].copy()
    packs, pattern_offsets, classes = decide_patterns(class_lengths, counts, limits)
    # (M,) pattern of each pack
    kinds = np.repeat(np.arange(len(packs), dtype=np.int32), packs)
    if is_ordered:
        kinds = _interleaved(packs, class_lengths, pattern_offsets, classes, subkey(key, 1))
    else:
        kinds = take(kinds, permutation(len(kinds), subkey(key, 1)))
    sizes = take(np.diff(pattern_offsets), kinds)
    starts = np.cumsum(sizes) - sizes
    out_ids = np.empty(len(order), id_dtype(len(order)))
    out_lengths = np.empty(len(order), np.int32)
    edges = chunk_edges(len(kinds), min_chunk=1 << 14)
    cursors = _chunk_cursors(kinds, edges, pattern_offsets, classes, offsets[:-1][::-1])

    def deal(chunk: int, start: int, stop: int) -> None:
        position = int(starts[start]) if start < len(starts) else len(order)
        kernels.deal(
            kinds,
            start,
            stop,
            pattern_offsets,
            classes,
            class_lengths,
            order,
            cursors[chunk],
            position,
            out_ids,
            out_lengths,
        )

    run_chunks(deal, edges)
    return MicroBatches(
        pieces=out_ids,
        seqlens=out_lengths,
        starts=starts,
        sizes=sizes,
        leftover=out_ids[:0],
    )


def _interleaved(
    packs: NDArray[np.int64],
    class_lengths: NDArray[np.int64],
    pattern_offsets: NDArray[np.int64],
    classes: NDArray[np.int32],
    key: np.uint64,
) -> NDArray[np.int32]:
    """Return the pattern of each pack, so ordered that any run of packs is like all of them.

    By the mean lengths of their patterns the j-th pack comes at the fractional part of j·φ: neighbours in
    length, and in what goes with it, end up far apart, and evenly.
    """
    tokens = np.add.reduceat(class_lengths[classes], pattern_offsets[:-1])
    by_mean = np.argsort((tokens << 10) // np.diff(pattern_offsets), kind="stable").astype(np.int32)
    ranks = np.arange(int(packs.sum()), dtype=np.uint64)
    kinds: NDArray[np.int32] = np.repeat(by_mean, packs[by_mean])[np.argsort(ranks * _GOLDEN + key)]
    return kinds


def decide_patterns(
    class_lengths: NDArray[np.int64], counts: NDArray[np.int64], limits: Limits
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Decide which packs to make of a histogram of lengths.

    Args:
        class_lengths: (L,) distinct lengths, falling.
        counts: (L,) samples of each.
        limits: bounds of a row.

    Returns:
        (P,) packs of each pattern; (P + 1,) offsets and the classes of the samples of each pattern.
    """
    sizes = -(-class_lengths // limits.segment_multiple) * limits.segment_multiple
    squares = class_lengths**2 if limits.max_attention < UNLIMITED else np.zeros_like(class_lengths)
    # a row never holds more than all samples: tables by room are no longer than that
    room = min(int(limits.budgets[0]), int((sizes * counts).sum()))
    levels = bitmap_levels(room + 1)
    num_nodes, places = -1, 8 * len(counts) + 1024
    while num_nodes < 0:
        nodes = np.empty((8, places), np.int64)
        num_nodes = kernels.decide(
            sizes,
            squares,
            counts,
            room,
            limits.max_samples,
            limits.max_attention,
            levels,
            np.zeros(int(levels[-1]), np.uint64),
            np.zeros(room + 1, np.int32),
            nodes,
        )
        places *= 2
    nodes = nodes[:, :num_nodes]
    chosen = np.flatnonzero(nodes[3])
    offsets = np.append(np.zeros(1, np.int64), np.cumsum(nodes[4, chosen]))
    classes = np.empty(int(offsets[-1]), np.int32)
    kernels.spell_patterns(nodes, chosen, offsets, classes)
    return nodes[3, chosen], offsets, classes


def _chunk_cursors(
    kinds: NDArray[np.int32],
    edges: NDArray[np.int64],
    pattern_offsets: NDArray[np.int64],
    classes: NDArray[np.int32],
    first: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return (chunks, L): where each chunk of packs begins to take samples of each class."""
    counts = np.zeros((len(edges) - 1, len(first)), np.int64)

    def count(chunk: int, start: int, stop: int) -> None:
        uses = np.empty(len(pattern_offsets) - 1, np.int64)
        kernels.count_classes(kinds, start, stop, pattern_offsets, classes, uses, counts[chunk])

    run_chunks(count, edges)
    return first + np.cumsum(counts, axis=0) - counts
