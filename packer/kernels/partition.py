"""The exact partition of sorted samples into padded micro-batches, in linear time.

A group (i, j] of samples in rising order costs (j − i)·S_j plus a charge a group, so the cheapest way to end
a group at j is the lowest of the lines f(i) − i·S at S = S_j. S_j never falls, and neither does the first
start that keeps the bounds; costs of starts out of reach are infinite. Such a matrix is Monge, so the best
start never moves back (Aggarwal et al. 1987), and a queue of the starts that will be best, in order, finds it
in amortised constant time: two starts trade places once, when S passes the crossing of their lines or the
older one expires.
"""

import numpy as np

from packer.kernels._jit import inline
from packer.kernels.limits import UNLIMITED


@inline
def _overtakes(cost, older, newer):
    """Return the smallest S, or 0, at which starting a group at ``newer`` is no dearer than at ``older``."""
    dearer = cost[newer] - cost[older]
    return (dearer + newer - older - 1) // (newer - older) if dearer > 0 else np.int64(0)


@inline
def partition(shapes, reach, num_units, least, charge, cost, came, queue, turns, expiry):
    """Find the cheapest partition of the first ``num_units`` sorted units; leave units out if it must be.

    Args:
        shapes: (n,) int64, S of a group that ends with each unit, never falling.
        reach: (n,) int64, the first unit that a group ending with each unit may start with, never falling.
        num_units: n.
        least: units that a group must hold.
        charge: what a group costs besides its padded tokens.
        cost: (n + 1,) int64 scratch.
        came: (n + 1,) int64, filled: where the group that ends before each unit starts; the place itself
            where the unit before is left out.
        queue: (n + 1,) int64 scratch, the starts that will be best.
        turns: (n + 1,) int64 scratch, S at which each start in the queue gives way to the next.
        expiry: (n + 1,) int64 scratch.
    """
    # Leaving a unit out costs more than any partition; it only happens where ``least`` leaves no other way.
    penalty = UNLIMITED // (num_units + 1)
    expired = 0
    for end in range(1, num_units + 1):
        while expired < reach[end - 1]:
            expiry[expired] = end
            expired += 1
    for start in range(expired, num_units + 1):
        expiry[start] = num_units + 1
    head, tail = 0, 0
    cost[0] = 0
    for end in range(1, num_units + 1):
        newer = end - least
        if newer >= 0 and expiry[newer] > end:
            turn = np.int64(0)
            while tail > head:
                middle = queue[tail - 1]
                turn = _overtakes(cost, middle, newer)
                if tail - head == 1:
                    break
                first, gone, late = turns[tail - 2], expiry[queue[tail - 2]], expiry[middle]
                # ``middle`` is never best if it follows the start before no earlier than ``newer`` follows it
                by_line = first >= turn or shapes[late - 2] < first
                by_age = gone >= late or shapes[gone - 1] >= turn
                if not (by_line and by_age):
                    break
                tail -= 1
            if tail > head:
                turns[tail - 1] = turn
            queue[tail] = newer
            tail += 1
        shape = shapes[end - 1]
        while tail - head >= 2 and (expiry[queue[head]] <= end or turns[head] <= shape):
            head += 1
        cost[end] = cost[end - 1] + penalty
        came[end] = end
        if tail > head and expiry[queue[head]] > end:
            start = queue[head]
            total = cost[start] + (end - start) * shape + charge
            if total < cost[end]:
                cost[end] = total
                came[end] = start
