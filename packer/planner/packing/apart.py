"""Pieces of one sample kept apart in packed rows, which best-fit fills without a look at who is in them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels import apart as kernels
from packer.kernels.limits import Limits
from packer.planner.order.orders import by_length
from packer.planner.packing.microbatches import (
    IntArray,
    MicroBatches,
    compact_owners,
    concatenate,
    positions_of,
    reindex,
)
from packer.planner.packing.next_fit import next_fit


def keep_apart(packs: MicroBatches, owners: IntArray, limits: Limits, key: np.uint64) -> MicroBatches:
    """See to it that no row holds two pieces of one sample: by exchange, or by rows of their own."""
    positions = positions_of(packs)
    pieces = packs.pieces[positions].copy()
    seqlens = packs.seqlens[positions]
    packs = replace(packs, pieces=pieces, seqlens=seqlens, starts=np.cumsum(packs.sizes) - packs.sizes)
    pack_of = np.repeat(np.arange(len(packs)), packs.sizes)
    order, _, offsets = by_length(seqlens)
    classes = np.empty(len(order), np.int64)
    classes[order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    evicted = np.empty(len(pieces), np.bool_)
    numbers, num_owners = compact_owners(owners)
    if not kernels.keep_apart(
        pieces, numbers, num_owners, packs.starts, packs.sizes, pack_of, classes, offsets, order, key, evicted
    ):
        return packs
    pack_of[evicted] = -1
    kept = _regroup(packs, pack_of)
    # those of the packer's own leftover had their chance
    homeless = np.setdiff1d(kept.leftover, packs.leftover)
    lengths = np.empty((1, len(homeless)), np.int32)
    lengths[0] = seqlens[np.argsort(pieces)][np.searchsorted(np.sort(pieces), homeless)]
    rest = next_fit(lengths, owners[homeless], limits, order="random", width=1, same_seqlen=False, key=key)
    rest = reindex(rest, homeless)
    rest = replace(rest, leftover=np.concatenate([rest.leftover, packs.leftover]))
    return concatenate([kept, rest])


def _regroup(packs: MicroBatches, pack_of: NDArray[np.int64]) -> MicroBatches:
    """Rebuild rows, end to end, after samples have left them; these are left over."""
    sizes = np.bincount(pack_of[pack_of >= 0], minlength=len(packs))
    order = np.argsort(np.where(pack_of < 0, len(packs), pack_of), kind="stable")
    sizes = sizes[sizes > 0]
    num_kept = int(sizes.sum())
    pieces = packs.pieces[order]
    return replace(
        packs,
        pieces=pieces[:num_kept],
        seqlens=packs.seqlens[order[:num_kept]],
        starts=np.cumsum(sizes) - sizes,
        sizes=sizes,
        leftover=np.concatenate([packs.leftover, pieces[num_kept:]]),
    )
