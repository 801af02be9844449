"""The files of a plan as they are read: mapped from a folder, or buffers in memory; checked before use."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_numpy, validity
from packer.errors import PlanError
from packer.plan import schema
from packer.plan.digest import HEADER_HASH, batch_digest, validate
from packer.plan.header import read_header


class FolderFiles:
    """Files of a plan directory, memory-mapped."""

    def __init__(self, folder: Path, origin: str | None = None) -> None:
        """Take a folder, before its header is read, and the URL that it was copied from."""
        self.folder = folder
        self.origin = origin
        self.root = folder.absolute()
        """The same, wherever the process goes; ``folder`` is what messages call it."""
        self._stamp = self._header_stamp()

    def describe(self, name: str) -> str:
        """Return how messages call the file."""
        return str(self.folder / name)

    def buffer(self, name: str) -> pa.Buffer:
        """Map one file; the mapping lives as long as the buffer, whatever becomes of the name."""
        path = self.root / name
        try:
            with pa.memory_map(os.fsencode(path)) as source:  # a name need not be UTF-8
                return source.read_buffer()
        except FileNotFoundError:
            raise PlanError(f"{path} is missing; restore the plan or plan again") from None
        except OSError as error:
            raise PlanError(f"cannot read {path}: {error}") from error

    def check_header(self, header: Mapping[str, Any]) -> None:
        """Check, once a file is mapped, that it lies beside the header that was read: plans may be replaced.

        Raises:
            PlanError: another plan stands under this name now.
        """
        stamp = self._header_stamp()
        if stamp == self._stamp:
            return
        if read_header(self.root)[HEADER_HASH] != header[HEADER_HASH]:
            raise PlanError(
                f"{self.folder} was replaced by another plan while it was in use; start the run again"
            )
        self._stamp = stamp

    def _header_stamp(self) -> tuple[int, ...] | None:
        try:
            status = (self.root / schema.HEADER_FILE).stat()
        except OSError:  # read_header says it better
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class MemoryFiles:
    """Files of a plan that was never on disk."""

    def __init__(self, buffers: Mapping[str, pa.Buffer]) -> None:
        self._buffers = dict(buffers)

    def describe(self, name: str) -> str:
        """Return how messages call the file."""
        return f"{name} (in memory)"

    def buffer(self, name: str) -> pa.Buffer:
        """Return one file."""
        return self._buffers[name]

    def check_header(self, header: Mapping[str, Any]) -> None:
        """Do nothing: nobody else can replace them."""


class PlanTable:
    """One table of a plan: record batches as dictionaries of arrays that view the mapped file."""

    CACHED_BATCHES = 16
    CHECKED_AT_ONCE = 1 << 18
    """Bytes: a larger record batch gives its first row before it is hashed, so that opening is O(1)."""

    def __init__(self, files: FolderFiles | MemoryFiles, name: str, header: Mapping[str, Any]) -> None:
        self.name = files.describe(name)
        entry = header["files"][name]
        self.num_rows: int = entry["num_rows"]
        self.rows_per_batch: int = entry["rows_per_batch"]
        self._digests: list[str] = entry["batch_digests"]
        self._buffer = files.buffer(name)
        files.check_header(header)
        if self._buffer.size != entry["size"]:
            raise PlanError(
                f"{self.name} has {self._buffer.size} bytes, plan.json says {entry['size']}; "
                "it is truncated or from another plan: restore it or plan again"
            )
        try:
            self._reader = pa.ipc.open_file(self._buffer)
            columns = self._reader.schema
            names = columns.names
            num_batches = self._reader.num_record_batches
        except (pa.ArrowException, OSError, ValueError) as error:
            raise PlanError(
                f"{self.name} is no Arrow file ({error}); restore the plan or plan again"
            ) from error
        expected = schema.expected_schema(name, names, header["num_samples"], self.rows_per_batch)
        if not columns.equals(expected, check_metadata=True):
            raise PlanError(f"{self.name} does not have the columns that plan.json says; plan again")
        if not num_batches == len(self._digests) == -(-self.num_rows // self.rows_per_batch):
            raise PlanError(f"{self.name} is cut into other record batches than plan.json says; plan again")
        self.columns: pa.Schema = columns
        self._checked = bytearray(num_batches)
        self._touched = bytearray(num_batches)
        self._cache: dict[int, dict[str, NDArray[Any]]] = {}

    @property
    def num_batches(self) -> int:
        """Record batches of the table."""
        return len(self._digests)

    def locate(self, row: int) -> tuple[dict[str, NDArray[Any]], int]:
        """Return the record batch that holds a row, and the row's place in it."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.name}, which has {self.num_rows}")
        index, at = divmod(row, self.rows_per_batch)
        return self.batch(index), at

    def batch(self, index: int) -> dict[str, NDArray[Any]]:
        """Return one record batch as arrays.

        A list column gives its elements; ``offsets`` (rows + 1) is common to all of them.

        Raises:
            PlanError: the values are not those that were written.
        """
        columns = self._cache.get(index)
        if columns is None:
            columns = self._arrays(index)
            if len(self._cache) >= self.CACHED_BATCHES:
                self._cache = {}  # views are cheap to make again, and no lock is held across a fork
            self._cache[index] = columns
        elif not self._checked[index]:
            self.record_batch(index)
        return columns

    def record_batch(self, index: int) -> pa.RecordBatch:
        """Return one record batch, its values checked.

        Raises:
            PlanError: the values are not those that were written.
        """
        batch = self._read(index)
        if not self._checked[index]:
            with self._naming_damage(index):
                if batch_digest(batch) != self._digests[index]:
                    raise ValueError("its values are not those that were written")
            self._checked[index] = True
        return batch

    def _arrays(self, index: int) -> dict[str, NDArray[Any]]:
        batch = self._read(index)
        if batch.nbytes <= self.CHECKED_AT_ONCE or self._touched[index]:
            batch = self.record_batch(index)
        self._touched[index] = True
        with self._naming_damage(index):
            return _as_arrays(batch)

    def _read(self, index: int) -> pa.RecordBatch:
        with self._naming_damage(index):
            batch = self._reader.get_batch(index)
            validate(batch)
        return batch

    @contextmanager
    def _naming_damage(self, index: int) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            raise PlanError(
                f"record batch {index} of {self.name} is damaged ({error}); restore the plan or plan again"
            ) from error


