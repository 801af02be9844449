"""Rows of CSV and TSV: where they end, for a line end may be within quotes, and their values as columns."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
from numpy.typing import NDArray

from packer.errors import SourceError
from packer.sources.json_rows import LineError
from packer.sources.part import Columns, OnError
from packer.sources.skipped import among_skipped

_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_MAX_SHOWN = 60


class Rows(NamedTuple):
    """Whole rows end to end; row i is ``content[starts[i] : stops[i]]``, without its line end."""

    content: bytes
    starts: NDArray[np.int64]
    """(rows,)"""
    stops: NDArray[np.int64]
    """(rows,)"""

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> "Rows":
        """Join single rows."""
        sizes = np.array([len(row) for row in rows], np.int64)
        stops = np.cumsum(sizes + 1) - 1
        return cls(b"\n".join(rows), stops - sizes, stops)

    def between(self, start: int, stop: int) -> "Rows":
        """Return the rows ``[start, stop)``."""
        if start == stop:
            return Rows.of([])
        first = int(self.starts[start])
        content = self.content[first : int(self.stops[stop - 1])]
        return Rows(content, self.starts[start:stop] - first, self.stops[start:stop] - first)

    def row(self, number: int) -> bytes:
        """Return one row."""
        return self.content[self.starts[number] : self.stops[number]]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a row is made of."""

    delimiter: str
    names: tuple[str, ...]
    """Of the header."""

    def named(self, header: bytes) -> "Layout":
        """Return the layout with the names of a header, the first row.

        Raises:
            ValueError: it is not UTF-8.
        """
        return Layout(self.delimiter, tuple(_split(header.decode(), self.delimiter)))


def split_rows(blocks: Iterable[bytes], delimiter: str, *, owner: str, max_row_bytes: int) -> Iterator[Rows]:
    """Yield the rows of a file some MiB at a time, each byte in one of the contents; blank lines are no rows.

    Args:
        blocks: the bytes, from the beginning of a row on.
        delimiter: what separates values.
        owner: what messages call the file.
        max_row_bytes: a longer row is refused.

    Raises:
        SourceError: a quote that is never closed, bare carriage returns, or too long a row.
    """
    ends = _RowEnds(delimiter)
    pending: list[bytes] = []
    num_pending = offset = 0
    for block in blocks:
        found = ends.within(block)
        if ends.bare_return is not None:
            break
        cut = int(found[-1]) + 1 if len(found) else 0
        if cut:
            yield _bounded(b"".join([*pending, block[:cut]]), found + num_pending)
            offset += num_pending + cut
            pending, num_pending = [], 0
        pending.append(block[cut:])
        num_pending += len(block) - cut
        if num_pending > max_row_bytes:
            raise SourceError(
                f"{owner}: the row at byte {offset} is longer than {max_row_bytes} bytes; "
                + (f"close the quote at byte {ends.opened_at}, or double it" if ends.is_open else "split it")
            )
    if ends.bare_return is None and ends.ends_in_return:
        ends.bare_return = offset + num_pending - 1
    if ends.bare_return is not None:
        raise SourceError(
            f"{owner}: a bare carriage return at byte {ends.bare_return}; convert the line ends, or "
            "quote the value"
        )
    if ends.is_open:
        raise SourceError(
            f"{owner}: the quote at byte {ends.opened_at} is never closed; close it, double it within a "
            "quoted value, or fetch the file again if it was cut"
        )
    if num_pending:
        yield _bounded(b"".join(pending), np.array([num_pending]))


def _bounded(content: bytes, ends: NDArray[np.int64]) -> Rows:
    starts = np.concatenate([[0], ends[:-1] + 1])
    view = np.frombuffer(content, np.uint8)
    stops = ends - ((ends > starts) & (view[ends - 1] == _RETURN))
    keep = stops > starts
    return Rows(content, starts[keep], stops[keep])


