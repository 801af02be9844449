"""CSV and TSV, plain or compressed (gzip, zstd): units are byte ranges that an index of the rows cuts."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import SourceError
from packer.sources.cache import BatchCache
from packer.sources.columns import find_field
from packer.sources.delimited_rows import NOT_UTF8_CURE, Layout, Rows, parse_rows, split_rows
from packer.sources.json_rows import LineError
from packer.sources.line_index import mapped
from packer.sources.location import Location, reading
from packer.sources.part import Columns, Unit, cut_rows
from packer.sources.text_part import BYTE_ORDER_MARK, TextPart

SUFFIXES = tuple(f".{name}{packed}" for name in ("csv", "tsv", "tab") for packed in ("", ".gz", ".zst"))
"""By which a file is told: CSV has no first bytes of its own."""


class _Index(NamedTuple):
    """Where the rows are; in unlinked temporary files, which cost no memory."""

    bounds: NDArray[np.int64]
    """(rows, 2) first byte of a row and the one after its last."""
    content: NDArray[np.uint8] | None
    """Of a compressed file: its bytes."""


class DelimitedPart(TextPart):
    """One CSV or TSV file: UTF-8, names in the first row, values with delimiters or line ends quoted.

    A value has the type that is asked for: text, integer, or a list of integers as JSON writes it. An empty
    one is null. Blank lines are no rows.
    """

    format = "csv"
    utf8_rule = "packer reads UTF-8"

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._read_header()

    def _read_header(self) -> None:
        """Read the names, and see whether there is a row at all: a wrong file is found now."""
        name = self.location.name.lower().removesuffix(".gz").removesuffix(".zst")
        head = next(self._blocks(0, self._num_bytes), b"").partition(b"\n")[0]
        # A comma unless the header has none: where it is the decimal sign, programs write semicolons.
        found = next((sign for sign in ",;\t" if sign.encode() in head), ",")
        self._layout = Layout("\t" if name.endswith((".tsv", ".tab")) else found, ())
        for rows in self._split(self._blocks(0, self._num_bytes)):
            if not self._layout.names and len(rows.starts):
                try:
                    self._layout = self._layout.named(rows.row(0).removeprefix(BYTE_ORDER_MARK))
                except ValueError as error:
                    raise SourceError(
                        f"{self.location.path}: its header is not UTF-8; {NOT_UTF8_CURE}"
                    ) from error
                rows = rows.between(1, len(rows.starts))
            if len(rows.starts):
                self._is_empty = False
                break

    def __getstate__(self) -> dict[str, Any]:
        kept = ("location", "_num_bytes", "_compression", "_on_error", "_is_empty", "_layout")
        return {name: self.__dict__[name] for name in kept} | {"_num_bytes_read": 0}

    @property
    def schema(self) -> pa.Schema:
        """The names of the header; the types are told by reading only, so all are null here."""
        return pa.schema([(name, pa.null()) for name in self._layout.names])

    @property
    def num_rows(self) -> int:
        """Number of rows; counts them in one pass, and keeps the index that comes of it."""
        return len(self._index.bounds)

    @property
    def known_num_rows(self) -> int | None:
        """None: only reading tells; or 0, which the beginning tells."""
        return 0 if self._is_empty else None

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut between rows, by the index: a line end may be within quotes. Compressed: one unit."""
        if self._is_empty:
            return []
        if self._compression:
            return [Unit(part, 0, self._num_bytes, 0, None, self._num_bytes)]
        return cut_rows(part, np.append(self._index.bounds[:, 0], self._num_bytes), target_bytes)

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Parse the unit's rows block by block, only the columns asked for."""
        first = unit.first_row or 0
        for rows in self._unit_rows(unit):
            numbers = range(first, first + len(rows.starts))
            yield self._parse(rows, columns, numbers)
            first = numbers.stop

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Read and parse single rows, found through the index."""
        lines = Rows.of([self._row(row) for row in rows.tolist()])
        batch = self._parse(lines, columns, rows.tolist())
        return [batch.slice(row, 1) for row in range(len(rows))]

    def share_read(self, unit: Unit, num_rows: int) -> float:
        """Return how many of the rows, or of a compressed file's bytes, are read."""
        if self._compression:
            return self._num_bytes_read / max(self._num_bytes, 1)
        return super().share_read(unit, num_rows)

    @cached_property
    def _index(self) -> _Index:
        """Made in one pass, with a copy of a compressed file's bytes: there is no seeking in them."""
        with (
            tempfile.TemporaryFile(prefix="packer-") as bounds,
            tempfile.TemporaryFile(prefix="packer-") if self._compression else nullcontext() as copy_file,
        ):
            offset, is_header = 0, True
            for rows in self._split(self._blocks(0, self._num_bytes)):
                found = np.stack([rows.starts, rows.stops], axis=1) + offset
                found[1 if is_header and len(found) else 0 :].tofile(bounds)
                is_header &= not len(found)
                offset += len(rows.content)
                if copy_file is not None:
                    copy_file.write(rows.content)
            content = None if copy_file is None else mapped(copy_file, np.dtype(np.uint8))
            return _Index(mapped(bounds, np.dtype(np.int64)).reshape(-1, 2), content)

    def _row(self, row: int) -> bytes:
        start, stop = self._index.bounds[row].tolist()
        if self._index.content is not None:
            return self._index.content[start:stop].tobytes()
        with reading(self.location, f"row {row}"):
            line: bytes = self._file.read_at(stop - start, start)
        return line

    def _unit_rows(self, unit: Unit) -> Iterator[Rows]:
        """Yield a unit's rows; of a compressed file all but the header."""
        is_header = self._compression is not None
        for rows in self._split(self._blocks(unit.start, unit.stop)):
            if is_header and len(rows.starts):
                rows, is_header = rows.between(1, len(rows.starts)), False
            if len(rows.starts):
                yield rows

    def _parse(self, rows: Rows, columns: Columns, numbers: Sequence[int]) -> pa.RecordBatch:
        for column in columns:
            find_field(self.schema, column, owner=self.location.path)
        try:
            return parse_rows(rows, self._layout, columns, self._on_error)
        except LineError as error:
            raise SourceError(f"{self.location.path}, row {numbers[error.row]}: {error}") from error
        except SourceError as error:
            raise SourceError(f"{self.location.path}: {error}") from error

    def _split(self, blocks: Iterator[bytes]) -> Iterator[Rows]:
        return split_rows(
            blocks, self._layout.delimiter, owner=self.location.path, max_row_bytes=self._max_line_bytes
        )
