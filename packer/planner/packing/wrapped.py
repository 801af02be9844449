"""Wrapped: the documents in random order end to end, cut where a row ends; no row is short but the last.

See ``packer.kernels.wrapped`` for the rule. Other packings place pieces that are there; this one makes them,
others in every epoch. The rows are shuffled once they are cut, so that the parts of a long document do not
follow each other through the steps; the last one, which holds what is left, stays the last. Those of a
stream of several sources, or passes, keep its order.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels import wrapped as kernels
from packer.kernels.limits import Limits
from packer.planner.choose.pieces import Pieces
from packer.planner.order.orders import (
    entries_in_order,
    id_dtype,
    permutation,
    shuffled_entries,
    subkey,
    take,
)
from packer.planner.order.stream import CutFrom, Draw
from packer.planner.packing.microbatches import IntArray, MicroBatches, compact_owners


def wrapped(pieces: Pieces, limits: Limits, *, key: np.uint64) -> tuple[Pieces, MicroBatches]:
    """Cut samples, in random order, into full rows.

    Args:
        pieces: what is to be planned.
        limits: bounds of a row; its room is a multiple of what each piece is padded to.
        key: of the random order.

    Returns:
        What it is cut into, row by row, and the rows; these hold no part of a sample twice.
    """
    cut, _, rows = _cut(pieces, shuffled_entries(pieces.seqlens, subkey(key, 0)), limits)
    order = np.append(permutation(len(rows) - 1, subkey(key, 1)), len(rows) - 1)
    return cut, replace(rows, starts=rows.starts[order], sizes=rows.sizes[order])


def wrapped_in_order(drawn: Draw, limits: Limits) -> tuple[Draw, MicroBatches]:
    """Cut the samples of a stream, in its order, into full rows.

    Args:
        drawn: the stream.
        limits: bounds of a row; its room is a multiple of what each piece is padded to.

    Returns:
        What it is cut into, row by row, and the rows, in the order of the stream.
    """
    assert drawn.places is not None
    assert drawn.sources is not None
    cut, documents, rows = _cut(drawn.pieces, entries_in_order(drawn.pieces.seqlens), limits)
    pieces = Draw(
        pieces=cut,
        sources=drawn.sources[documents],
        places=_parts(drawn.places[documents], cut),
        pass_sizes=drawn.pass_sizes,
        phase_starts=np.searchsorted(np.maximum.accumulate(documents), drawn.phase_starts),
        cut_from=CutFrom(drawn, documents),
    )
    return pieces, rows


def _parts(places: IntArray, cut: Pieces) -> IntArray:
    """Number what pieces are of: those of several passes are alike where they begin at one token."""
    assert cut.starts is not None
    parts = places.astype(np.int64) << 31 | cut.starts
    numbers: IntArray = np.unique(parts, return_inverse=True)[1].astype(places.dtype)
    return numbers


def _cut(pieces: Pieces, entries: NDArray[np.int64], limits: Limits) -> tuple[Pieces, IntArray, MicroBatches]:
    """Lay documents end to end; return what they are cut into, the document of each piece, and the rows."""
    capacity = int(limits.budgets[0])
    fewest = fewest_rows(pieces, limits)
    owners, num_owners = compact_owners(pieces.owners)
    # every cut ends a row that is full to one token; every other row ends with its last document
    most = len(pieces) + fewest * capacity // (capacity - 1)
    documents = np.empty(most, id_dtype(most))
    starts, seqlens = np.empty((2, most), np.int32)
    sizes = np.empty(most + 1, np.int64)
    num_pieces, num_rows = kernels.wrap(
        entries,
        owners,
        num_owners,
        capacity,
        limits.segment_multiple,
        documents,
        starts,
        seqlens,
        sizes,
    )
    documents, starts, seqlens = documents[:num_pieces], starts[:num_pieces], seqlens[:num_pieces]
    sizes = sizes[:num_rows].copy()
    if pieces.starts is not None and pieces.starts.any():  # some are pieces already
        starts += take(pieces.starts, documents)
    cut = replace(
        pieces,
        lengths=seqlens[np.newaxis],
        seqlens=seqlens,
        ids=pieces.sample_ids(documents),
        starts=starts,
        kept_apart=None,
    )
    rows = MicroBatches(
        pieces=np.arange(num_pieces, dtype=id_dtype(num_pieces)),
        seqlens=seqlens,
        starts=np.cumsum(sizes) - sizes,
        sizes=sizes,
        leftover=documents[:0],
    )
    return cut, documents, rows


def fewest_rows(pieces: Pieces, limits: Limits) -> int:
    """Return below how many rows nothing can go, however samples are cut."""
    multiple = limits.segment_multiple
    if multiple == 1:
        rooms = int(pieces.seqlens.sum(dtype=np.int64))
    else:
        rooms = int((-(-pieces.seqlens.astype(np.int64) // multiple) * multiple).sum())
    return -(-rooms // int(limits.budgets[0]))
