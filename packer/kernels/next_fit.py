"""Next-fit: samples in their order; a micro-batch, or a step of them, closes when the next does not fit."""

import numpy as np

from packer.kernels._jit import inline, jit
from packer.kernels.limits import padded_fits, room


@inline
def _admits(lengths, previous, limits, width, same_seqlen, start, size, longest, totals, squares, widest):
    """Say whether each of ``width`` micro-batches of ``size`` samples can take one more; note what they hold.

    The micro-batches share the samples from ``start`` in turn. ``longest, totals`` are int64[K, width],
    ``squares`` int64[width], ``widest`` int64[K]; they are only right to go on with while the answer is yes.
    """
    base = start + size * width
    for metric in range(len(lengths)):
        for member in range(width):
            seqlen = np.int64(lengths[metric, base + member])
            longest[metric, member] = max(longest[metric, member], seqlen)
            widest[metric] = max(widest[metric], seqlen)
            totals[metric, member] += room(limits, seqlen) if limits.packed else seqlen
            if limits.packed:
                squares[member] += seqlen * seqlen
    if limits.packed:
        if size + 1 > limits.max_samples:
            return False
        for member in range(width):
            if totals[0, member] > limits.budgets[0] or squares[member] > limits.max_attention:
                return False
    else:
        for metric in range(len(lengths)):
            for member in range(width):
                seqlen = widest[metric] if same_seqlen else longest[metric, member]
                if not padded_fits(limits, limits.budgets[metric], size + 1, seqlen, totals[metric, member]):
                    return False
    if len(previous) > 0:
        for member in range(width):
            # two pieces of one sample never share a micro-batch
            other = previous[base + member]
            while other >= start:
                if (other - start) % width == member:
                    return False
                other = previous[other]
    return True


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
    squares = np.empty(width, np.int64)
    widest = np.empty(len(lengths), np.int64)
    num_groups = 0
    while start < n and num_groups < len(starts):
        wide = min(width, (n - start) // limits.min_samples)
        if wide == 0:
            return num_groups, n
        stop = n if wide == width else start + wide * limits.min_samples
        longest[:] = 0
        totals[:] = 0
        squares[:] = 0
        widest[:] = 0
        size = 0
        while start + (size + 1) * wide <= stop and _admits(
            lengths, previous, limits, wide, same_seqlen, start, size, longest, totals, squares, widest
        ):
            size += 1
        if size < limits.min_samples:
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
