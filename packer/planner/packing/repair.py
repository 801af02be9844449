"""Repairs of packed rows, which best-fit fills without looking at who is in them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels import repair as kernels
from packer.kernels.limits import UNLIMITED, Limits
from packer.planner.packing.microbatches import IntArray, MicroBatches, concatenate, reindex
from packer.planner.packing.next_fit import next_fit
from packer.planner.order.orders import by_length


def top_up(packs: MicroBatches, limits: Limits) -> MicroBatches:
    """Give rows with fewer than ``min_samples`` the smallest samples that others can spare.

    Rows that stay short are taken apart; their samples are left over.
    """
    short = np.flatnonzero(packs.sizes < limits.min_samples)
    if not len(short):
        return packs
    pack_of = np.repeat(np.arange(len(packs)), packs.sizes)
    positions = _positions(packs)
    seqlens = packs.seqlens[positions].astype(np.int64)
    rooms = -(-seqlens // limits.segment_multiple) * limits.segment_multiple
    squares = seqlens**2 if limits.max_attention < UNLIMITED else np.zeros_like(seqlens)
    free = limits.budgets[0] - np.bincount(pack_of, rooms, len(packs)).astype(np.int64)
    begins = np.cumsum(packs.sizes) - packs.sizes
    free_squares = limits.max_attention - np.add.reduceat(squares, begins)
    # the smallest samples of each row come first; a row spares what it has over the minimum
    ascending = np.lexsort((seqlens, pack_of))
    rank = np.arange(len(ascending)) - begins[pack_of]
    spare = ascending[rank < (packs.sizes - limits.min_samples)[pack_of]]
    spare = spare[np.argsort(rooms[spare], kind="stable")]
    short = short[np.argsort(free[short], kind="stable")]
    takers = np.empty(len(spare), np.int64)
    kernels.top_up(
        limits.min_samples - packs.sizes[short],
        free[short],
        free_squares[short],
        rooms[spare],
        squares[spare],
        takers,
    )
    taken = takers >= 0
    pack_of[spare[taken]] = short[takers[taken]]
    return _regroup(packs, positions, pack_of, limits.min_samples)


def separate(packs: MicroBatches, owners: IntArray, limits: Limits, key: np.uint64) -> MicroBatches:
    """See to it that no row holds two pieces of one sample: by exchange, or by rows of their own."""
    positions = _positions(packs)
    pieces = packs.pieces[positions].copy()
    seqlens = packs.seqlens[positions]
    packs = replace(packs, pieces=pieces, seqlens=seqlens, starts=np.cumsum(packs.sizes) - packs.sizes)
    pack_of = np.repeat(np.arange(len(packs)), packs.sizes)
    order, _, offsets = by_length(seqlens)
    classes = np.empty(len(order), np.int64)
    classes[order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    evicted = np.empty(len(pieces), np.bool_)
    if not kernels.separate(
        pieces, owners, packs.starts, packs.sizes, pack_of, classes, offsets, order, key, evicted
    ):
        return packs
    pack_of[evicted] = -1
    kept = _regroup(packs, np.arange(len(pieces)), pack_of, limits.min_samples)
    # those of the packer's own leftover had their chance
    homeless = np.setdiff1d(kept.leftover, packs.leftover)
    lengths = np.empty((1, len(homeless)), np.int32)
    lengths[0] = seqlens[np.argsort(pieces)][np.searchsorted(np.sort(pieces), homeless)]
    rest = next_fit(lengths, owners[homeless], limits, order="random", width=1, same_seqlen=False, key=key)
    rest = reindex(rest, homeless)
    rest = replace(rest, leftover=np.concatenate([rest.leftover, packs.leftover]))
    return concatenate([kept, rest])


def _positions(packs: MicroBatches) -> NDArray[np.int64]:
    """Return where the samples of all rows are, row by row."""
    begins = np.cumsum(packs.sizes) - packs.sizes
    positions: NDArray[np.int64] = np.arange(int(packs.sizes.sum())) + np.repeat(
        packs.starts - begins, packs.sizes
    )
    return positions


def _regroup(
    packs: MicroBatches, positions: NDArray[np.int64], pack_of: NDArray[np.int64], min_samples: int
) -> MicroBatches:
    """Rebuild rows after samples have moved; those without a row, or of a short one, are left over."""
    sizes = np.bincount(pack_of[pack_of >= 0], minlength=len(packs))
    is_short = np.append(sizes < min_samples, True)  # the last place is −1: no row
    order = np.argsort(np.where(is_short[pack_of], len(packs), pack_of), kind="stable")
    sizes = sizes[~is_short[:-1]]
    num_kept = int(sizes.sum())
    pieces = packs.pieces[positions[order]]
    return replace(
        packs,
        pieces=pieces[:num_kept],
        seqlens=packs.seqlens[positions[order[:num_kept]]],
        starts=np.cumsum(sizes) - sizes,
        sizes=sizes,
        leftover=np.concatenate([packs.leftover, pieces[num_kept:]]),
    )