def _as_arrays(batch: pa.RecordBatch) -> dict[str, NDArray[Any]]:
    """View the columns of a record batch as NumPy arrays; a column of nulls only is left out."""
    columns: dict[str, NDArray[Any]] = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if pa.types.is_list(field.type):
            offsets = to_numpy(column.offsets)
            if not np.array_equal(offsets, columns.setdefault("offsets", offsets)):
                raise ValueError(f"{field.name} has lists of other lengths than the column before it")
            columns[field.name] = _numbers(field, column.values)
        elif pa.types.is_dictionary(field.type):
            if not schema.is_reason_dictionary(column.dictionary):
                raise ValueError(f"{field.name} has other codes than those of a plan")
            columns[field.name] = _numbers(field, column.indices)
            if not np.isin(columns[field.name], np.arange(len(column.dictionary))).all():
                raise ValueError(f"{field.name} has a code that means nothing")
        elif field.name == "epoch":
            columns[field.name] = np.where(validity(column), to_numpy(column), -1)
        elif not field.nullable or column.null_count < len(column) or not len(column):
            columns[field.name] = _numbers(field, column)
    return columns


def _numbers(field: pa.Field, column: pa.Array) -> NDArray[Any]:
    """View a column of numbers, or make an array of one of booleans."""
    if column.null_count:
        raise ValueError(f"{field.name} has nulls between its values")
    return to_numpy(column)
