"""Mixed rows: samples in random order, and the gap of each row filled with the longest ones that fit.

A row takes the next samples of the order while they fit. Where even the longest waiting sample that fits
would leave a gap, the row's last sample is chosen anew among the next few, with the longest that then fits
beside it. The longest that fits is looked for among the next samples only, the pool, so that what a row holds
stays a random draw, and a block of the order can be packed by a thread of its own.

Samples are entries, length << 32 | sample. Lengths are ranked from the longest, class 0, to the shortest.
"""

import numpy as np

from packer.kernels._jit import at, inline, jit
from packer.kernels.bitmap import clear_bit, next_bit, set_bit
from packer.kernels.limits import UNLIMITED, next_multiple

_ID = 0xFFFFFFFF
_OVERDUE = 4  # pools that have passed a sample by: it is not put back again
TRIES = 8
"""Samples that are tried as a row's last but one."""
REACH = 64
"""Samples of the order, from the row's first on, among which these are looked for."""
GAP_SHIFT = 10
"""A gap of 1/1024 of the row is good enough."""


@inline
def _class_of(lengths, longest, seqlen):
    """Return how many classes are of longer samples: one for each of the falling ``lengths``, or for any."""
    if len(lengths) == 0:
        return max(np.int64(0), longest - seqlen)
    low, high = 0, len(lengths)
    while low < high:
        middle = (low + high) >> 1
        if lengths[middle] > seqlen:
            low = middle + 1
        else:
            high = middle
    return np.int64(low)


@inline
def _longest(gap, squares, segment_multiple):
    """Return the longest sample that ``gap`` tokens, and ``squares`` of attention, have room for."""
    longest = gap if segment_multiple == 1 else gap // segment_multiple * segment_multiple
    if squares < UNLIMITED:
        root = np.int64(np.sqrt(np.float64(max(squares, 0))))
        while root * root > squares:
            root -= 1
        while (root + 1) * (root + 1) <= squares:
            root += 1
        longest = min(longest, root)
    return longest


@inline
def _find(
    entries, seqlen, but, row, owners, met, lengths, longest, levels, words, heads, previous, is_taken, offset
):
    """Return the last waiting entry of the longest class up to ``seqlen`` that may join a row, or −1.

    It is not the entry ``but``, nor a piece of a sample that the row, or that entry, has a piece of.
    """
    rank = _class_of(lengths, longest, seqlen) if seqlen > 0 else np.int64(len(heads))
    while rank < len(heads):
        rank = next_bit(words, levels, rank)
        if rank < 0:
            break
        # those taken meanwhile leave the list when they come to its head
        place = np.int64(heads[at(rank)]) - 1
        while place >= 0 and is_taken[at(place)]:
            place = np.int64(previous[at(place)]) - 1
        heads[at(rank)] = place + 1
        if place < 0:
            clear_bit(words, levels, rank)
        while place >= 0:
            position = offset + place
            is_free = position != but and not is_taken[at(place)]
            if is_free and (len(met) == 0 or not _meets(entries, position, but, row, owners, met)):
                return position
            place = np.int64(previous[at(place)]) - 1
        rank += 1
    return np.int64(-1)


@inline
def _meets(entries, position, but, row, owners, met):
    """Say whether a row, or the entry ``but`` that may join it, has a piece of the same sample."""
    owner = owners[at(entries[at(position)] & _ID)]
    if owner < 0:
        return False
    return met[at(owner)] == row or (but >= 0 and owners[at(entries[at(but)] & _ID)] == owner)


