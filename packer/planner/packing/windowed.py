"""Windowed: keep the order random, but pad little.

Shuffle, cut into windows of about K micro-batches, sort inside each window and cut it at the least cost; the
micro-batches, or the steps of one shape, are shuffled afterwards. Where the micro-batches of a step must
agree in shape the step is the unit: a window then holds whole steps, at least one.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels import windows as kernels
from packer.kernels.bitmap import bitmap_levels
from packer.kernels.limits import Limits
from packer.planner.order.orders import (
    entries_in_order,
    permutation,
    shuffled_entries,
    split_entries,
    subkey,
    take,
)
from packer.planner.order.threads import run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches, compact_owners, concatenate, reindex
from packer.planner.packing.next_fit import next_fit
from packer.planner.shape import CHARGE_DIVISOR

_SAMPLES_AT_ONCE = 1 << 22


def windowed(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    *,
    window: int,
    width: int,
    same_seqlen: bool,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None = None,
) -> MicroBatches:
    """Pack samples inside windows of a random order.

    Args:
        lengths: (1, n) int32 lengths of the samples.
        owners: (n,) the sample of each piece; None where no sample is cut.
        limits: bounds of a micro-batch.
        window: micro-batches of a window, about; whole steps, where width is not 1.
        width: 1, or the micro-batches of a step that must agree in shape.
        same_seqlen: whether that shape includes S.
        key: of the random order.
        phase_starts: where phases begin, whose samples stay apart, and the samples stand in a random order in
            which they are to be used; None where the order is still to be made.
    """
    packed = _pack_windows(lengths, owners, limits, window, width, key, phase_starts)
    return finish_windows(packed, lengths, owners, limits, width=width, same_seqlen=same_seqlen, key=key)


def _pack_windows(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    window: int,
    width: int,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None,
) -> MicroBatches:
    """Pack every window; the micro-batches come window by window."""
    is_made = phase_starts is not None
    entries = entries_in_order(lengths[0]) if is_made else shuffled_entries(lengths[0], key)
    edges = window_edges(lengths, limits, window, width, phase_starts)
    bits = max(1, int(lengths.max()).bit_length())  # a metric other than seqlen may be 0 everywhere
    budget = int(limits.budgets[0])
    owned = np.empty(0, np.int64) if owners is None else _counted(owners)

    def partition(span: NDArray[np.int64], room: NDArray[np.int64], left: NDArray[np.int64]) -> int:
        return int(
            kernels.partition_windows(
                entries,
                span,
                bits,
                limits,
                width,
                budget // CHARGE_DIVISOR,
                owned,
                room[0],
                room[1],
                left,
            )
        )

    def best_fit(span: NDArray[np.int64], room: NDArray[np.int64], left: NDArray[np.int64]) -> int:
        # a row never holds more than all samples: tables by room are no longer than that
        most = min(budget, int(lengths[0].sum(dtype=np.int64)) * limits.segment_multiple)
        bounds = limits._replace(budgets=np.array([most]))
        levels = bitmap_levels(most + 1)
        words = np.zeros(int(levels[-1]), np.uint64)
        heads = np.zeros(most + 1, np.int32)
        return int(
            kernels.best_fit_windows(entries, span, bits, bounds, levels, words, heads, room[0], room[1])
        )

    stretches, leftover = _run_windows(best_fit if limits.packed else partition, edges)
    leftover = np.append(np.arange(edges[0]), leftover)
    pieces, seqlens = split_entries(entries)
    return MicroBatches(
        pieces=pieces,
        seqlens=seqlens,
        starts=stretches[0],
        sizes=stretches[1],
        leftover=pieces[leftover],
        in_steps=width > 1,
    )


def _counted(owners: IntArray) -> NDArray[np.int64]:
    """Count the samples of pieces, from 0."""
    numbers, num_owners = compact_owners(owners)
    is_alone = numbers < 0
    counted: NDArray[np.int64] = numbers.astype(np.int64)
    counted[is_alone] = num_owners + np.arange(np.count_nonzero(is_alone))
    return counted


def finish_windows(
    packed: MicroBatches,
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    *,
    width: int,
    same_seqlen: bool,
    key: np.uint64,
) -> MicroBatches:
    """Shuffle the micro-batches of all windows, or their steps, and pack what the windows left over."""
    order = permutation(len(packed) // width, subkey(key, 0))
    # (steps · width,) -> whole steps in random order
    starts = take(packed.starts.reshape(-1, width), order).reshape(-1)
    sizes = take(packed.sizes.reshape(-1, width), order).reshape(-1)
    leftover = packed.leftover
    packed = replace(packed, starts=starts, sizes=sizes)
    if not len(leftover):
        return packed
    tail = next_fit(
        np.ascontiguousarray(lengths[:, leftover]),
        None if owners is None else owners[leftover],
        limits,
        order="seqlen",
        width=width,
        same_seqlen=same_seqlen,
        key=key,
    )
    return concatenate([replace(packed, leftover=leftover[:0]), reindex(tail, leftover)])


def window_edges(
    lengths: IntArray,
    limits: Limits,
    window: int,
    width: int,
    phase_starts: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the (W + 1,) edges of windows that hold about as many samples as ``window`` micro-batches do.

    All windows hold whole units of ``width`` samples, none of two phases but for a unit. The samples before
    the first edge fill no unit: the order is random, so they are others in every epoch.
    """
    num_samples = lengths.shape[1]
    per_microbatch = float(limits.max_samples)
    for row, budget in zip(lengths, limits.budgets, strict=True):
        mean = max(1.0, int(row.sum(dtype=np.int64)) / num_samples)
        per_microbatch = min(per_microbatch, max(1.0, int(budget) / mean))
    num_units = num_samples // width
    num_windows = max(1, min(num_units, round(num_samples / (window * per_microbatch))))
    edges: NDArray[np.int64] = np.arange(num_windows + 1, dtype=np.int64) * num_units // num_windows * width
    edges += num_samples - num_units * width
    if phase_starts is None:
        return edges
    inside = edges[0] + np.maximum(phase_starts - edges[0], 0) // width * width
    return np.union1d(edges, np.minimum(inside, edges[-1]))


def _run_windows(
    pack: Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], int], edges: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack windows in threads, so many at once that buffers stay small.

    Returns:
        (2, M) starts and sizes of the micro-batches; (K,) positions of samples left over.
    """
    marks = np.arange(int(edges[0]), int(edges[-1]) + _SAMPLES_AT_ONCE, _SAMPLES_AT_ONCE)
    cuts = np.unique(np.append(np.minimum(np.searchsorted(edges, marks), len(edges) - 1), len(edges) - 1))

    def work(_: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        span = edges[first : last + 1]
        room = np.empty((2, int(span[-1] - span[0])), np.int64)
        left = np.zeros(last - first, np.int64)
        num_microbatches = pack(span, room, left)
        behind = [np.arange(stop - count, stop) for stop, count in zip(span[1:], left, strict=True) if count]
        return room[:, :num_microbatches].copy(), np.concatenate([np.empty(0, np.int64), *behind])

    results = run_chunks(work, cuts)
    return (
        np.concatenate([stretches for stretches, _ in results], axis=1),
        np.concatenate([left for _, left in results]),
    )
