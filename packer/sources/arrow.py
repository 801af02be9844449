"""Arrow IPC, file and stream format: memory-mapped, so that lengths and rows cost no copy of the values."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.errors import SourceError
from packer.sources.arrow_slices import can_slice, read_rows
from packer.sources.cache import BatchCache
from packer.sources.columns import decoded_schema, split_path
from packer.sources.ipc_messages import (
    FILE_MAGIC,
    Message,
    decoded_bytes,
    header_ranges,
    layout_of,
    scan_file,
    scan_stream,
)
from packer.sources.location import Location, edge_hash, reading
from packer.sources.part import Columns, Part, PartBlocks, Unit, cut_pieces
from packer.sources.remote import RemoteFile

_HEADER_BYTES = 4 << 10
"""Of a remote stream: what a request for a header asks for, whose size is not known before."""


class ArrowPart(Part):
    """One Arrow IPC file, of either format; a Hugging Face ``.arrow`` file is of the stream format."""

    format = "arrow"

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._num_bytes = location.size()
        self._is_stream = location.read(0, len(FILE_MAGIC)) != FILE_MAGIC
        if not self._is_stream and location.read(self._num_bytes - 6, self._num_bytes) != FILE_MAGIC:
            raise SourceError(
                f"{location.path}: an Arrow file without its footer; it was cut, fetch it again"
            )
        if self.schema.names == ["indices"] and self.schema.types == [pa.uint64()]:
            raise SourceError(
                f"{location.path} is an indices mapping of Hugging Face datasets, not the rows themselves; "
                "save the data set with flatten_indices().save_to_disk(...) and name that folder"
            )
        _ = self._batches  # finds a cut file now, not in the middle of a run

    def __getstate__(self) -> dict[str, Any]:
        kept = ("location", "_num_bytes", "_is_stream")
        return {name: self.__dict__[name] for name in kept}

    @cached_property
    def _file(self) -> pa.NativeFile:
        if self.location.is_remote:
            return pa.PythonFile(self._remote, mode="r")
        return self.location.open_arrow(mapped=True)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, as stored."""
        with reading(self.location), self.location.open_arrow() as file:
            opened = pa.ipc.open_stream(file) if self._is_stream else pa.ipc.open_file(file)
            return decoded_schema(opened.schema)

    @cached_property
    def _footer(self) -> bytes:
        tail = self.location.read(self._num_bytes - 10, self._num_bytes - 6)
        return self.location.read(
            max(self._num_bytes - 10 - int.from_bytes(tail, "little"), 0), self._num_bytes - 10
        )

    @cached_property
    def _batches(self) -> list[Message]:
        keep = self.location.is_remote
        with self._open_headers() as file:
            try:
                if self._is_stream:
                    batches, self._has_dictionaries = scan_stream(file, self._num_bytes, keep=keep)
                    return batches
                return scan_file(file, self._footer, self._num_bytes, keep=keep)
            except SourceError as error:
                raise SourceError(f"{self.location.path}: {error}") from error

    def _open_headers(self) -> BinaryIO:
        """Open the file for its headers: those of a remote one are fetched at once, of a stream in turn."""
        if not self.location.is_remote:
            return self.location.open()
        file = RemoteFile(self.location.path, self._num_bytes)
        if self._is_stream:
            return cast(BinaryIO, io.BufferedReader(file, _HEADER_BYTES))
        with reading(self.location):
            file.hold(header_ranges(self._footer, self._num_bytes))
        return cast(BinaryIO, file)

    @cached_property
    def _remote(self) -> RemoteFile:
        return RemoteFile(self.location.path, self._num_bytes)

    @cached_property
    def _content(self) -> str | None:
        return self.location.content_key()

    @cached_property
    def _first_rows(self) -> NDArray[np.int64]:
        return np.cumsum([0] + [batch.num_rows for batch in self._batches], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """Number of rows, from the batches' headers."""
        return int(self._first_rows[-1])

    def identity(self) -> dict[str, Any]:
        """Return size and hash: of the footer, or of the first and last MiB of a stream, which has none."""
        if self._is_stream:
            return {"num_bytes": self._num_bytes, "sha256": edge_hash(self.location, self._num_bytes)}
        return {"num_bytes": self._num_bytes, "sha256": hashlib.sha256(self._footer).hexdigest()}

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Join record batches, all columns counted; a stream with dictionaries is one unit, read in order."""
        rows = np.diff(self._first_rows)
        num_bytes = np.array([batch.num_bytes for batch in self._batches], np.int64)
        return cut_pieces(part, rows, num_bytes, self._num_bytes if self._in_order else target_bytes)

    def blocks(self, columns: Sequence[str]) -> PartBlocks:
        """Return the record batches, all columns counted; a stream with dictionaries is one block."""
        with self.location.open() as file, reading(self.location):
            try:
                sizes = [decoded_bytes(file, batch) for batch in self._batches]
            except SourceError as error:
                raise SourceError(f"{self.location.path}: {error}") from error
        rows, num_bytes = np.diff(self._first_rows), np.array(sizes, np.int64)
        if self._in_order:
            rows, num_bytes = rows.sum(keepdims=True), num_bytes.sum(keepdims=True)
        return PartBlocks(rows, num_bytes)

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield the unit's record batches, views of the mapped file where it is not compressed."""
        if self._in_order:
            yield from self._read_in_order(tuple(columns))
        else:
            for number in range(unit.start, unit.stop):
                yield self._read_batch(number, tuple(columns), at_random=False)

    @property
    def _in_order(self) -> bool:
        """Whether batches need the dictionaries that came before them in the stream."""
        return self._is_stream and self._has_dictionaries

    def _read_in_order(self, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        with reading(self.location):
            stream = pa.ipc.open_stream(self.location.open_arrow(mapped=True))
        for number in range(len(self._batches)):
            with reading(self.location, f"record batch {number}"):
                batch = self._checked(stream.read_next_batch(), columns, at_random=True)
            yield batch

    def _read_batch(self, number: int, columns: tuple[str, ...], *, at_random: bool) -> pa.RecordBatch:
        message = self._batches[number]
        with reading(self.location, f"record batch {number}"):
            if self.location.is_remote:
                whole = (message.offset, message.offset + message.num_bytes)
                self._remote.hold([whole], self._content if at_random else None)
            if self._is_stream:
                self._file.seek(self._batches[number].offset)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(self._file), self.schema)
            elif self._reads_in_place:
                batch = self._reader(()).get_batch(number)
            else:
                batch = self._reader(columns).get_batch(number)
            return self._checked(batch, columns, at_random=at_random)

    def _checked(self, batch: pa.RecordBatch, columns: tuple[str, ...], *, at_random: bool) -> pa.RecordBatch:
        """Return the columns asked for, their offsets checked: those of a damaged file lead anywhere.

        Lists that are read in order are spared: who takes their lengths sees whether one is negative.
        """
        batch = batch.select([self.schema.field(number).name for number in self._fields(columns)])
        spared = all(pat.is_list(kind) or pat.is_large_list(kind) for kind in batch.schema.types)
        full = at_random or not spared
        batch.validate(full=full)
        if not full and any(lists.is_valid().false_count != lists.null_count for lists in batch.columns):
            raise pa.ArrowInvalid("its nulls are not as many as its header says")
        return batch

    @cached_property
    def _reads_in_place(self) -> bool:
        """Whether batches are views of the file: a choice of columns would copy what it chooses."""
        return not self.location.is_remote and not any(batch.is_compressed for batch in self._batches)

    def _fields(self, columns: tuple[str, ...]) -> list[int]:
        """Return the top-level fields that hold the columns; all, if none is named."""
        tops = [(split_path(self.schema, column) or [column])[0] for column in columns]
        return sorted({self.schema.get_field_index(top) for top in tops}) or list(range(len(self.schema)))

    def _reader(self, columns: tuple[str, ...]) -> pa.RecordBatchFileReader:
        """Open the file for a choice of columns, or for all if none is named."""
        if columns not in self._readers:
            fields = self._fields(columns) if columns else None
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            self._readers[columns] = pa.ipc.open_file(self._file, options=options)
        return self._readers[columns]

    @cached_property
    def _readers(self) -> dict[tuple[str, ...], pa.RecordBatchFileReader]:
        return {}

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Slice rows out of the mapped batches; of a remote file only the rows' values are fetched."""
        numbers = np.searchsorted(self._first_rows, rows, side="right") - 1
        places = list(zip(numbers.tolist(), (rows - self._first_rows[numbers]).tolist(), strict=True))
        if self.location.is_remote and self._can_slice(tuple(columns)):
            return self._fetched(places, tuple(columns))
        return [self._hold_batch(number, tuple(columns), cache).slice(row, 1) for number, row in places]

    def _can_slice(self, columns: tuple[str, ...]) -> bool:
        """Whether rows can be read without the rest of their batches."""
        is_compressed = any(batch.is_compressed for batch in self._batches)
        return not is_compressed and can_slice(self.schema, self._fields(columns))

    def _fetched(self, places: list[tuple[int, int]], columns: tuple[str, ...]) -> list[pa.RecordBatch]:
        with reading(self.location):
            layouts = {number: layout_of(self._batches[number]) for number, _ in places}
            rows = read_rows(
                [(layouts[number], row) for number, row in places],
                self.schema,
                self._fields(columns),
                self.location.fetch,
            )
            for batch in rows:
                batch.validate(full=True)
        return rows

    def _hold_batch(self, number: int, columns: tuple[str, ...], cache: BatchCache) -> pa.RecordBatch:
        if self._in_order:
            key = (self.location, columns)
            return cache.get(key, lambda: list(self._read_in_order(columns)))[number]
        return cache.get(
            (self.location, number, columns),
            partial(self._hold, number, columns),
            are_views=self._reads_in_place,
        )[0]

    def _hold(self, number: int, columns: tuple[str, ...]) -> list[pa.RecordBatch]:
        batch = self._read_batch(number, columns, at_random=(number, columns) not in self._validated)
        if self._reads_in_place:  # what lies in the file was looked at
            self._validated.add((number, columns))
        return [batch]

    @cached_property
    def _validated(self) -> set[tuple[int, tuple[str, ...]]]:
        return set()

    def place_of_row(self, row: int) -> str:
        """Name the record batch and the row."""
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return f"record batch {number}, row {row}"

    def close(self) -> None:
        """Unmap the file."""
        for name in ("_file", "_readers", "_remote"):
            self.__dict__.pop(name, None)
