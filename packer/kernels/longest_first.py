"""Samples dealt to a given number of rows: the longest first, each to the emptiest row that can take it.

For makespans this is Graham's rule (1969, "Bounds on multiprocessing timing anomalies"). Here it evens out
rows whose number of samples binds: they differ little in tokens, long samples sit with short ones, and the
shortest, dealt last, go to the rows that lack company.
"""

import numpy as np

from packer.kernels._jit import at, inline, jit

_ASIDE = 32
"""Rows that may refuse a sample before it counts as one without a place."""


@inline
def _is_before(loads, one, other):
    return loads[at(one)] < loads[at(other)] or (loads[at(one)] == loads[at(other)] and one < other)


@inline
def _push(heap, size, loads, row):
    """Add a row to the heap, whose root is the emptiest; return its new size."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if not _is_before(loads, row, heap[at(parent)]):
            break
        heap[at(child)] = heap[at(parent)]
        child = parent
    heap[at(child)] = row
    return size + 1


@inline
def _pop(heap, size, loads):
    """Take the root out of the heap; return its new size."""
    size -= 1
    row = heap[at(size)]
    parent = 0
    while 2 * parent + 1 < size:
        child = 2 * parent + 1
        if child + 1 < size and _is_before(loads, heap[at(child + 1)], heap[at(child)]):
            child += 1
        if not _is_before(loads, heap[at(child)], row):
            break
        heap[at(parent)] = heap[at(child)]
        parent = child
    heap[at(parent)] = row
    return size


@inline
def _meets(owners, owner, row, first_of, next_of, row_of):
    """Say whether a row has another piece of the same sample."""
    place = first_of[at(owner)]
    while place >= 0:
        if row_of[at(place)] == row:
            return True
        place = next_of[at(place)]
    return False


@jit
def deal_longest_first(
    rooms,
    squares,
    owners,
    num_owners,
    num_rows,
    min_samples,
    max_samples,
    capacity,
    max_squares,
    row_of,
    counts,
):
    """Deal samples to rows.

    As soon as no more samples are left than rows lack, these go to the rows that lack them.

    Args:
        rooms: (n,) int64, falling: the room that each sample takes.
        squares: (n,) int64, what it takes of ``max_squares``.
        owners: (n,) int32, the sample that each is a piece of, from 0; −1 where it is the only one. Or empty.
        num_owners: how many there are.
        num_rows: R.
        min_samples: samples that a row must hold.
        max_samples: samples that a row may hold.
        capacity: room of a row.
        max_squares: bound of the sum of ``squares`` in a row.
        row_of: (n,) int32, filled: the row of each sample, −1 where it found none.
        counts: (R,) int64, filled: the samples of each row.

    Returns:
        The room of the samples that are in no row of ``min_samples``.
    """
    loads = np.zeros(num_rows, np.int64)
    used = np.zeros(num_rows, np.int64)
    # a heap of the rows that lack samples, and one of the others that may take more
    heaps = np.empty((2, num_rows), np.int32)
    heaps[0] = np.arange(num_rows)
    in_heap = np.array([num_rows, 0], np.int64)
    aside = np.empty(_ASIDE, np.int32)
    first_of = np.full(num_owners, -1, np.int32)
    next_of = np.empty(len(owners), np.int32)
    counts[:] = 0
    row_of[:] = -1
    lacking = np.int64(num_rows) * min_samples
    for place in range(len(rooms)):
        room, square = rooms[at(place)], squares[at(place)]
        owner = owners[at(place)] if len(owners) > 0 else np.int32(-1)
        chosen = np.int64(-1)
        for turn in range(2):
            # first the heap with the emptiest row; where all that is left is owed, the rows that lack samples
            kind = turn
            if in_heap[0] == 0 or (
                len(rooms) - place > lacking
                and in_heap[1] > 0
                and _is_before(loads, heaps[1, 0], heaps[0, 0])
            ):
                kind = 1 - turn
            num_aside = 0
            while in_heap[kind] > 0 and num_aside < _ASIDE:
                row = np.int64(heaps[kind, 0])
                if loads[at(row)] + room > capacity:
                    break  # nor has any other row of the heap the room
                in_heap[kind] = _pop(heaps[kind], in_heap[kind], loads)
                if used[at(row)] + square <= max_squares and (
                    owner < 0 or not _meets(owners, owner, row, first_of, next_of, row_of)
                ):
                    chosen = row
                    break
                aside[num_aside] = row
                num_aside += 1
            for index in range(num_aside):
                in_heap[kind] = _push(heaps[kind], in_heap[kind], loads, np.int64(aside[index]))
            if chosen >= 0:
                break
        if chosen < 0:
            continue
        row_of[at(place)] = chosen
        loads[at(chosen)] += room
        used[at(chosen)] += square
        if counts[at(chosen)] < min_samples:
            lacking -= 1
        counts[at(chosen)] += 1
        if counts[at(chosen)] < max_samples:
            kind = 0 if counts[at(chosen)] < min_samples else 1
            in_heap[kind] = _push(heaps[kind], in_heap[kind], loads, chosen)
        if owner >= 0:
            next_of[at(place)] = first_of[at(owner)]
            first_of[at(owner)] = place
    lost = np.int64(0)
    for place in range(len(rooms)):
        row = row_of[at(place)]
        if row < 0 or counts[at(row)] < min_samples:
            lost += rooms[at(place)]
    return lost
