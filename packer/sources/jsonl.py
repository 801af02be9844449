"""JSON Lines, plain or compressed (gzip, zstd): units are byte ranges; a line index gives rows at random."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import SourceError
from packer.node_cache import node_cache
from packer.sources.cache import BatchCache
from packer.sources.columns import find_field, split_path
from packer.sources.json_rows import (
    LineError,
    parse_lines,
    parse_object,
    whole_file_problem,
    with_replaced_surrogates,
)
from packer.sources.line_index import BLOCK_BYTES, LineIndex, index_lines, spooled
from packer.sources.location import Location, reading
from packer.sources.part import Columns, Unit
from packer.sources.text_part import BYTE_ORDER_MARK, TextPart

_HEAD_ROWS = 1000
_LINE_END_BYTES = 16 << 10
_SHARED_BYTES = 8 << 20
_SPOOL_RATIO = 8
"""How often longer than its file an unpacked one is thought to be: texts pack to a fourth or fifth."""


class JsonLinesPart(TextPart):
    """One JSON Lines file: an object a line, UTF-8, lines ended by LF or CR LF; blank lines are no rows."""

    format = "jsonl"
    utf8_rule = "JSON Lines are UTF-8"

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        _ = self.schema  # finds a file that is no JSON Lines now, not in the middle of a run

    def __getstate__(self) -> dict[str, Any]:
        kept = ("location", "_num_bytes", "_compression", "_on_error", "_is_empty", "schema")
        return {name: self.__dict__[name] for name in kept} | {"_num_bytes_read": 0}

    @cached_property
    def schema(self) -> pa.Schema:
        """The keys of the first rows; their types are told by reading only, so all are null here."""
        keys: dict[str, Any] = {}
        wrong: list[LineError] = []
        for lines in self._rows_between(0, self._num_bytes):
            self._is_empty = False
            head = lines[:_HEAD_ROWS]
            for row, line in enumerate(head):
                try:
                    merge_keys(keys, parse_object(line, row))
                except LineError as error:
                    wrong.append(error)
            # One wrong line among others is found when it is read.
            if len(wrong) == len(head) or head[0].strip() in (b"[", b"{"):
                problem = whole_file_problem(head[0]) or wrong[0]
                raise SourceError(f"{self.location.path}, row 0: {problem}") from wrong[0]
            break
        return pa.schema(key_fields(keys))

    @property
    def num_rows(self) -> int:
        """Number of rows; counts them in one pass, and keeps the index that comes of it."""
        return len(self._index)

    @property
    def known_num_rows(self) -> int | None:
        """Number of rows, if they were counted already, or none at all."""
        if "_index" in self.__dict__:
            return len(self._index)
        return 0 if self._is_empty else None

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut at byte positions; a line belongs to the unit in which it begins. Compressed: one unit."""
        step = self._num_bytes if self._compression else max(target_bytes, 1)
        return [
            Unit(
                part,
                start,
                min(start + step, self._num_bytes),
                None,
                None,
                min(step, self._num_bytes - start),
            )
            for start in range(0, self._num_bytes, max(step, 1))
        ]

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Parse the unit's lines block by block, only the columns asked for."""
        if self._is_empty:
            return
        paths = self._paths(columns)
        num_rows = 0
        for lines in self._rows_between(unit.start, unit.stop):
            try:
                yield parse_lines(lines, paths, columns, self._on_error)
            except LineError as error:
                raise SourceError(
                    f"{self.location.path}, {self.place(unit, num_rows + error.row)}: {error}"
                ) from error
            num_rows += len(lines)

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Read and parse single lines, found through the index."""
        lines = self._lines(rows)
        try:
            batch = parse_lines(lines, self._paths(columns), columns, self._on_error)
        except LineError as error:
            raise SourceError(f"{self.location.path}, row {rows[error.row]}: {error}") from error
        return [batch.slice(row, 1) for row in range(len(lines))]

    def first_row_of(self, unit: Unit) -> int:
        """Count the rows that begin before the unit does."""
        return int(np.searchsorted(self._index.bounds[:, 0], unit.start)) if unit.start else 0

    def share_read(self, unit: Unit, num_rows: int) -> float:
        """Return how many of the file's bytes are read; a plain file has units too small to ask."""
        return self._num_bytes_read / max(self._num_bytes, 1) if self._compression else 0.0

    def place(self, unit: Unit, row: int) -> str:
        """Name the row; the rows before the unit are counted for it."""
        before = sum(len(lines) for lines in self._rows_between(0, unit.start)) if unit.start else 0
        return f"row {before + row}"

    @cached_property
    def _spooled(self) -> tuple[NDArray[np.uint8], LineIndex]:
        """A decompressed copy, made once on this node: no seeking in a compressed stream."""
        return spooled(
            self._unmarked_blocks,
            owner=self.location.path,
            max_line_bytes=self._max_line_bytes,
            content=self._content if _SPOOL_RATIO * self._num_bytes <= node_cache().limit else None,
        )

    @cached_property
    def _index(self) -> LineIndex:
        """The lines, found once on this node."""
        if self._compression:
            return self._spooled[1]
        return index_lines(
            self._unmarked_blocks,
            owner=self.location.path,
            max_line_bytes=self._max_line_bytes,
            content=self._content,
        )

    @property
    def _content(self) -> str | None:
        """What the index is kept by for other processes; a small file is read as fast as an index of it."""
        is_small = self._num_bytes < _SHARED_BYTES and not self.location.is_remote
        return None if is_small else self.location.content_key()

    def _lines(self, rows: NDArray[np.int64]) -> list[bytes]:
        """Return rows as they are stored; those of a remote file are fetched at once."""
        # (rows, 2) -> [(start, stop), ...]
        bounds = [(start, stop) for start, stop in self._index.bounds[rows].tolist()]
        if self._compression:
            lines = [self._spooled[0][start:stop].tobytes() for start, stop in bounds]
        elif self.location.is_remote:
            lines = self.location.fetch(bounds)
        else:
            lines = []
            for row, (start, stop) in zip(rows.tolist(), bounds, strict=True):
                with reading(self.location, f"row {row}"):
                    lines.append(self._file.read_at(stop - start, start))
        return [
            line.removeprefix(BYTE_ORDER_MARK) if start == 0 else line
            for line, (start, _) in zip(lines, bounds, strict=True)
        ]

    def _paths(self, columns: Columns) -> dict[str, list[str]]:
        for column in columns:
            find_field(self.schema, column, owner=self.location.path)
        return {column: split_path(self.schema, column) or [column] for column in columns}

    def _rows_between(self, start: int, stop: int) -> Iterator[list[bytes]]:
        """Yield the rows that begin in ``[start, stop)``, some MiB at a time, blank lines left out."""
        if not self._compression:
            start = self._after_line_end(start - 1) if start else 0
            stop = self._after_line_end(stop - 1) if stop < self._num_bytes else stop
        pending: list[bytes] = []
        pending_bytes = 0
        first = start == 0
        for block in self._blocks(start, stop):
            whole, line_end, rest = block.rpartition(b"\n")
            if line_end:
                joined = b"".join([*pending, whole])
                lines = joined.split(b"\n") if joined.strip() else []
                if first and lines:
                    lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
                first = False
                pending, pending_bytes = [], 0
                if rows := [line for line in lines if line.strip()]:
                    yield rows
            pending.append(rest)
            pending_bytes += len(rest)
            if pending_bytes > self._max_line_bytes:
                raise SourceError(
                    f"{self.location.path}: a line is longer than {self._max_line_bytes} bytes; is it JSON "
                    "Lines?"
                )
        last = b"".join(pending)
        last = last.removeprefix(BYTE_ORDER_MARK) if first else last
        if last.strip():
            yield [last]

    def _unmarked_blocks(self) -> Iterator[bytes]:
        """Yield all bytes, spaces in place of a byte-order mark: a line of that alone is blank."""
        blocks = self._blocks(0, self._num_bytes)
        head = b""
        while len(head) < len(BYTE_ORDER_MARK) and (block := next(blocks, b"")):
            head += block
        if head.startswith(BYTE_ORDER_MARK):
            head = b" " * len(BYTE_ORDER_MARK) + head[len(BYTE_ORDER_MARK) :]
        if head:
            yield head
        yield from blocks

    def _after_line_end(self, position: int) -> int:
        """Return the byte after the first line end at or after ``position``."""
        step = _LINE_END_BYTES
        while position < self._num_bytes:
            with reading(self.location):
                block = self.location.read(position, min(position + step, self._num_bytes))
            if not block:
                raise SourceError(f"{self.location.path} shrank while it was read; run again")
            at = block.find(b"\n")
            if at >= 0:
                return position + at + 1
            position += len(block)
            step = min(2 * step, BLOCK_BYTES)
        return self._num_bytes


def merge_keys(keys: dict[str, Any], content: dict[str, Any]) -> None:
    """Add the keys of an object, and of the objects in it, to a tree of keys."""
    for key, value in content.items():
        below = keys.setdefault(key, {})
        if isinstance(value, dict):
            merge_keys(below, value)


def key_fields(keys: dict[str, Any]) -> list[pa.Field]:
    """Return a tree of keys as columns of structs and nulls."""
    return [
        pa.field(key, pa.struct(key_fields(below)) if below else pa.null())
        for key, below in keys.items()
        if with_replaced_surrogates(key) == key  # JSON can write a key that no column can be named by
    ]
