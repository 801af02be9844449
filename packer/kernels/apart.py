"""Pieces of one sample kept apart."""

import numpy as np

from packer.kernels._jit import inline, jit
from packer.kernels.rng import below

_TRIES = 64


@inline
def _holds(pieces, owners, start, stop, owner, without):
    found = False
    for position in range(start, stop):
        found |= position != without and owners[pieces[position]] == owner
    return found


@jit
def keep_apart(
    pieces, owners, num_owners, starts, sizes, pack_of, classes, class_offsets, by_class, key, evicted
):
    """Exchange pieces of equal length until no pack holds two of one sample; mark those that find no place.

    Args:
        pieces: (n,) pieces in the order of their packs; exchanged in place.
        owners: (n,) int32, the sample of each piece, from 0; −1 where it is its only one.
        num_owners: how many samples have several.
        starts: (M,) int64, where each pack begins in ``pieces``.
        sizes: (M,) int64, pieces of each pack.
        pack_of: (n,) int64, the pack of each position.
        classes: (n,) int64, the class of length of each position.
        class_offsets: (L + 1,) int64, where each class begins in ``by_class``.
        by_class: (n,) positions, class by class.
        key: uint64 of the random choice among them.
        evicted: (n,) bool, filled.

    Returns:
        How many are marked.
    """
    evicted[:] = False
    met = np.full(num_owners, -1, np.int64)  # the last pack that has a piece of each sample
    num_evicted = 0
    for pack in range(len(starts)):
        start, stop = starts[pack], starts[pack] + sizes[pack]
        for position in range(start, stop):
            owner = owners[pieces[position]]
            if owner < 0:
                continue
            if met[owner] != pack:
                met[owner] = pack
                continue
            first = class_offsets[classes[position]]
            many = class_offsets[classes[position] + 1] - first
            offset = below(key, position, many)
            found = False
            for attempt in range(min(many, _TRIES)):
                other = by_class[first + (offset + attempt) % many]
                begin = starts[pack_of[other]]
                end = begin + sizes[pack_of[other]]
                if (
                    pack_of[other] != pack
                    and not evicted[other]
                    and (
                        owners[pieces[other]] < 0
                        or not _holds(pieces, owners, start, stop, owners[pieces[other]], position)
                    )
                    and not _holds(pieces, owners, begin, end, owner, other)
                ):
                    pieces[position], pieces[other] = pieces[other], pieces[position]
                    if owners[pieces[position]] >= 0:
                        met[owners[pieces[position]]] = pack
                    found = True
                    break
            if not found:
                evicted[position] = True
                num_evicted += 1
    return num_evicted
