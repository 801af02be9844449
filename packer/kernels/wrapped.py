"""Wrapped rows: documents end to end, cut where a row ends."""

import numpy as np

from packer.kernels._jit import at, inline, jit
from packer.kernels.limits import next_multiple

LEAST_PIECE = 2
"""Tokens of a piece that trains: its first one is not predicted."""
LEAST_ROOM = 3
"""Tokens of a row that can take a part of any document, and leave one that trains."""
REACH = 64
"""Documents that wait, of which one is looked for that may come next, once no others are left."""


@inline
def share(length, left):
    """Return how many tokens of a document a row with room for ``left`` takes: all of them, or a first part.

    Neither the part nor what remains is a single token, which nothing would predict. 0: the document cannot
    be next.
    """
    if length <= left:
        return length
    part = left - 1 if length - left == 1 else left
    return part if part >= LEAST_PIECE else 0


@inline
def _may_follow(entry, left, row, owners, met):
    """Say whether a row takes a document next: no piece of its sample is in it, and there is room."""
    if len(owners) > 0:
        owner = owners[entry & 0xFFFFFFFF]
        if owner >= 0 and met[owner] == row:
            return False
    return share(entry >> 32, left) > 0


@jit
def wrap(entries, owners, num_owners, capacity, segment_multiple, documents, starts, seqlens, sizes):
    """Lay documents end to end into rows, each full to one token, and cut those that go over its end.

    A document that cannot be next waits, and another one takes its place: one of a sample that is in the row
    already, or one of 3 tokens where there is room for 2. What waits comes as soon as it can. A row that
    ends two tokens short, or more, has nothing left that could fill it.

    Args:
        entries: (n,) int64, length << 32 | document, in their order; overwritten.
        owners: (n,) int32, the sample of each document, from 0; −1 where it is its only one; empty for none.
        num_owners: how many samples have several.
        capacity: tokens of a row, a multiple of ``segment_multiple``, at least ``LEAST_ROOM``.
        segment_multiple: the room of a piece is a multiple of it.
        documents: (P,) filled: the document of each piece, row by row.
        starts: (P,) int32, filled: where the piece begins in its document.
        seqlens: (P,) int32, filled: its tokens.
        sizes: (M,) int64, filled: the pieces of each row.

    Returns:
        The number of pieces, and of rows: at most n + c and n + c + 1, where c is the sum of all rooms over
        ``capacity`` − 1.
    """
    met = np.full(num_owners, -1, np.int64)  # the last row that has a piece of each sample
    n = len(entries)
    # documents that wait stand in entries[first:last], those that have not come yet in entries[upcoming:]
    upcoming, first, last = 0, 0, 0
    document, begun, rest = np.int64(0), np.int64(0), np.int64(0)
    num_pieces = num_rows = 0
    while rest > 0 or first < last or upcoming < n:
        left, size = capacity, 0
        while left > 0:
            if rest == 0:
                entry = np.int64(-1)
                if first < last and _may_follow(entries[first], left, num_rows, owners, met):
                    entry = entries[first]
                    first += 1
                elif left == 1:  # not worth that others wait
                    if upcoming < n and _may_follow(entries[upcoming], left, num_rows, owners, met):
                        entry = entries[upcoming]
                        upcoming += 1
                else:
                    while entry < 0 and upcoming < n:
                        if _may_follow(entries[upcoming], left, num_rows, owners, met):
                            entry = entries[upcoming]
                        else:
                            entries[last] = entries[upcoming]
                            last += 1
                        upcoming += 1
                    place = first
                    while entry < 0 and place < min(last, first + REACH):
                        if _may_follow(entries[place], left, num_rows, owners, met):
                            entry = entries[place]
                            for other in range(place, first, -1):
                                entries[other] = entries[other - 1]
                            first += 1
                        place += 1
                if entry < 0:
                    break
                document, begun, rest = entry & 0xFFFFFFFF, np.int64(0), entry >> 32
            taken = share(rest, left)
            documents[at(num_pieces)] = document
            starts[at(num_pieces)] = begun
            seqlens[at(num_pieces)] = taken
            if len(owners) > 0 and owners[document] >= 0:
                met[owners[document]] = num_rows
            num_pieces += 1
            size += 1
            begun += taken
            rest -= taken
            left = 0 if rest > 0 else left - next_multiple(segment_multiple, taken)
        sizes[at(num_rows)] = size
        num_rows += 1
    return num_pieces, num_rows
