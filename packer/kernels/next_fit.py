"""Next-fit: samples in their order; a micro-batch, or a step of them, closes when the next does not fit."""

import numpy as np

from packer.kernels._jit import at, inline, jit
from packer.kernels.limits import budget_fits, count_fits, next_multiple, round_up


@inline
def _shares_sample(previous, start, size, width):
    """Say whether one of the next ``width`` pieces would meet a piece of its sample in its micro-batch."""
    base = start + size * width
    for member in range(width):
        other = previous[base + member]
        while other >= start:
            if (other - start) % width == member:
                return True
            other = previous[other]
    return False


@inline
def _padded_group(lengths, previous, limits, width, same_seqlen, start, stop, longest, totals, widest):
    """Return how many samples each of ``width`` padded micro-batches can take from ``start`` on, in turn.

    ``longest, totals`` are int64[K, width] scratch, ``widest`` int64[K].
    """
    budgets, real, multiple, shapes = limits.budgets, limits.real, limits.multiple, limits.shapes
    max_samples, max_attention = limits.max_samples, limits.max_attention
    longest[:] = 0
    totals[:] = 0
    widest[:] = 0
    size = 0
    while start + (size + 1) * width <= stop:
        base = start + size * width
        for metric in range(len(lengths)):
            for member in range(width):
                seqlen = np.int64(lengths[metric, base + member])
                longest[metric, member] = max(longest[metric, member], seqlen)
                widest[metric] = max(widest[metric], seqlen)
                totals[metric, member] += seqlen
            for member in range(width):
                seqlen = widest[metric] if same_seqlen else longest[metric, member]
                padded = round_up(multiple, shapes, seqlen)
                if not count_fits(max_samples, max_attention, size + 1, padded):
                    return size
                if not budget_fits(budgets[metric], real, size + 1, padded, totals[metric, member]):
                    return size
        if len(previous) > 0 and _shares_sample(previous, start, size, width):
            return size
        size += 1
    return size


@inline
def _padded_row(seqlens, previous, limits, start, stop):
    """Return how many samples one padded micro-batch can take from ``start`` on; there is one budget."""
    budget, real, multiple, shapes = limits.budgets[0], limits.real, limits.multiple, limits.shapes
    max_samples, max_attention = limits.max_samples, limits.max_attention
    longest, total = np.int64(0), np.int64(0)
    size = 0
    while start + size < stop:
        seqlen = np.int64(seqlens[at(start + size)])
        longest = max(longest, seqlen)
        total += seqlen
        padded = round_up(multiple, shapes, longest)
        if not count_fits(max_samples, max_attention, size + 1, padded):
            return size
        if not budget_fits(budget, real, size + 1, padded, total):
            return size
        if len(previous) > 0 and _shares_sample(previous, start, size, 1):
            return size
        size += 1
    return size


@inline
def _packed_row(seqlens, previous, limits, start, stop):
    """Return how many samples one packed row can take from ``start`` on."""
    capacity, segment_multiple = limits.budgets[0], limits.segment_multiple
    max_samples, max_attention = limits.max_samples, limits.max_attention
    total, square = np.int64(0), np.int64(0)
    size = 0
    while start + size < stop and size < max_samples:
        seqlen = np.int64(seqlens[at(start + size)])
        total += next_multiple(segment_multiple, seqlen)
        square += seqlen * seqlen
        if total > capacity or square > max_attention:
            return size
        if len(previous) > 0 and _shares_sample(previous, start, size, 1):
            return size
        size += 1
    return size


@jit
def next_fit(lengths, previous, limits, width, same_seqlen, start, starts, sizes, widths):
    """Cut samples into groups of ``width`` micro-batches that take them in turn, each as large as it can be.

    A first sample that leaves a group short of ``min_samples`` stays out, and the next one is tried. A tail
    that cannot give every micro-batch of a group its samples makes a narrower group.

    Args:
        lengths: (K, n) lengths of the samples in their order.
        previous: (n,) int64 position of the piece before of the same sample, or −1; empty where none is cut.
        limits: bounds of a micro-batch; one sample alone keeps them.
        width: micro-batches of a group: 1, or those of a step that must agree in shape.
        same_seqlen: the micro-batches of a group share one S.
        start: the first sample that has no group yet.
        starts: (G,) int64, filled: the position of each group's first sample.
        sizes: (G,) int64, filled: samples of each micro-batch of the group.
        widths: (G,) int64, filled: micro-batches of the group.

    Returns:
        The number of groups, and where to go on: n, or less where G groups are full.
    """
    n = lengths.shape[1]
    longest = np.empty((len(lengths), width), np.int64)
    totals = np.empty((len(lengths), width), np.int64)
    widest = np.empty(len(lengths), np.int64)
    min_samples, packed = limits.min_samples, limits.packed
    num_groups = 0
    while start < n and num_groups < len(starts):
        wide = min(width, (n - start) // min_samples)
        if wide == 0:
            return num_groups, n
        stop = n if wide == width else start + wide * min_samples
        if packed:
            size = _packed_row(lengths[0], previous, limits, start, stop)
        elif width == 1 and len(lengths) == 1:
            size = _padded_row(lengths[0], previous, limits, start, stop)
        else:
            size = _padded_group(
                lengths, previous, limits, wide, same_seqlen, start, stop, longest, totals, widest
            )
        if size < min_samples:
            start += 1
            continue
        starts[num_groups], sizes[num_groups], widths[num_groups] = start, size, wide
        num_groups += 1
        start += size * wide
    return num_groups, start


@jit
def deal_in_turn(values, starts, sizes, widths, out):
    """Write the groups' values micro-batch by micro-batch: each takes every ``width``-th of its group."""
    for group in range(len(starts)):
        start, size, width = starts[group], sizes[group], widths[group]
        for member in range(width):
            for index in range(size):
                out[start + member * size + index] = values[start + member + index * width]
