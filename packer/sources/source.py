"""A data set as the user named it: files in their documented order, one row after the other."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from packer.rereading import CACHE_BYTES, BlockSizes
from packer.sources.cache import BatchCache
from packer.sources.columns import find_field
from packer.sources.part import UNIT_BYTES, Columns, OnError, Part, PartBlocks, Unit

MAX_OPEN_FILES = 128
FILES_AT_ONCE = 32
"""Remote ones, of which rows are asked for at the same time."""


class Source:
    """The rows of one or more files; row i of the whole is sample i.

    Made by `open_source`. Pickles as its paths, so a worker opens the files itself.
    """

    def __init__(self, parts: Sequence[Part], cache_bytes: int = CACHE_BYTES) -> None:
        self.parts = tuple(parts)
        self.cache_bytes = cache_bytes
        """What each process keeps of blocks that were costly to read, about."""
        self._cache = BatchCache(cache_bytes)
        self._used: OrderedDict[int, None] = OrderedDict()

    def tolerating(self, on_error: OnError) -> "Source":
        """Return the same rows; of those that cannot be read, ``on_error`` says what becomes."""
        return Source([part.tolerating(on_error) for part in self.parts], self.cache_bytes)

    def keeping(self, cache_bytes: int) -> "Source":
        """Return the same rows, with another cache."""
        return Source(self.parts, cache_bytes)

    @property
    def files(self) -> list[str]:
        """The files in order, as the user named them or as their folder lists them."""
        return [part.location.path for part in self.parts]

    @property
    def num_rows(self) -> int:
        """Number of rows; JSON Lines are scanned once to count them."""
        return int(self.first_rows[-1])

    @cached_property
    def first_rows(self) -> NDArray[np.int64]:
        """(files + 1,) row of the whole at which each file begins, and the number of rows."""
        return np.cumsum([0] + [part.num_rows for part in self.parts], dtype=np.int64)

    def field(self, column: str) -> pa.Field:
        """Return a column as the first file has it in which it is not all null.

        Raises:
            ColumnError: a file has no such column; the message lists the ones it has.
        """
        filled = [part for part in self.parts if part.known_num_rows != 0]
        fields = [find_field(part.schema, column, owner=part.location.path) for part in filled]
        return next((field for field in fields if not pa.types.is_null(field.type)), fields[0])

    def identity(self) -> list[dict[str, Any]]:
        """Return for each file its format, row count (None where only reading tells), size and SHA-256."""
        return [
            {"format": part.format, "num_rows": part.known_num_rows, **part.identity()} for part in self.parts
        ]

    def units(self, columns: Sequence[str] = (), *, target_bytes: int = UNIT_BYTES) -> list[Unit]:
        """Cut all rows into units of work, in order; the cut depends on the files and the arguments only.

        Args:
            columns: the columns that will be read; all, if none is named.
            target_bytes: about how many bytes of them a unit shall hold.
        """
        return [
            unit
            for number, part in enumerate(self.parts)
            for unit in part.units(number, columns, target_bytes)
        ]

    def blocks(self, columns: Sequence[str] = ()) -> list[PartBlocks | None]:
        """Return the blocks of each file; None where only reading tells how many rows they have.

        Args:
            columns: the columns that will be read; all, if none is named.
        """
        return [self._opened(number).blocks(columns) for number in range(len(self.parts))]

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a unit in order, in batches of bounded size, holding at least ``columns``.

        Raises:
            SourceError: the file is damaged; the message names it and the place in it.
        """
        yield from self._opened(unit.part).read(unit, columns)

    def block_sizes(self, columns: Sequence[str] = ()) -> BlockSizes:
        """Return the blocks that a row at random is read with.

        A file whose rows are read alone is one of 0 bytes.

        Args:
            columns: the columns that will be read; all, if none is named.
        """
        of_parts = []
        for number, part in enumerate(self.parts):
            alone = PartBlocks(np.array([part.num_rows], np.int64), np.zeros(1, np.int64))
            of_parts.append(self._opened(number).whole_blocks(columns) or alone)
        num_rows = np.concatenate([blocks.rows for blocks in of_parts])
        num_bytes = np.concatenate([blocks.num_bytes for blocks in of_parts])
        return BlockSizes(np.cumsum(num_rows) - num_rows, num_rows, num_bytes)

    def first_row_of(self, unit: Unit) -> int:
        """Return the row of the whole at which a unit begins; JSON Lines are scanned once to tell."""
        return int(self.first_rows[unit.part]) + self.parts[unit.part].first_row_of(unit)

    def share_read(self, unit: Unit, num_rows: int) -> float:
        """Return about how much of a unit is read, 0 to 1, once ``num_rows`` of its rows are."""
        return self.parts[unit.part].share_read(unit, num_rows)

    def place(self, unit: Unit, row: int) -> str:
        """Say which file, and where in it, row ``row`` of a unit is."""
        part = self.parts[unit.part]
        return f"{part.location.path}, {part.place(unit, row)}"

    def place_of_row(self, row: int) -> str:
        """Say which file, and where in it, a row of the whole is."""
        owner = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        part = self.parts[owner]
        return f"{part.location.path}, {part.place_of_row(row - int(self.first_rows[owner]))}"

    def rows(self, ids: ArrayLike, columns: Columns) -> list[pa.RecordBatch]:
        """Return one single-row batch for each row number, in the order given.

        Raises:
            IndexError: a number outside ``[0, num_rows)``.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.num_rows):
            raise IndexError(
                f"rows {wanted.min()} to {wanted.max()} asked of a source of {self.num_rows} rows"
            )
        if len(self.parts) == 1:
            return self._opened(0).take(wanted, columns, self._cache)
        owners = np.searchsorted(self.first_rows, wanted, side="right") - 1
        taken: list[pa.RecordBatch | None] = [None] * len(wanted)
        of_owner = {int(owner): np.flatnonzero(owners == owner) for owner in np.unique(owners)}
        parts = {owner: self._opened(owner) for owner in of_owner}

        def take(owner: int) -> list[pa.RecordBatch]:
            return parts[owner].take(wanted[of_owner[owner]] - self.first_rows[owner], columns, self._cache)

        num_remote = sum(part.location.is_remote for part in parts.values())
        if num_remote > 1:  # each waits for its server, so they wait together
            with ThreadPoolExecutor(min(len(parts), FILES_AT_ONCE)) as threads:
                found = list(threads.map(take, parts))
        else:
            found = [take(owner) for owner in parts]
        for at, batches in zip(of_owner.values(), found, strict=True):
            for position, batch in zip(at, batches, strict=True):
                taken[position] = batch
        return [batch for batch in taken if batch is not None]

    def close(self) -> None:
        """Close every file; the next use opens it again."""
        for part in self.parts:
            part.close()
        self._used.clear()

    def __reduce__(self) -> tuple[type["Source"], tuple[tuple[Part, ...], int]]:
        return Source, (self.parts, self.cache_bytes)

    def _opened(self, number: int) -> Part:
        """Return a file, after closing the one that was used least recently if too many are open."""
        self._used[number] = None
        self._used.move_to_end(number)
        if len(self._used) > MAX_OPEN_FILES:
            oldest, _ = self._used.popitem(last=False)
            self.parts[oldest].close()
        return self.parts[number]
