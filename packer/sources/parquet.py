"""Parquet: units are row groups; rows at random come from a bounded cache of decoded row groups."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_numpy
from packer.errors import SourceError
from packer.sources.cache import BatchCache
from packer.sources.columns import decoded_schema, find_field, split_path, take_column
from packer.sources.location import Location, reading
from packer.sources.part import BATCH_BYTES, BATCH_ROWS, Columns, Part, PartBlocks, Unit, cut_pieces
from packer.sources.remote import Range, RemoteFile

_VALUE_BYTES = {
    "BOOLEAN": 1 / 8,
    "INT32": 4.0,
    "INT64": 8.0,
    "INT96": 8.0,
    "FLOAT": 4.0,
    "DOUBLE": 8.0,
    "BYTE_ARRAY": 4.0,
}
_OFFSET_BYTES = 4

FETCH_BYTES = 64 << 20
"""Of remote row groups that are fetched at once, about: they are held as stored until they are decoded."""

NUMBER_BATCH_BYTES = 2 << 20
"""What the cache of one core holds: numbers decode a tenth faster into it than into main memory."""


class ParquetPart(Part):
    """One Parquet file."""

    format = "parquet"

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._num_bytes = location.size()
        if (self._group_rows < 0).any() or self.num_rows != self._metadata.num_rows:
            raise SourceError(f"{location.path}: its footer counts its rows in two ways; fetch it again")

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "_num_bytes": self._num_bytes}

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        cure = "if it is encrypted, decrypt it first; else fetch it again"
        with reading(self.location, cure=cure), self.location.open_arrow() as file:
            return pq.read_metadata(file)

    @cached_property
    def _remote(self) -> RemoteFile:
        return RemoteFile(self.location.path, self._num_bytes)

    @cached_property
    def _content(self) -> str | None:
        return self.location.content_key()

    @cached_property
    def _file(self) -> pq.ParquetFile:
        is_remote = self.location.is_remote
        with reading(self.location):
            return pq.ParquetFile(
                pa.PythonFile(self._remote, mode="r") if is_remote else self.location.open_arrow(),
                metadata=self._metadata,
                read_dictionary=self._dictionary_texts(),
                page_checksum_verification=True,
                pre_buffer=False,
            )

    @cached_property
    def _group_rows(self) -> NDArray[np.int64]:
        metadata = self._metadata
        return np.array(
            [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)], np.int64
        )

    @cached_property
    def _first_rows(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self._group_rows)]).astype(np.int64)

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema that the file decodes to."""
        with reading(self.location):
            return decoded_schema(self._metadata.schema.to_arrow_schema())

    @property
    def num_rows(self) -> int:
        """Number of rows of all row groups."""
        return int(self._first_rows[-1])

    def identity(self) -> dict[str, Any]:
        """Return size and hash of the footer, which holds every chunk's place, size and statistics."""
        tail = self.location.read(self._num_bytes - 8, self._num_bytes)
        footer = int.from_bytes(tail[:4], "little")
        content = self.location.read(max(self._num_bytes - 8 - footer, 0), self._num_bytes)
        return {"num_bytes": self._num_bytes, "sha256": hashlib.sha256(content).hexdigest()}

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Join row groups until the named columns hold ``target_bytes`` uncompressed."""
        wanted = self._leaves(columns)
        metadata = self._metadata
        num_bytes = [
            sum(
                metadata.row_group(group).column(leaf).total_uncompressed_size
                for leaf in wanted or range(metadata.num_columns)
            )
            for group in range(metadata.num_row_groups)
        ]
        return cut_pieces(part, self._group_rows, np.array(num_bytes, np.int64), target_bytes)

    def blocks(self, columns: Sequence[str]) -> PartBlocks:
        """Return the row groups, with what their values take once they are decoded."""
        metadata = self._metadata
        leaves = self._leaves(columns) or list(range(metadata.num_columns))
        widths = {leaf: self._value_bytes(leaf) for leaf in leaves}
        num_bytes = np.zeros(metadata.num_row_groups, np.int64)
        for group in range(metadata.num_row_groups):
            chunks = {leaf: metadata.row_group(group).column(leaf) for leaf in leaves}
            num_bytes[group] = sum(
                int(widths[leaf] * chunk.num_values)
                + (chunk.total_uncompressed_size if chunk.physical_type == "BYTE_ARRAY" else 0)
                + (_OFFSET_BYTES * metadata.row_group(group).num_rows if self._is_repeated(leaf) else 0)
                for leaf, chunk in chunks.items()
            )
        return PartBlocks(self._group_rows, num_bytes)

    def _value_bytes(self, leaf: int) -> float:
        """Return what a value of a leaf takes in Arrow; of texts what it takes besides its letters."""
        column = self._metadata.schema.column(leaf)
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            return float(column.length)
        logical = json.loads(column.logical_type.to_json())
        if column.physical_type == "INT32" and "bitWidth" in logical:
            return float(logical["bitWidth"] / 8)
        return _VALUE_BYTES[column.physical_type]

    def _is_repeated(self, leaf: int) -> bool:
        return bool(self._metadata.schema.column(leaf).max_repetition_level > 0)

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Decode the unit's row groups one after the other, only the columns asked for."""
        for group in range(unit.start, unit.stop):
            if self.location.is_remote:
                with reading(self.location, f"row group {group}"):
                    self._remote.hold(self._chunks(group, list(columns)))
            yield from self._read_group(group, list(columns))

    def _read_group(self, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for column in columns:
            find_field(self.schema, column, owner=self.location.path)
        num_rows = 0
        num_values = dict.fromkeys(columns, 0)
        with reading(self.location, f"row group {group}"):
            for batch in self._file.iter_batches(
                batch_size=self._batch_rows(group, columns),
                row_groups=[group],
                columns=columns,
                use_threads=False,
            ):
                num_rows += batch.num_rows
                for column in columns:
                    array = take_column(batch, column)
                    if pat.is_dictionary(array.type):
                        array.validate(full=True)  # a damaged page names texts that are not there
                    num_values[column] += _num_values(array)
                yield batch
        if num_rows != self._group_rows[group]:
            raise SourceError(
                f"{self.location.path}, row group {group}: holds {num_rows} rows where its footer promises "
                f"{self._group_rows[group]}; the file is damaged, fetch it again"
            )
        for column, found in num_values.items():
            chunks = [self._metadata.row_group(group).column(leaf) for leaf in self._leaves([column])]
            # A damaged page may make two rows of one, and pyarrow stops at the promised number of rows.
            if any(found not in (0, chunk.num_values) for chunk in chunks):
                raise SourceError(
                    f"{self.location.path}, row group {group}: column {column!r} has {found} values "
                    f"where its footer promises {chunks[0].num_values}; the file is damaged, fetch it again"
                )

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Decode the row groups of the rows, each once; the latest ones stay in a bounded cache."""
        groups = np.searchsorted(self._first_rows, rows, side="right") - 1
        taken: list[pa.RecordBatch | None] = [None] * len(rows)
        for group in self._fetched(np.unique(groups).tolist(), columns, cache):
            batches = cache.get(
                (self.location, group, tuple(columns)), partial(self._decode_group, group, list(columns))
            )
            firsts = np.cumsum([0] + [batch.num_rows for batch in batches])
            for at in np.flatnonzero(groups == group):
                row = int(rows[at] - self._first_rows[group])
                which = int(np.searchsorted(firsts, row, side="right")) - 1
                taken[at] = batches[which].slice(row - int(firsts[which]), 1)
        return [batch for batch in taken if batch is not None]

    def _fetched(self, groups: list[int], columns: Columns, cache: BatchCache) -> Iterator[int]:
        """Yield row groups; of a remote file, those that `FETCH_BYTES` hold are fetched at once before."""
        if not self.location.is_remote:
            yield from groups
            return
        yield from (held := [group for group in groups if (self.location, group, tuple(columns)) in cache])
        chunks = {group: self._chunks(group, list(columns)) for group in groups if group not in held}
        sizes = [sum(stop - start for start, stop in chunks[group]) for group in chunks]
        rounds = np.cumsum(sizes, dtype=np.int64) // FETCH_BYTES
        for number in np.unique(rounds):
            together = [group for group, at in zip(chunks, rounds, strict=True) if at == number]
            with reading(self.location):
                self._remote.hold([chunk for group in together for chunk in chunks[group]], self._content)
            yield from together
        self._remote.drop()

    def _chunks(self, group: int, columns: list[str]) -> list[Range]:
        """Return where the chunks of the columns lie in the file."""
        metadata = self._metadata.row_group(group)
        chunks = [metadata.column(leaf) for leaf in self._leaves(columns)]
        starts = [
            min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
            for chunk in chunks
        ]
        return [
            (start, start + chunk.total_compressed_size) for start, chunk in zip(starts, chunks, strict=True)
        ]

    def _decode_group(self, group: int, columns: list[str]) -> list[pa.RecordBatch]:
        return list(self._read_group(group, columns))

    def place_of_row(self, row: int) -> str:
        """Name the row group and the row."""
        group = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return f"row group {group}, row {row}"

    def close(self) -> None:
        """Close the file."""
        self.__dict__.pop("_remote", None)
        file = self.__dict__.pop("_file", None)
        if file is not None:
            file.close(force=True)

    def _dictionary_texts(self) -> list[str]:
        """Return the string columns to read as dictionaries: a short file may repeat a long text often."""
        schema = self._metadata.schema
        return [
            schema.column(leaf).path
            for leaf in range(self._metadata.num_columns)
            if schema.column(leaf).physical_type == "BYTE_ARRAY"
            and schema.column(leaf).max_repetition_level == 0
            and any(
                self._metadata.row_group(group).column(leaf).has_dictionary_page
                for group in range(self._metadata.num_row_groups)
            )
        ]

    @cached_property
    def _leaf_paths(self) -> list[str]:
        return [self._metadata.schema.column(leaf).path for leaf in range(self._metadata.num_columns)]

    def _leaves(self, columns: Sequence[str]) -> list[int]:
        """Return the numbers of the Parquet leaf columns that a set of dotted columns is made of."""
        paths = self._leaf_paths
        roots = [".".join(split_path(self.schema, column) or [column]) for column in columns]
        return [
            leaf
            for leaf, path in enumerate(paths)
            if any(path == root or path.startswith(f"{root}.") for root in roots)
        ]

    def whole_blocks(self, columns: Sequence[str]) -> PartBlocks:
        """Return the row groups: a row is decoded with its group."""
        return self.blocks(columns)

    def _batch_rows(self, group: int, columns: Sequence[str]) -> int:
        """Return how many rows to decode at a time: texts stay near `BATCH_BYTES`, numbers near theirs."""
        metadata = self._metadata.row_group(group)
        chunks = [metadata.column(leaf) for leaf in self._leaves(columns)]
        texts = [chunk for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"]
        text_bytes = sum(8 * chunk.num_values + chunk.total_uncompressed_size for chunk in texts)
        number_bytes = 8 * (
            sum(chunk.num_values for chunk in chunks) - sum(text.num_values for text in texts)
        )
        num_batches = max(text_bytes / BATCH_BYTES, number_bytes / NUMBER_BATCH_BYTES, 1e-9)
        return int(np.clip(metadata.num_rows / num_batches, 1, BATCH_ROWS))


def _num_values(array: pa.Array) -> int:
    """Return how many values Parquet stores of a column of flat lists; 0 of others, which are not counted.

    A list without elements, or a null in its place, is stored as one value.
    """
    if not (pat.is_list(array.type) or pat.is_large_list(array.type)) or len(array) == 0:
        return 0
    below = array.type.value_type
    if any(pat.is_nested(kind) for kind in ([f.type for f in below] if pat.is_struct(below) else [below])):
        return 0
    offsets = to_numpy(array.offsets)
    return int(offsets[-1] - offsets[0]) + int(np.count_nonzero(offsets[1:] == offsets[:-1]))
