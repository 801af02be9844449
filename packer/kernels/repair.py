"""Repairs of packed micro-batches: too few samples, or two pieces of one sample."""

from packer.kernels._jit import inline, jit
from packer.kernels.rng import below

_TRIES = 64


@jit
def top_up(needs, free, free_squares, spare_rooms, spare_squares, takers):
    """Give short packs the smallest samples that others can spare.

    Args:
        needs: (S,) int64, samples that each short pack lacks; packs with the least room first.
        free: (S,) int64, room left in each.
        free_squares: (S,) int64, what is left of the bound on squares.
        spare_rooms: (P,) int64, room of each sample that can be spared, rising.
        spare_squares: (P,) int64.
        takers: (P,) int64, filled: the short pack that takes each spare sample, or −1.
    """
    takers[:] = -1
    spare = 0
    for short in range(len(needs)):
        stop = spare + needs[short]
        if stop > len(takers):
            return
        total, square = 0, 0
        for index in range(spare, stop):
            total += spare_rooms[index]
            square += spare_squares[index]
        if total <= free[short] and square <= free_squares[short]:
            takers[spare:stop] = short
            spare = stop


@inline
def _holds(pieces, owners, start, stop, owner, without):
    found = False
    for position in range(start, stop):
        found |= position != without and owners[pieces[position]] == owner
    return found


@jit
def separate(pieces, owners, starts, sizes, pack_of, classes, class_offsets, by_class, key, evicted):
    """Exchange pieces of equal length until no pack holds two of one sample; mark those that find no place.

    Args:
        pieces: (n,) pieces in the order of their packs; exchanged in place.
        owners: the sample of each piece.
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
    num_evicted = 0
    for pack in range(len(starts)):
        start, stop = starts[pack], starts[pack] + sizes[pack]
        for position in range(start + 1, stop):
            owner = owners[pieces[position]]
            if not _holds(pieces, owners, start, position, owner, -1):
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
                    and not _holds(pieces, owners, start, stop, owners[pieces[other]], position)
                    and not _holds(pieces, owners, begin, end, owner, other)
                ):
                    pieces[position], pieces[other] = pieces[other], pieces[position]
                    found = True
                    break
            if not found:
                evicted[position] = True
                num_evicted += 1
    return num_evicted
