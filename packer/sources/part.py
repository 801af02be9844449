"""What every format offers: a file as rows that can be cut into units, read in order, and taken at random."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.sources.cache import BatchCache
from packer.sources.location import Location

Columns: TypeAlias = Mapping[str, pa.DataType | None]
"""Columns to read, by dotted path, each with the type to read it as where the format has no types (JSON)."""

OnError: TypeAlias = Literal["error", "skip", "replace"]
"""What becomes of a row that cannot be read: it ends the reading, keeps its place as a row of nulls, or has
the unpaired surrogates of its texts replaced, which JSON can write and no text can hold."""

UNIT_BYTES = 16 << 20
BATCH_BYTES = 16 << 20
BATCH_ROWS = 65_536
BLOCK_BYTES = 16 << 20
"""Of the blocks of a file that has none of its own: as much as is read at once."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive rows of one file that are read as one piece of work. Cheap to pickle and to keep."""

    part: int
    """Which file of the source, from 0."""
    start: int
    """First row group, record batch, byte or sequence, in the terms of the format."""
    stop: int
    """The one after the last."""
    first_row: int | None
    """Row of the file at which the unit begins; None where only reading tells (JSON Lines)."""
    num_rows: int | None
    """Number of rows; None where only reading tells."""
    num_bytes: int
    """Bytes to read, near enough to balance work and to report progress."""


class PartBlocks(NamedTuple):
    """The blocks of one file in order: rows that lie together, and are best read together."""

    rows: NDArray[np.int64]
    """(B,) rows of each; some may have none."""
    num_bytes: NDArray[np.int64]
    """(B,) bytes of each in memory, decoded, near enough to size a cache."""


class Part(ABC):
    """One file of a source. Opening it reads its metadata only; it pickles as its location."""

    format: str
    """Name of the format, as the manifest records it."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def tolerating(self, on_error: OnError) -> "Part":
        """Return the file as it is to be read; of most formats, every row can be."""
        return self

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns and their types; null types where only reading tells (JSON Lines)."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of rows; a format that does not record it is scanned once."""

    @property
    def known_num_rows(self) -> int | None:
        """Number of rows where no scan is needed to know it, else None."""
        return self.num_rows

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what tells this file from another: ``num_bytes`` and a ``sha256``; no path, no time."""

    @abstractmethod
    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut the file into units of about ``target_bytes`` of the named columns, never within a row."""

    def whole_blocks(self, columns: Sequence[str]) -> PartBlocks | None:
        """Return the blocks that no row at random is read without; None where rows are read alone.

        Args:
            columns: the columns that will be read; all, if none is named.
        """
        return None

    def blocks(self, columns: Sequence[str]) -> PartBlocks | None:
        """Return what one access makes the reader fetch and decode, as far as no row need be read to know it.

        None where the rows of a stretch of the file are known only once they were read: the units in which
        that was done are its blocks then.

        Args:
            columns: the columns that will be read; all, if none is named.
        """
        return None

    @abstractmethod
    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield the unit's rows in order, in batches of bounded size that hold at least ``columns``."""

    @abstractmethod
    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Return one single-row batch for each of ``rows``, in their order.

        Args:
            rows: row numbers of this file, in range.
            columns: what to read.
            cache: where batches that are costly to make are kept, shared by all files of a source.
        """

    def first_row_of(self, unit: Unit) -> int:
        """Return the row of the file at which a unit begins."""
        assert unit.first_row is not None, "a format whose units do not say it finds it out"
        return unit.first_row

    def share_read(self, unit: Unit, num_rows: int) -> float:
        """Return about how much of a unit is read, 0 to 1, once ``num_rows`` of its rows are."""
        return num_rows / unit.num_rows if unit.num_rows else 0.0

    def place(self, unit: Unit, row: int) -> str:
        """Say where row ``row`` of a unit is, for an error message."""
        return self.place_of_row((unit.first_row or 0) + row)

    def place_of_row(self, row: int) -> str:
        """Say where a row of the file is, for an error message."""
        return f"row {row}"

    @abstractmethod
    def close(self) -> None:
        """Drop open files; the next use opens them again. What was costly to find out stays."""


def cut_pieces(
    part: int, rows: NDArray[np.int64], num_bytes: NDArray[np.int64], target_bytes: int
) -> list[Unit]:
    """Join consecutive row groups, record batches or blocks to units of about ``target_bytes``.

    Args:
        part: which file of the source.
        rows: (pieces,) rows of each piece.
        num_bytes: (pieces,) bytes of each piece.
        target_bytes: a unit ends with the piece that reaches this many.
    """
    units: list[Unit] = []
    start = first_row = unit_rows = unit_bytes = 0
    for piece in range(len(rows)):
        unit_rows += int(rows[piece])
        unit_bytes += int(num_bytes[piece])
        if unit_bytes >= target_bytes or piece == len(rows) - 1:
            units.append(Unit(part, start, piece + 1, first_row, unit_rows, unit_bytes))
            start, first_row = piece + 1, first_row + unit_rows
            unit_rows = unit_bytes = 0
    return units


def cut_rows(part: int, edges: NDArray[np.int64], target_bytes: int) -> list[Unit]:
    """Cut rows of which the bytes are known to units of about ``target_bytes``, in bytes of the file.

    Args:
        part: which file of the source.
        edges: (rows + 1,) first byte of each row, and the one after the last.
        target_bytes: a unit is of the rows that begin within as many.
    """
    wanted = np.arange(edges[0], max(edges[-1], edges[0] + 1), max(target_bytes, 1))
    firsts = np.unique(np.searchsorted(edges[:-1], wanted))
    rows = [*firsts[firsts < len(edges) - 1].tolist(), len(edges) - 1]
    return [
        Unit(part, start, stop, first, last - first, stop - start)
        for first, last in pairwise(rows)
        for start, stop in [edges[[first, last]].tolist()]
    ]
