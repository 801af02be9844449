"""Token files of Megatron and DeepSpeed, ``.bin`` and ``.idx``: a row is a sequence, not a document.

Lengths come from the index alone. The two dialects give the dtype codes from 6 up other meanings, so the
element type is the one whose size makes the ``.bin`` as long as the index says.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_arrow
from packer.errors import SourceError
from packer.mmididx import DEEPSPEED_DTYPES, MEGATRON_DTYPES, IndexFile, read_index
from packer.sources.cache import BatchCache
from packer.sources.location import Location, file_hash, reading
from packer.sources.part import BATCH_ROWS, BLOCK_BYTES, Columns, Part, PartBlocks, Unit

TOKENS_COLUMN = "input_ids"

_INDEX_BYTES = 12  # of a sequence: its size and its pointer
_FAIRSEQ_DTYPES = {7: np.dtype(np.float64)}
_SMALLEST_FLOAT_BITS = 0x3F800000  # of 1.0: no vocabulary has that many ids
_CHUNK_ITEMS = 1 << 20


class IndexedPart(Part):
    """One ``.bin/.idx`` pair, memory-mapped where it is local; its only column is ``input_ids``."""

    format = "indexed"

    def __init__(self, location: Location) -> None:
        """Check that index and data fit each other.

        Args:
            location: the ``.idx`` file.
        """
        super().__init__(location)
        self._data = location.sibling(".bin")
        if not self._data.is_file():
            raise SourceError(f"{location.path} has no {self._data.name} beside it; fetch that, too")
        self._data_bytes = self._data.size()
        self._dtype = _element_type(self._index, self._data, self._data_bytes, location)
        _check_bounds(self._index, self._dtype, self._data_bytes, location)
        self._num_rows = len(self._index.sizes)
        if not location.is_remote:
            self.close()  # of thousands of pairs, those in use alone are mapped

    def __getstate__(self) -> dict[str, Any]:
        kept = ("location", "_data", "_data_bytes", "_dtype", "_num_rows")
        return {name: self.__dict__[name] for name in kept}

    @cached_property
    def _index(self) -> IndexFile:
        if not self.location.is_remote:
            return read_index(self.location.path)
        with tempfile.NamedTemporaryFile(prefix="packer-", suffix=".idx") as copy:
            copy.write(self.location.read(0, self.location.size()))
            copy.flush()
            try:
                return read_index(copy.name)
            except SourceError as error:
                raise SourceError(str(error).replace(copy.name, self.location.path)) from error

    @property
    def schema(self) -> pa.Schema:
        """One list column, ``input_ids``."""
        return pa.schema([(TOKENS_COLUMN, pa.large_list_view(pa.from_numpy_dtype(self._dtype)))])

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return self._num_rows

    @property
    def document_index(self) -> NDArray[np.int64]:
        """(documents + 1,) sequence at which each document begins, as the file says it; mapped."""
        return self._index.document_index

    def identity(self) -> dict[str, Any]:
        """Return the size of the ``.bin`` and the hash of the ``.idx``."""
        return {"num_bytes": self._data_bytes, "sha256": file_hash(self.location)}

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut the index, which is all that lengths need."""
        step = max(target_bytes // _INDEX_BYTES, 1)
        return [
            Unit(part, start, stop, start, stop - start, (stop - start) * _INDEX_BYTES)
            for start in range(0, self.num_rows, step)
            for stop in [min(start + step, self.num_rows)]
        ]

    def blocks(self, columns: Sequence[str]) -> PartBlocks:
        """Return stretches of about ``BLOCK_BYTES`` of tokens: the format has no blocks of its own."""
        firsts, starts, num_bytes = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        last = -1
        for start in range(0, self.num_rows, _CHUNK_ITEMS):
            sizes = self._index.sizes[start : start + _CHUNK_ITEMS].astype(np.int64) * self._dtype.itemsize
            before = num_bytes + np.cumsum(sizes) - sizes
            stretch = before // BLOCK_BYTES
            begins = np.flatnonzero(np.diff(stretch, prepend=last) > 0)
            firsts.append(start + begins)
            starts.append(before[begins])
            last, num_bytes = int(stretch[-1]), num_bytes + int(sizes.sum())
        rows = np.diff(np.append(np.concatenate(firsts), self.num_rows))
        return PartBlocks(rows, np.diff(np.append(np.concatenate(starts), num_bytes)))

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield lists over the mapped file, untouched; of a remote file the lengths alone, over nulls."""
        for start in range(unit.start, unit.stop, BATCH_ROWS):
            yield self._batch(slice(start, min(start + BATCH_ROWS, unit.stop)))

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Slice the mapped file; of a remote one the bytes of the sequences are fetched, all at once."""
        if not self.location.is_remote:
            return [self._batch(slice(row, row + 1)) for row in rows.tolist()]
        starts = self._index.pointers[rows].astype(np.int64)
        stops = starts + self._index.sizes[rows].astype(np.int64) * self._dtype.itemsize
        pieces = self._data.fetch(list(zip(starts.tolist(), stops.tolist(), strict=True)))
        return [self._of_bytes(piece) for piece in pieces]

    def place_of_row(self, row: int) -> str:
        """Name the sequence."""
        return f"sequence {row}"

    def close(self) -> None:
        """Unmap both files."""
        self.__dict__.pop("_values", None)
        self.__dict__.pop("_index", None)

    @cached_property
    def _values(self) -> pa.Array:
        num_values = self._data_bytes // self._dtype.itemsize
        if self.location.is_remote:
            return pa.nulls(num_values)
        if num_values == 0:
            return to_arrow(np.zeros(0, self._dtype))
        with self._data.open_arrow(mapped=True) as file, reading(self._data):
            buffers = [None, file.read_buffer(num_values * self._dtype.itemsize)]
        return pa.Array.from_buffers(pa.from_numpy_dtype(self._dtype), num_values, buffers)

    def _batch(self, rows: slice) -> pa.RecordBatch:
        starts = self._index.pointers[rows].astype(np.int64) // self._dtype.itemsize
        sizes = self._index.sizes[rows].astype(np.int64)
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(sizes)]
        values = self._values
        lists = pa.Array.from_buffers(pa.large_list_view(values.type), len(sizes), buffers, children=[values])
        return pa.RecordBatch.from_arrays([lists], names=[TOKENS_COLUMN])

    def _of_bytes(self, piece: bytes) -> pa.RecordBatch:
        values = np.frombuffer(piece, self._dtype)
        lists = pa.LargeListArray.from_arrays(to_arrow(np.array([0, len(values)])), to_arrow(values))
        return pa.RecordBatch.from_arrays([lists], names=[TOKENS_COLUMN])