class _RowEnds:
    """Finds the line ends outside quotes.

    A quote opens a value at its beginning only, and closes it unless another follows; any other one is a
    letter, as pyarrow and Python have it.
    """

    def __init__(self, delimiter: str) -> None:
        self._openers = np.frombuffer(delimiter.encode() + b"\r\n", np.uint8)
        self._last = _NEWLINE
        self._has_closed = False  # the last byte is a quote that closed a value
        self._offset = 0
        self.is_open = False
        self.opened_at = 0
        """Byte of the quote that opened last."""
        self.bare_return: int | None = None
        """Byte of a carriage return outside quotes that no line feed follows."""

    @property
    def ends_in_return(self) -> bool:
        """The last byte is a carriage return outside quotes."""
        return self._last == _RETURN and not self.is_open

    def within(self, block: bytes) -> NDArray[np.int64]:
        """Return the positions in the next block of the line feeds that end a row."""
        view = np.frombuffer(block, np.uint8)
        if self.ends_in_return and len(view) and view[0] != _NEWLINE:
            self.bare_return = self._offset - 1
        was_open, toggles = self.is_open, self._toggles(view)

        def outside(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            is_outside: NDArray[np.bool_] = (np.searchsorted(toggles, positions) + was_open) % 2 == 0
            return positions[is_outside]

        returns = outside(np.flatnonzero(view[:-1] == _RETURN))
        bare = returns[view[returns + 1] != _NEWLINE]
        if len(bare) and self.bare_return is None:
            self.bare_return = self._offset + int(bare[0])
        if len(toggles):
            self.is_open = bool((len(toggles) + was_open) % 2)
            if self.is_open:
                self.opened_at = self._offset + int(toggles[-1])
        if len(view):
            self._last = int(view[-1])
            self._has_closed = bool(len(toggles)) and toggles[-1] == len(view) - 1 and not self.is_open
        self._offset += len(view)
        ends: NDArray[np.int64] = np.flatnonzero(view == _NEWLINE)
        return outside(ends)

    def _toggles(self, view: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the positions of the quotes that open or close."""
        quotes: NDArray[np.int64] = np.flatnonzero(view == _QUOTE)
        if not len(quotes):
            return quotes
        before = view[quotes - 1]
        if quotes[0] == 0:
            before[0] = self._last if self._last != _QUOTE or self._has_closed else 0
        may_open = np.isin(before, self._openers) | (before == _QUOTE)
        opens = (np.arange(len(quotes)) + self.is_open) % 2 == 0
        if may_open[opens].all():
            return quotes
        found: list[int] = []
        is_open, closed = self.is_open, -1 if self._has_closed else -2
        may_open = np.isin(before, self._openers)
        for at, begins in zip(quotes.tolist(), may_open.tolist(), strict=True):
            if is_open:
                is_open, closed = False, at
            elif begins or closed == at - 1:
                is_open = True
            else:
                continue
            found.append(at)
        return np.array(found, np.int64)


def parse_rows(rows: Rows, layout: Layout, columns: Columns, on_error: OnError = "error") -> pa.RecordBatch:
    """Parse rows into one batch of the named columns.

    An empty value is null, a quoted empty one an empty text. A list is written as JSON writes it.

    Args:
        rows: one or more.
        layout: of the file they are of.
        columns: each with the type to read it as; None: as a text.
        on_error: what becomes of what is no row; `skipped_rows` tells which were skipped.

    Raises:
        LineError: a row has another number of values, or a value that is not of its column's type.
    """
    try:
        return _parse(rows, layout, columns)
    except _ROW_ERRORS as error:
        wrong = _wrong_rows(rows, layout, columns, 0)
        first = next(wrong, None)
        if first is None:
            raise SourceError(f"rows that cannot be told apart ({error}); quote the values") from error
        if on_error != "skip":
            problem = _problem(rows.row(first), layout, columns) or str(error).splitlines()[0]
            raise LineError(first, problem) from error
    refused = [first, *wrong]
    kept = np.setdiff1d(np.arange(len(rows.starts)), refused)
    return among_skipped(_parse(Rows.of([rows.row(row) for row in kept.tolist()]), layout, columns), refused)


_ROW_ERRORS = (pa.ArrowException, LineError)


def _parse(rows: Rows, layout: Layout, columns: Columns) -> pa.RecordBatch:
    # By number: names may be empty, or stand twice.
    numbers = {column: str(layout.names.index(column)) for column in columns}
    types = {
        numbers[column]: pa.int64() if data_type == pa.int64() else pa.string()
        for column, data_type in columns.items()
    }
    first = {"0": pa.string()} if not types else {}  # so that there are rows
    table = (
        pc.read_csv(
            pa.BufferReader(rows.content),
            read_options=pc.ReadOptions(
                use_threads=False,
                block_size=len(rows.content) + 1,
                column_names=[str(number) for number in range(len(layout.names))],
            ),
            parse_options=pc.ParseOptions(delimiter=layout.delimiter, newlines_in_values=True),
            convert_options=pc.ConvertOptions(
                column_types=types | first,
                include_columns=list(types | first),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        if len(rows.starts)
        else pa.table({number: pa.array([], kind) for number, kind in types.items()})
    )
    if table.num_rows != len(rows.starts):
        raise pa.ArrowInvalid(f"{table.num_rows} rows where {len(rows.starts)} lines end")
    arrays = []
    for column, data_type in columns.items():
        array = table.column(numbers[column]).combine_chunks()
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        is_list = data_type is not None and pa.types.is_list(data_type)
        arrays.append(lists_of_json(array, column, data_type) if is_list else array)
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def lists_of_json(texts: pa.Array, column: str, data_type: pa.DataType) -> pa.Array:
    """Return lists of integers from the JSON of each.

    Raises:
        LineError: a text is no such list.
    """
    lists: list[list[int | None] | None] = []
    for row, text in enumerate(texts.to_pylist()):
        try:
            value = None if text is None else json.loads(text)
            if not (value is None or isinstance(value, list)) or not set(map(type, value or [])) <= _ELEMENTS:
                raise ValueError
            pa.array(value or [], data_type.value_type)
        except (ValueError, RecursionError, OverflowError, pa.ArrowException):
            raise LineError(
                row,
                f"column {column!r} holds {_shown(text)} where a list of integers like [1, 2] was "
                "expected; correct it or name another column",
            ) from None
        lists.append(value)
    return pa.array(lists, data_type)


_ELEMENTS = {int, type(None)}


def _wrong_rows(rows: Rows, layout: Layout, columns: Columns, first: int) -> Iterator[int]:
    """Yield the rows that are none: an error names one at most, so what has one is halved."""
    try:
        _parse(rows, layout, columns)
    except _ROW_ERRORS:
        if len(rows.starts) == 1:
            yield first
            return
        half = len(rows.starts) // 2
        yield from _wrong_rows(rows.between(0, half), layout, columns, first)
        yield from _wrong_rows(rows.between(half, len(rows.starts)), layout, columns, first + half)


def _problem(row: bytes, layout: Layout, columns: Columns) -> str | None:
    """Return what is wrong about a row, and the cure."""
    values = _split(row.decode(errors="surrogateescape"), layout.delimiter)
    if len(values) != len(layout.names):
        return (
            f"{len(values)} values where the header names {len(layout.names)}; correct the row, and quote "
            "values that hold a delimiter, a quote or a line end"
        )
    for column, data_type in columns.items():
        value = values[layout.names.index(column)]
        try:
            value.encode()
        except UnicodeError:
            return f"column {column!r} is not UTF-8; {NOT_UTF8_CURE}"
        try:
            _parse(Rows.of([row]), layout, {column: data_type})
        except LineError as error:
            return str(error)
        except pa.ArrowException:
            asked = "an integer" if data_type == pa.int64() else "a text"
            return (
                f"column {column!r} holds {_shown(value)} where {asked} was expected; correct it or name "
                "another column"
            )
    return None


NOT_UTF8_CURE = (
    "convert the file: iconv -f latin1 -t utf-8 FILE > FILE.utf8.csv, with the encoding that it is of"
)


def _split(row: str, delimiter: str) -> list[str]:
    csv.field_size_limit(1 << 30)  # what a row may be; 128 KiB by default
    return next(csv.reader(io.StringIO(row, newline=""), delimiter=delimiter), [])


def _shown(text: str) -> str:
    quoted = json.dumps(text)
    return quoted if len(quoted) <= _MAX_SHOWN else f"{quoted[:_MAX_SHOWN]} ..."
