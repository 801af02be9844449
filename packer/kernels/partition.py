"""The exact partition of sorted samples into padded micro-batches, in linear time.

A group (i, j] of samples in rising order costs (j − i)·S_j plus a charge a group, so the cheapest way to end
a group at j is the lowest of the lines f(i) − i·S at S = S_j. S_j never falls, and neither does the first
start that keeps the bounds; costs of starts out of reach are infinite. Such a matrix is Monge, so the best
start never moves back (Aggarwal et al. 1987), and a queue of the starts that will be best, in order, finds it
in amortised constant time: two starts trade places once, when S passes the crossing of their lines or the
older one expires.
"""

import numpy as np

from packer.kernels._jit import at, inline
from packer.kernels.limits import UNLIMITED


@inline
def partition(shapes, expiry, num_units, least, charge, cost, came, starts, costs, turns, ends):
    """Find the cheapest partition of the first ``num_units`` sorted units; leave units out if it must be.

    Args:
        shapes: (n + 1,) int64, S of a group that ends with each unit, never falling, below 2^31.
        expiry: (n + 1,) int64, the first end that a group from each start cannot reach, never falling.
        num_units: n.
        least: units that a group must hold.
        charge: what a group costs besides its padded tokens.
        cost: (n + 1,) int64 scratch.
        came: (n + 1,) int64, filled: where the group that ends before each unit starts; the place itself
            where the unit before is left out.
        starts: (n + 1,) int64 scratch: the queue, starts that will be best.
        costs: (n + 1,) int64 scratch: what all before each start in the queue costs.
        turns: (n + 1,) int64 scratch: S at which each start in the queue gives way to the next.
        ends: (n + 1,) int64 scratch: the expiry of each start in the queue.
    """
    # Leaving a unit out costs more than any partition; it only happens where ``least`` leaves no other way.
    penalty = UNLIMITED // (num_units + 1)
    never = shapes[at(num_units - 1)] + 1
    head, tail = 0, 0
    cost[0] = 0
    for end in range(1, num_units + 1):
        newer = end - least
        if newer >= 0 and expiry[at(newer)] > end:
            paid = cost[at(newer)]
            while tail - head >= 2:
                # S at which ``newer`` gets no dearer than ``middle``: dearer / gap, never divided here
                dearer, gap = paid - costs[at(tail - 1)], newer - starts[at(tail - 1)]
                first, gone, late = turns[at(tail - 2)], ends[at(tail - 2)], ends[at(tail - 1)]
                # ``middle`` is never best if it follows the start before no earlier than ``newer`` follows it
                by_line = (first * gap >= dearer) | (shapes[at(late - 2)] < first)
                by_age = (gone >= late) | (shapes[at(gone - 1)] * gap >= dearer)
                if not (by_line & by_age):
                    break
                tail -= 1
            if tail > head:
                dearer, gap = paid - costs[at(tail - 1)], newer - starts[at(tail - 1)]
                turns[at(tail - 1)] = _ceiling(dearer, gap, never)
            starts[at(tail)], costs[at(tail)], ends[at(tail)] = newer, paid, expiry[at(newer)]
            tail += 1
        shape = shapes[at(end - 1)]
        while tail - head >= 2 and (ends[at(head)] <= end or turns[at(head)] <= shape):
            head += 1
        least_cost, start = cost[at(end - 1)] + penalty, end
        if tail > head and ends[at(head)] > end:
            total = costs[at(head)] + (end - starts[at(head)]) * shape + charge
            if total < least_cost:
                least_cost, start = total, starts[at(head)]
        cost[at(end)], came[at(end)] = least_cost, start


@inline
def _ceiling(dearer, gap, most):
    """Return ⌈dearer / gap⌉ between 0 and ``most``."""
    if dearer <= 0:
        return np.int64(0)
    return min(most, np.int64((np.uint64(dearer) + np.uint64(gap - 1)) // np.uint64(gap)))
