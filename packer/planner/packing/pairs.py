"""Windowed packing of pairs of sequences: every length has a budget of its own."""

import numpy as np
from numpy.typing import NDArray

from packer.kernels import pairs as kernels
from packer.kernels.limits import Limits
from packer.planner.order.orders import id_dtype, permutation, subkey
from packer.planner.order.threads import chunk_edges, run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches
from packer.planner.packing.windowed import finish_windows, window_edges
from packer.planner.shape import CHARGE_DIVISOR

_SUM_BITS = 40
"""Above them is the largest share, 21 bits; below, the sum of all shares."""


def windowed_pairs(
    lengths: IntArray,
    limits: Limits,
    *,
    window: int,
    width: int,
    same_seqlen: bool,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None = None,
) -> MicroBatches:
    """Pack samples of several lengths inside windows of a random order; see ``windowed``.

    Args:
        lengths: (K, n) int32 lengths of the samples, one row a budget.
        limits: bounds of a micro-batch.
        window: micro-batches of a window, about; whole steps, where width is not 1.
        width: 1, or the micro-batches of a step that must agree in shape.
        same_seqlen: whether that shape includes S.
        key: of the random order.
        phase_starts: where phases begin, whose samples stay apart, and the samples stand in a random order in
            which they are to be used; None where the order is still to be made.
    """
    num_samples = lengths.shape[1]
    if phase_starts is None:
        order = permutation(num_samples, key)
    else:
        order = np.arange(num_samples, dtype=id_dtype(num_samples))
    edges = window_edges(lengths, limits, window, width, phase_starts)
    order = order[_sorted_inside(lengths[:, order], limits, edges)]
    out = order.copy()
    stretches = np.empty((2, len(order)), np.int64)
    left = np.empty(len(edges) - 1, np.int64)
    charge = int(limits.budgets.sum()) // CHARGE_DIVISOR
    num_microbatches = kernels.partition_pairs(
        order, lengths[:, order], edges, limits, width, charge, out, stretches[0], stretches[1], left
    )
    behind = [np.arange(stop - count, stop) for stop, count in zip(edges[1:], left, strict=True) if count]
    packed = MicroBatches(
        pieces=out,
        seqlens=lengths[0][out],
        starts=stretches[0, :num_microbatches],
        sizes=stretches[1, :num_microbatches],
        leftover=out[np.concatenate([np.arange(edges[0]), *behind])],
        in_steps=width > 1,
    )
    return finish_windows(
        packed, lengths, None, limits, width=width, same_seqlen=same_seqlen, key=subkey(key, 1)
    )


def _sorted_inside(lengths: IntArray, limits: Limits, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions sorted inside each window: by the largest share of a budget, then by their sum."""
    order = np.arange(lengths.shape[1])

    def sort(_: int, first: int, last: int) -> None:
        for window in range(first, last):
            inside = slice(int(edges[window]), int(edges[window + 1]))
            # one common unit for all budgets, in integers: 2^20 is the whole budget
            shares = (lengths[:, inside].astype(np.int64) << 20) // limits.budgets[:, np.newaxis]
            keys = (shares.max(axis=0) << _SUM_BITS) + shares.sum(axis=0)
            order[inside] = inside.start + np.argsort(keys, kind="stable")

    run_chunks(sort, chunk_edges(len(edges) - 1, min_chunk=1))
    return order
