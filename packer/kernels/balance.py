"""Even costs over the data-parallel ranks: what each micro-batch holds, and columns of equal cost."""

import numpy as np

from packer.kernels._jit import inline, jit
from packer.kernels.rng import shuffle


@jit
def measure(
    seqlens, starts, sizes, first, last, segment_multiple, cost_per_token, tokens, longest, rooms, costs
):
    """Sum up micro-batches [first, last).

    Args:
        seqlens: int32, the lengths of all samples.
        starts: (M,) int64, where each micro-batch begins in ``seqlens``.
        sizes: (M,) int64, samples of each micro-batch.
        first: first micro-batch.
        last: end of the micro-batches.
        segment_multiple: each sample on its own is padded to a multiple of it.
        cost_per_token: c in the cost of a sample, c·len + len².
        tokens: (M,) int64, filled: Σ len.
        longest: (M,) int64, filled: max len.
        rooms: (M,) int64, filled: Σ len after padding; ``tokens`` itself where there is none.
        costs: (M,) int64, filled: Σ cost; ``tokens`` itself where the cost is the tokens.
    """
    for microbatch in range(first, last):
        total, most, room, cost = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for position in range(starts[microbatch], starts[microbatch] + sizes[microbatch]):
            seqlen = np.int64(seqlens[position])
            total += seqlen
            most = max(most, seqlen)
            cost += (cost_per_token + seqlen) * seqlen
            if segment_multiple > 1:
                room += (seqlen + segment_multiple - 1) // segment_multiple * segment_multiple
        longest[microbatch] = most
        rooms[microbatch] = room
        costs[microbatch] = cost
        tokens[microbatch] = total  # last: it may be the array of the two before


@jit
def balance(costs, rows, edges, dp_size, keys, loads):
    """Rearrange rows so that the micro-batches that run at the same time cost about the same.

    Within each stretch of rows the micro-batches are sorted by cost and cut into columns of ``dp_size``; the
    columns are shuffled; in a column the dearest goes to the rank that has worked least so far.

    Args:
        costs: int64 per micro-batch.
        rows: (R,) int64, the micro-batch of each row; rearranged in place.
        edges: (W + 1,) int64, stretch w is ``rows[edges[w]:edges[w + 1]]``, whole columns.
        dp_size: ranks.
        keys: (W,) uint64, the key of each stretch's shuffle.
        loads: (dp_size,) int64, the sum of costs of each rank so far; moved.
    """
    for window in range(len(edges) - 1):
        start, stop = edges[window], edges[window + 1]
        inside = rows[start:stop].copy()
        ascending = np.argsort(costs[inside], kind="mergesort")
        columns = np.arange((stop - start) // dp_size)
        shuffle(columns, 0, len(columns), keys[window])
        for slot in range(len(columns)):
            ranks = np.argsort(loads, kind="mergesort")
            for place in range(dp_size):
                dearest = columns[slot] * dp_size + dp_size - 1 - place
                microbatch = inside[ascending[dearest]]
                rows[start + slot * dp_size + ranks[place]] = microbatch
                loads[ranks[place]] += costs[microbatch]


@inline
def _slot_imbalance(costs, rows, start, dp_size):
    most, total = np.int64(0), np.int64(0)
    for row in range(start, start + dp_size):
        most = max(most, costs[rows[row]])
        total += costs[rows[row]]
    return most * dp_size / total - 1.0 if total > 0 else 0.0


@jit
def imbalance(costs, rows, dp_size):
    """Return max / mean − 1 of the costs over the ranks of a slot, averaged over the slots."""
    total = 0.0
    for start in range(0, len(rows), dp_size):
        total += _slot_imbalance(costs, rows, start, dp_size)
    return total * dp_size / len(rows) if len(rows) > 0 else 0.0
