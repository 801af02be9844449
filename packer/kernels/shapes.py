"""The exact choice of few shapes for many lengths."""

import numpy as np

from packer.kernels._jit import inline, jit


@inline
def _fill_level(costs, below, before, after, came, low, high):
    """Fill ``after[low:high]``: where the last shape best begins never moves back (divide and conquer)."""
    stack = np.empty((128, 4), np.int64)
    depth = 1
    stack[0] = low, high, 0, high
    while depth > 0:
        depth -= 1
        first, last, least, most = stack[depth]
        if first >= last:
            continue
        middle = (first + last) // 2
        best, where = np.int64(1) << 62, least
        for start in range(least, min(most, middle) + 1):
            total = costs[middle] * (below[middle + 1] - below[start])
            if start > 0:
                total += before[start - 1]
            if total < best:
                best, where = total, start
        after[middle], came[middle] = best, where
        stack[depth] = first, middle, least, where
        stack[depth + 1] = middle + 1, last, where, most
        depth += 2


@jit
def choose(costs, below, came):
    """Find the cheapest choice of shapes among rising candidates, the largest among them.

    Args:
        costs: (C,) int64, what a sample costs that is padded to each candidate; never falling.
        below: (C + 1,) int64, how many lengths are rounded to the candidates before each.
        came: (N, C) int32, filled: the first candidate that the last of n + 1 shapes, candidate c, serves.

    Returns:
        The sum of all costs.
    """
    num_candidates = len(costs)
    before = np.empty(num_candidates, np.int64)
    after = np.empty(num_candidates, np.int64)
    for candidate in range(num_candidates):
        before[candidate] = costs[candidate] * below[candidate + 1]
        came[0, candidate] = 0
    for level in range(1, len(came)):
        _fill_level(costs, below, before, after, came[level], 0, num_candidates)
        before, after = after, before
    return before[num_candidates - 1]
