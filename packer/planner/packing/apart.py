"""Pieces of one sample, or samples of one key, kept apart in what was packed without a look at them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels import apart as kernels
from packer.kernels.limits import Limits
from packer.planner.order.orders import by_length, subkey
from packer.planner.packing.microbatches import (
    IntArray,
    MicroBatches,
    compact_owners,
    concatenate,
    positions_of,
    reindex,
)
from packer.planner.packing.next_fit import next_fit


def keep_apart(
    packs: MicroBatches,
    lengths: IntArray,
    owners: IntArray,
    limits: Limits,
    key: np.uint64,
    *,
    order: str = "random",
    width: int = 1,
    same_seqlen: bool = False,
    thorough: bool = False,
) -> MicroBatches:
    """See to it that no micro-batch holds two pieces of one owner: by exchange, or by ones of their own.

    Args:
        packs: micro-batches made without a look at who is in them.
        lengths: (K, n) int32 lengths of the pieces, one row a budget.
        owners: (n,) the owner of each: the sample that it is cut from, or the key that it has.
        limits: bounds of a micro-batch.
        key: of the random choices.
        order: in which those that find no place are packed, see ``next_fit``.
        width: 1, or the micro-batches of a step that must agree in shape.
        same_seqlen: whether that shape includes S.
        thorough: those that find no place are packed and parted like the first, while they become few; else
            the first that meets its owner ends a micro-batch, which is early where owners have many pieces.
    """
    positions = positions_of(packs)
    pieces = packs.pieces[positions].copy()
    seqlens = packs.seqlens[positions]
    packs = replace(packs, pieces=pieces, seqlens=seqlens, starts=np.cumsum(packs.sizes) - packs.sizes)
    pack_of = np.repeat(np.arange(len(packs)), packs.sizes)
    alike: IntArray = seqlens  # pieces that are may change places
    if len(lengths) > 1:
        alike = np.unique(lengths[:, pieces], axis=1, return_inverse=True)[1].reshape(-1)
    by_class, _, offsets = by_length(alike)
    classes = np.empty(len(by_class), np.int64)
    classes[by_class] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    evicted = np.empty(len(pieces), np.bool_)
    numbers, num_owners = compact_owners(owners)
    if not kernels.keep_apart(
        pieces,
        numbers,
        num_owners,
        packs.starts,
        packs.sizes,
        pack_of,
        classes,
        offsets,
        by_class,
        key,
        evicted,
    ):
        return packs
    _level(packs, pack_of, evicted, width, limits.min_samples)
    pack_of[evicted] = -1
    kept = _regroup(packs, pack_of)
    # those of the packer's own leftover had their chance
    homeless = np.setdiff1d(kept.leftover, packs.leftover)
    again = thorough and 2 * len(homeless) < len(pieces)
    lengths, owners = np.ascontiguousarray(lengths[:, homeless]), owners[homeless]
    rest = next_fit(
        lengths,
        None if again else owners,
        limits,
        order=order,
        width=width,
        same_seqlen=same_seqlen,
        key=key,
    )
    if again:
        rest = keep_apart(
            rest,
            lengths,
            owners,
            limits,
            subkey(key, 0),
            order=order,
            width=width,
            same_seqlen=same_seqlen,
            thorough=True,
        )
    rest = reindex(rest, homeless)
    rest = replace(rest, leftover=np.concatenate([rest.leftover, packs.leftover]))
    return concatenate([kept, rest])


def _level(
    packs: MicroBatches,
    pack_of: NDArray[np.int64],
    evicted: NDArray[np.bool_],
    width: int,
    min_samples: int,
) -> None:
    """Evict what would leave a micro-batch too small, or those of a step with several numbers of samples."""
    stay = np.bincount(pack_of[~evicted], minlength=len(packs))
    stay[stay < min_samples] = 0
    if width > 1:
        whole = len(packs) // width * width
        # (steps · width,) -> (steps,) -> (M,); micro-batches that fill no step are made anew
        least = stay[:whole].reshape(-1, width).min(axis=1)
        stay = np.append(np.repeat(least, width), np.zeros(len(packs) - whole, stay.dtype))
    # (n,) how many of its micro-batch stay before each
    before: NDArray[np.int64] = np.cumsum(~evicted) - ~evicted
    rank: NDArray[np.int64] = before - before[packs.starts][pack_of]
    evicted |= rank >= stay[pack_of]


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