@jit
def fill_rows(
    entries,
    edges,
    lengths,
    longest,
    levels,
    owners,
    num_owners,
    capacity,
    segment_multiple,
    max_samples,
    max_squares,
    pool,
    keep,
    starts,
    sizes,
    leftovers,
):
    """Pack each block of entries into rows.

    Args:
        entries: int64 entries in random order; on return in the order of their rows, those left over at the
            end of each block.
        edges: (W + 1,) int64, block w is ``entries[edges[w]:edges[w + 1]]``.
        lengths: (L,) int64 distinct lengths, falling: the classes; empty where there is one for every length.
        longest: the longest sample; each fits a row alone.
        levels: starts of the levels of a bitmap over the classes.
        owners: int32 by piece, its sample, counted from 0; −1 where it is the only one. Empty where no
            sample is cut.
        num_owners: how many there are.
        capacity: room of a row.
        segment_multiple: a sample takes a multiple of it.
        max_samples: samples that a row may hold.
        max_squares: bound of the sum of squared lengths of a row.
        pool: samples that wait to be chosen, at a time.
        keep: samples of a block that are left over, rather than packed with what little is left.
        starts: int64, filled: where each row begins in ``entries``.
        sizes: int64, filled: samples of each row.
        leftovers: (W,) int64, filled: samples left over.

    Returns:
        The number of rows.
    """
    most = np.int64(0)
    for block in range(len(edges) - 1):
        most = max(most, edges[block + 1] - edges[block])
    words = np.zeros(levels[-1], np.uint64)
    num_classes = len(lengths) if len(lengths) > 0 else longest
    heads = np.zeros(num_classes, np.int32)  # 1 + the place of the last entry of each class
    previous = np.empty(most, np.int32)  # 1 + the place before of the same class; lists fall by place
    is_taken = np.empty(most, np.bool_)
    met = np.full(num_owners, -1, np.int64)  # the last row that has a piece of each sample
    packed = np.empty(most, np.int64)
    tolerance = capacity >> GAP_SHIFT
    num_rows = 0
    for block in range(len(edges) - 1):
        offset, stop = edges[block], edges[block + 1]
        heads[:] = 0
        words[:] = 0
        front, entered = (
            offset,
            offset,
        )  # those before ``front`` are taken, those from ``entered`` on wait outside
        target = np.int64(0)
        while stop - offset - target > keep:
            while front < entered and is_taken[at(front - offset)]:
                front += 1
            # the pool takes the next of the order
            most_entered = min(stop, offset + target + pool)
            while entered < most_entered:
                place = entered - offset
                rank = _class_of(lengths, longest, entries[at(entered)] >> 32)
                if heads[at(rank)] == 0:
                    set_bit(words, levels, rank)
                previous[at(place)] = heads[at(rank)]
                heads[at(rank)] = place + 1
                is_taken[at(place)] = False
                entered += 1
            first = target
            gap, squares = capacity, max_squares
            allowed = _longest(gap, squares, segment_multiple)
            last = np.int64(-1)
            position = front
            # in order, while they fit
            while position < entered and target - first < max_samples:
                if is_taken[at(position - offset)]:
                    position += 1
                    continue
                entry = entries[at(position)]
                if len(met) > 0 and _meets(entries, position, -1, num_rows, owners, met):
                    position += 1
                    continue
                seqlen = entry >> 32
                if seqlen > allowed:
                    break
                is_taken[at(position - offset)] = True
                if len(met) > 0 and owners[at(entry & _ID)] >= 0:
                    met[at(owners[at(entry & _ID)])] = num_rows
                packed[at(target)] = entry
                target += 1
                gap -= next_multiple(segment_multiple, seqlen)
                if squares < UNLIMITED:
                    squares -= seqlen * seqlen
                allowed = _longest(gap, squares, segment_multiple)
                last = position
                position += 1
            chosen = np.int64(-1)
            if target - first < max_samples and gap > 0:
                chosen = _find(
                    entries,
                    allowed,
                    -1,
                    num_rows,
                    owners,
                    met,
                    lengths,
                    longest,
                    levels,
                    words,
                    heads,
                    previous,
                    is_taken,
                    offset,
                )
            rest = gap
            if chosen >= 0:
                rest -= next_multiple(segment_multiple, entries[at(chosen)] >> 32)
            if rest > tolerance and (last > front or entered - front < _OVERDUE * pool):
                # the last one goes back, and competes with the others of the order
                seqlen = entries[at(last)] >> 32
                target -= 1
                gap += next_multiple(segment_multiple, seqlen)
                if squares < UNLIMITED:
                    squares += seqlen * seqlen
                if len(met) > 0 and owners[at(entries[at(last)] & _ID)] >= 0:
                    met[at(owners[at(entries[at(last)] & _ID)])] = -1
                place = last - offset
                is_taken[at(place)] = False
                rank = _class_of(lengths, longest, seqlen)
                if heads[at(rank)] <= place:  # it has left the list
                    if heads[at(rank)] == 0:
                        set_bit(words, levels, rank)
                    previous[at(place)] = heads[at(rank)]
                    heads[at(rank)] = place + 1
                allowed = _longest(gap, squares, segment_multiple)
                chosen = last
                tried, seen = 0, 0
                position = front
                while position < entered and tried < TRIES and seen < REACH and rest > tolerance:
                    candidate = position
                    position += 1
                    if is_taken[at(candidate - offset)]:
                        continue
                    seen += 1
                    seqlen = entries[at(candidate)] >> 32
                    if seqlen > allowed:
                        continue
                    if len(met) > 0 and _meets(entries, candidate, -1, num_rows, owners, met):
                        continue
                    tried += 1
                    other = gap - next_multiple(segment_multiple, seqlen)
                    beside = squares
                    if squares < UNLIMITED:
                        beside -= seqlen * seqlen
                    if target + 1 - first < max_samples:
                        filler = _find(
                            entries,
                            _longest(other, beside, segment_multiple),
                            candidate,
                            num_rows,
                            owners,
                            met,
                            lengths,
                            longest,
                            levels,
                            words,
                            heads,
                            previous,
                            is_taken,
                            offset,
                        )
                        if filler >= 0:
                            other -= next_multiple(segment_multiple, entries[at(filler)] >> 32)
                    if other < rest:
                        rest, chosen = other, candidate
            # the chosen one, and the longest that fit
            while chosen >= 0:
                entry = entries[at(chosen)]
                seqlen = entry >> 32
                is_taken[at(chosen - offset)] = True
                if len(met) > 0 and owners[at(entry & _ID)] >= 0:
                    met[at(owners[at(entry & _ID)])] = num_rows
                packed[at(target)] = entry
                target += 1
                gap -= next_multiple(segment_multiple, seqlen)
                if squares < UNLIMITED:
                    squares -= seqlen * seqlen
                chosen = np.int64(-1)
                if target - first < max_samples and gap > 0:
                    chosen = _find(
                        entries,
                        _longest(gap, squares, segment_multiple),
                        -1,
                        num_rows,
                        owners,
                        met,
                        lengths,
                        longest,
                        levels,
                        words,
                        heads,
                        previous,
                        is_taken,
                        offset,
                    )
            starts[num_rows] = offset + first
            sizes[num_rows] = target - first
            num_rows += 1
        leftovers[block] = stop - offset - target
        for position in range(front, entered):
            if not is_taken[at(position - offset)]:
                packed[at(target)] = entries[at(position)]
                target += 1
        for position in range(entered, stop):
            packed[at(target)] = entries[at(position)]
            target += 1
        for place in range(stop - offset):
            entries[at(offset + place)] = packed[at(place)]
    return num_rows