def _element_type(index: IndexFile, data: Location, data_bytes: int, location: Location) -> np.dtype[Any]:
    """Return the element type that index and file sizes agree on."""
    num_tokens = sum(
        int(index.sizes[start : start + _CHUNK_ITEMS].sum(dtype=np.int64))
        for start in range(0, len(index.sizes), _CHUNK_ITEMS)
    )
    code = index.dtype_code
    candidates = [DEEPSPEED_DTYPES[code], MEGATRON_DTYPES[code]]
    candidates += [_FAIRSEQ_DTYPES[code]] if code in _FAIRSEQ_DTYPES else []
    fitting = [dtype for dtype in candidates if num_tokens * dtype.itemsize == data_bytes]
    if not fitting:
        sizes = sorted({dtype.itemsize for dtype in candidates})
        expected = " or ".join(f"{num_tokens * size:,}" for size in sizes)
        raise SourceError(
            f"{location.path} lists {num_tokens:,} tokens, {expected} bytes of dtype code {code}, but "
            f"{data.name} has {data_bytes:,}; one of the two was cut or belongs to another, fetch both again"
        )
    if {dtype.kind for dtype in fitting} == {"u", "f"}:
        # Code 7: uint32 in DeepSpeed, float32 in Megatron. No vocabulary has as many ids as the bits of 1.0.
        # Most of the ids decide, so that a damaged one changes no other.
        head = np.frombuffer(data.read(0, 4 * _CHUNK_ITEMS), np.uint32)
        is_float = 2 * np.count_nonzero(head >= _SMALLEST_FLOAT_BITS) > np.count_nonzero(head)
        return next(dtype for dtype in fitting if (dtype.kind == "f") == is_float)
    return fitting[0]


def _check_bounds(index: IndexFile, dtype: np.dtype[Any], data_bytes: int, location: Location) -> None:
    """Check that every sequence lies within the ``.bin``."""
    for start in range(0, len(index.sizes), _CHUNK_ITEMS):
        sizes = index.sizes[start : start + _CHUNK_ITEMS].astype(np.int64)
        pointers = index.pointers[start : start + _CHUNK_ITEMS].astype(np.int64)
        wrong = (sizes < 0) | (pointers < 0) | (pointers % dtype.itemsize != 0)
        wrong |= pointers > data_bytes - sizes * dtype.itemsize
        if wrong.any():
            row = int(np.argmax(wrong))
            raise SourceError(
                f"{location.path}, sequence {start + row}: {sizes[row]} tokens at byte {pointers[row]} are "
                f"not within the {data_bytes} bytes of the .bin; the index is damaged, build it again"
            )
