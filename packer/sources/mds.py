"""MDS, the shards of mosaicml-streaming: a small reader of its own, for columns of arrays, texts and numbers.

A shard is ``uint32 n``, ``uint32 offsets (n + 1)``, a JSON copy of its description, then the samples. A
sample is ``uint32`` sizes of its columns of variable size, then the columns. Pickles are never opened.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import numpy_dtype
from packer.errors import SourceError
from packer.sources.cache import BatchCache
from packer.sources.columns import find_field
from packer.sources.location import Location, edge_hash, reading
from packer.sources.part import BATCH_BYTES, BATCH_ROWS, Columns, Part, PartBlocks, Unit, cut_pieces

Value = TypeVar("Value")

INDEX_NAME = "index.json"

_SCALARS = {
    name: pa.type_for_alias(name)
    for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32")
}
_SCALARS |= {"int": pa.int64(), "int64": pa.int64()}
_TEXTS = ("str", "json")
_BYTES = "bytes"
_ARRAY_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


def mds_shards(folder: Location) -> list["MdsPart"] | None:
    """Return the shards of an MDS folder in order; None for any other folder.

    Raises:
        SourceError: an index of another version, or one that names what is not there.
    """
    index = folder.joined(INDEX_NAME)
    if not index.is_file():
        return None
    with reading(index):
        content = json.loads(index.read(0, index.size()))
    if not isinstance(content, dict) or not isinstance(content.get("shards"), list):
        return None
    shards = []
    for number, entry in enumerate(content["shards"]):
        try:
            shards.append(_shard(folder, entry))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(
                f"{index.path}: shard {number} is not described as in MDS version 2 ({error!r}); write the "
                "data set again with a streaming release that writes that"
            ) from error
    return shards


def _shard(folder: Location, entry: dict[str, Any]) -> "MdsPart":
    if entry["format"] != "mds" or entry["version"] != 2:
        raise ValueError(f"{entry['format']} {entry['version']}")
    location = folder.joined(_checked(entry["raw_data"]["basename"], str))
    if not location.is_file():
        packed = entry.get("zip_data")
        raise SourceError(
            f"{location.path} is {'there only compressed' if packed else 'missing'}; "
            f"{'decompress it with streaming' if packed else 'fetch it again'}"
        )
    names = [_checked(name, str) for name in _checked(entry["column_names"], list)]
    encodings = [_checked(encoding, str) for encoding in _checked(entry["column_encodings"], list)]
    sizes = [size if size is None else _checked(size, int) for size in _checked(entry["column_sizes"], list)]
    if len(set(names)) < len(names):
        raise ValueError(f"columns {names}")
    columns = list(zip(names, encodings, sizes, strict=True))
    return MdsPart(location, columns, _checked(entry["samples"], int))


def _checked(value: Any, kind: type[Value]) -> Value:
    """Return a value of the index if it is exactly of its kind, and no negative number."""
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise TypeError(f"{value!r} where {kind.__name__} was expected")
    if isinstance(value, str):
        value.encode()  # JSON can name halves of characters
    checked: Value = value
    return checked


class MdsPart(Part):
    """One shard."""

    format = "mds"

    def __init__(
        self, location: Location, columns: Sequence[tuple[str, str, int | None]], num_rows: int
    ) -> None:
        """Check that the shard is as its index says.

        Args:
            location: the raw shard.
            columns: name, encoding and size in bytes, None where it varies, of each column in order.
            num_rows: number of samples.
        """
        super().__init__(location)
        self._columns = tuple(columns)
        self._num_rows = num_rows
        self._num_bytes = location.size()
        bounds = self._bounds
        first = 4 + bounds.nbytes // 2
        if (np.diff(bounds) < 0).any() or bounds[0] < first or bounds[-1] != self._num_bytes:
            raise SourceError(
                f"{location.path}: its samples do not fill the file; it was cut, fetch it again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("location", "_columns", "_num_rows", "_num_bytes")}

    @cached_property
    def _bounds(self) -> NDArray[np.int64]:
        """(rows + 1,) byte at which each sample begins."""
        head = self.location.read(0, 4 * (self._num_rows + 2))
        numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u4")
        if len(numbers) != self._num_rows + 2 or numbers[0] != self._num_rows:
            raise SourceError(
                f"{self.location.path} does not hold the {self._num_rows} samples that {INDEX_NAME} says; "
                "fetch both again"
            )
        return numbers[1:].astype(np.int64)

    @cached_property
    def _file(self) -> pa.NativeFile:
        return self.location.open_arrow()

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns that can be read: arrays, texts and integers."""
        types = {name: _arrow_type(encoding) for name, encoding, _ in self._columns}
        return pa.schema([(name, data_type) for name, data_type in types.items() if data_type is not None])

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return self._num_rows

    def identity(self) -> dict[str, Any]:
        """Return size and hash of the first and last MiB."""
        return {"num_bytes": self._num_bytes, "sha256": edge_hash(self.location, self._num_bytes)}

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut between samples."""
        sizes = np.diff(self._bounds)
        return cut_pieces(part, np.ones(self._num_rows, np.int64), sizes, target_bytes)

    def blocks(self, columns: Sequence[str]) -> PartBlocks:
        """Return the shard as the one block that it is."""
        return PartBlocks(np.array([self._num_rows]), np.array([self._num_bytes]))

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Read and parse the unit's samples, some MiB at a time."""
        start = unit.start
        while start < unit.stop:
            full = int(np.searchsorted(self._bounds, self._bounds[start] + BATCH_BYTES, side="right")) - 1
            stop = min(max(full, start + 1), unit.stop, start + BATCH_ROWS)
            yield self._parse(range(start, stop), columns)
            start = stop

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Read and parse single samples; those of a remote shard are fetched at once."""
        if not self.location.is_remote:
            return [self._parse(range(row, row + 1), columns) for row in rows.tolist()]
        blocks = self.location.fetch([(int(self._bounds[row]), int(self._bounds[row + 1])) for row in rows])
        return [
            self._parse(range(row, row + 1), columns, block)
            for row, block in zip(rows.tolist(), blocks, strict=True)
        ]

    def close(self) -> None:
        """Close the shard."""
        self.__dict__.pop("_file", None)

    def _parse(self, rows: range, columns: Columns, stored: bytes | None = None) -> pa.RecordBatch:
        for column in columns:
            find_field(self.schema, column, owner=self.location.path)
        begin, end = int(self._bounds[rows.start]), int(self._bounds[rows.stop])
        with reading(self.location, self.place_of_row(rows.start)):
            block = memoryview(self._file.read_at(end - begin, begin) if stored is None else stored)
        values: dict[str, list[memoryview]] = {column: [] for column in columns}
        for row, (start, stop) in zip(
            rows, pairwise(self._bounds[rows.start : rows.stop + 1] - begin), strict=True
        ):
            sample = self._split(block[start:stop], row)
            for column in columns:
                values[column].append(sample[column])
        encodings = {name: encoding for name, encoding, _ in self._columns}
        with reading(self.location, f"samples {rows.start} to {rows.stop - 1}"):
            arrays = [_to_arrow(values[column], encodings[column]) for column in columns]
            if any(len(array) != len(rows) for array in arrays):
                raise ValueError("values that are not of the size that their encoding says")
            return pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _split(self, sample: memoryview, row: int) -> dict[str, memoryview]:
        varying = [name for name, _, size in self._columns if size is None]
        head = 4 * len(varying)
        sizes = np.frombuffer(sample[:head], "<u4").tolist() if len(sample) >= head else []
        found = dict(zip(varying, sizes, strict=False))
        split = {}
        at = head
        for name, _, size in self._columns:
            length = found.get(name, 0) if size is None else size
            split[name] = sample[at : at + length]
            at += length
        if len(found) < len(varying) or at != len(sample):
            raise SourceError(
                f"{self.location.path}, row {row}: its columns do not fill it; fetch the shard again"
            )
        return split


def _arrow_type(encoding: str) -> pa.DataType | None:
    """Return the type that a column of this encoding is read as; None where it is not read."""
    name, _, detail = encoding.partition(":")
    if name in _TEXTS:
        return pa.string()
    if name == _BYTES:
        return pa.binary()
    if name == "ndarray":
        dtype = detail.partition(":")[0]
        if dtype and dtype not in _ARRAY_DTYPES.values():
            return None
        return pa.list_(pa.from_numpy_dtype(np.dtype(dtype or "int64")))
    return _SCALARS.get(name)


def _to_arrow(values: list[memoryview], encoding: str) -> pa.Array:
    if encoding in _TEXTS or encoding == _BYTES:
        return pa.array([bytes(value) for value in values], pa.binary()).cast(_arrow_type(encoding))
    if encoding in _SCALARS:
        flat = np.frombuffer(b"".join(values), numpy_dtype(_SCALARS[encoding]))
        return pa.array(flat)
    arrays = [_decode_array(value, encoding) for value in values]
    offsets = np.cumsum([0] + [len(array) for array in arrays])
    return pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(arrays)))


def _decode_array(value: memoryview, encoding: str) -> NDArray[Any]:
    """Decode ``dtype (1 byte), axes << 2 | log2 bytes of a length (1 byte), lengths, values``.

    What the encoding says already, dtype or shape, is not stored again.
    """
    _, _, detail = encoding.partition(":")
    dtype_name, _, shape_text = detail.partition(":")
    at = 0
    stored: list[int] = []
    try:
        if not dtype_name:
            dtype_name, at = _ARRAY_DTYPES[value[0]], 1
        if shape_text:
            num_axes = shape_text.count(",") + 1
        else:
            num_axes, length_bytes = value[at] >> 2, 1 << (value[at] & 3)
            stored = [int.from_bytes(value[at + 1 : at + 1 + length_bytes], "little")]
            at += 1 + num_axes * length_bytes
    except LookupError as error:
        raise ValueError("what is stored is no array") from error
    if num_axes != 1:
        raise ValueError(f"an array of {num_axes} axes is no list of tokens")
    array = np.frombuffer(value[at:], dtype_name)
    if stored not in ([], [len(array)]):
        raise ValueError(f"an array of {stored[0]} values has {len(array)}")
    return array
