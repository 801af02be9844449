"""Next-fit: keep the order, close a micro-batch when the next sample does not fit."""

import numpy as np
from numpy.typing import NDArray

from packer.kernels import next_fit as kernels
from packer.kernels.limits import Limits
from packer.planner.order.orders import (
    by_length,
    id_dtype,
    shuffled_entries,
    split_entries,
)
from packer.planner.packing.microbatches import IntArray, MicroBatches

_GROUPS_AT_ONCE = 1 << 20


def next_fit(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    *,
    order: str,
    width: int,
    same_seqlen: bool,
    key: np.uint64,
) -> MicroBatches:
    """Pack samples in their order.

    Args:
        lengths: (K, n) int32 lengths of the samples, one row a budget.
        owners: (n,) the sample of each piece; None where no sample is cut.
        limits: bounds of a micro-batch.
        order: ``sequential``, ``seqlen`` or ``random``.
        width: 1, or the micro-batches of a step that must agree in shape. Then a step takes the next
            width · k samples and deals them out in turn, k the largest that keeps every bound.
        same_seqlen: whether that shape includes S.
        key: of the random order.
    """
    pieces, ordered = _in_order(lengths, order, key)
    previous = np.empty(0, np.int64) if owners is None else _previous(owners[pieces])
    starts, sizes, widths = _groups(ordered, previous, limits, width, same_seqlen)
    seqlens = ordered[0]
    if width > 1:
        pieces = _dealt(pieces, starts, sizes, widths)
        seqlens = _dealt(seqlens, starts, sizes, widths)
        # (groups,) -> (micro-batches,)
        member = np.arange(int(widths.sum())) - np.repeat(np.cumsum(widths) - widths, widths)
        sizes = np.repeat(sizes, widths)
        starts = np.repeat(starts, widths) + member * sizes
    return MicroBatches(
        pieces=pieces,
        seqlens=seqlens,
        starts=starts,
        sizes=sizes,
        leftover=pieces[_gaps(len(pieces), starts, sizes)],
        in_steps=width > 1,
    )


def _in_order(lengths: IntArray, order: str, key: np.uint64) -> tuple[IntArray, IntArray]:
    """Return the samples in their order, and their lengths."""
    num_samples = lengths.shape[1]
    if order == "sequential":
        return np.arange(num_samples, dtype=id_dtype(num_samples)), lengths
    if order == "seqlen":
        pieces, distinct, offsets = by_length(lengths[0])
        if len(lengths) == 1:
            return pieces, np.repeat(distinct.astype(np.int32), np.diff(offsets))[np.newaxis]
    else:
        entries = shuffled_entries(lengths[0], key)
        pieces, seqlens = split_entries(entries)
        if len(lengths) == 1:
            return pieces, seqlens[np.newaxis]
    return pieces, lengths[:, pieces]


def _previous(owners: IntArray) -> NDArray[np.int64]:
    """Return the position of the piece before of the same sample, or −1."""
    positions = np.argsort(owners, kind="stable")
    positions = positions[np.searchsorted(owners[positions], 0) :]  # below 0: the only piece of its sample
    previous = np.full(len(owners), -1, np.int64)
    again = owners[positions[1:]] == owners[positions[:-1]]
    previous[positions[1:][again]] = positions[:-1][again]
    return previous


def _groups(
    lengths: IntArray, previous: NDArray[np.int64], limits: Limits, width: int, same_seqlen: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Run the kernel over buffers of bounded size."""
    parts: list[list[NDArray[np.int64]]] = [[], [], []]
    start, num_samples = 0, lengths.shape[1]
    while start < num_samples:
        buffers = np.empty((3, min(_GROUPS_AT_ONCE, num_samples - start)), np.int64)
        num_groups, start = kernels.next_fit(
            lengths, previous, limits, width, same_seqlen, start, buffers[0], buffers[1], buffers[2]
        )
        for part, buffer in zip(parts, buffers, strict=True):
            part.append(buffer[:num_groups])
    starts, sizes, widths = (np.concatenate([np.empty(0, np.int64), *part]) for part in parts)
    return starts, sizes, widths


def _dealt(values: IntArray, starts: IntArray, sizes: IntArray, widths: IntArray) -> IntArray:
    out = values.copy()
    kernels.deal_in_turn(values, starts, sizes, widths, out)
    return out


def _gaps(num_samples: int, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> IntArray:
    """Return the positions between the micro-batches."""
    if int(sizes.sum()) == num_samples:
        return np.empty(0, np.int64)
    ends = np.append(starts, num_samples)
    begins = np.append(np.zeros(1, np.int64), starts + sizes)
    gaps = ends - begins
    inside = np.arange(int(gaps.sum())) - np.repeat(np.cumsum(gaps) - gaps, gaps)
    positions: IntArray = np.repeat(begins, gaps) + inside
    return positions
