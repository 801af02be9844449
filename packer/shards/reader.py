"""Record batches of shards: one range each, mapped or fetched, and held against its checksum before use."""

import hashlib
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import PlanError, ShardsError
from packer.shards.format import BATCH, BATCHES_FILE, Header, read_header, shard_file
from packer.sources.location import Location
from packer.wording import counted

AHEAD = 8
"""Micro-batches that are fetched while one is worked on, where each takes a request."""
_OPEN_INDEXES = 64
"""Shards whose places of record batches are held."""


class ShardReader:
    """The record batches of a set of shards, by epoch and row of the plan.

    It pickles as its path; every process, forked ones too, opens the files itself.
    """

    def __init__(self, folder: Location, header: Header | None = None) -> None:
        """Open a folder of this machine, or of an object store; reads ``shards.json`` only.

        Raises:
            ShardsError: no shards, or damaged ones.
        """
        self.folder = folder
        self.header = read_header(folder) if header is None else header
        self._first_rows = {
            epoch.epoch: first
            for epoch, first in zip(
                self.header.epochs,
                np.cumsum([0] + [epoch.num_rows for epoch in self.header.epochs]).tolist(),
                strict=False,
            )
        }
        self.schema = pa.ipc.read_schema(pa.py_buffer(self.header.arrow_schema))
        self._shard_rows = np.array([shard.first_row for shard in self.header.shards], np.int64)
        self._forget()

    def record_batch(self, epoch: int, row: int, *, whole: bool = False) -> pa.RecordBatch:
        """Return the samples of a micro-batch; of a mapped file a view.

        Args:
            epoch: of the plan.
            row: of the epoch.
            whole: also the columns that training does not read; else nothing is said of their content.

        Raises:
            PlanError: that epoch was not written, or has no such row.
            ShardsError: the bytes are not those that were written; names the file and the micro-batch.
            SourceError: the store cannot be reached.
        """
        if self._process != os.getpid():
            self._forget()
        shard, at = self._locate(epoch, row)
        entry = self._index(shard)[at]
        waiting = self._waiting.pop((epoch, row), None)
        if waiting is not None and not whole:
            message = waiting.result()
        else:
            message = self._message(shard, entry, whole=whole)
        num_read = int(entry["num_read"])
        if zlib.crc32(memoryview(message)[:num_read]) != entry["crc32"]:
            raise self._damaged(shard, at, epoch, row, "its bytes are not those that were written")
        try:
            batch = self._parse(message, whole=whole)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(shard, at, epoch, row, str(error)) from error
        if batch.num_rows != entry["num_rows"]:
            raise self._damaged(shard, at, epoch, row, f"it has {counted(batch.num_rows, 'sample')}")
        return batch

    def prefetch(self, epoch: int, rows: Sequence[int]) -> None:
        """Begin to fetch micro-batches that are asked for soon; of mapped files there is nothing to fetch."""
        if not self.folder.is_remote:
            return
        if self._process != os.getpid():
            self._forget()
        wanted = {(epoch, row) for row in rows}
        for key in [key for key in self._waiting if key not in wanted]:
            self._waiting.pop(key).cancel()
        for row in rows:
            if (epoch, row) not in self._waiting:
                self._waiting[epoch, row] = self._threads.submit(self._fetch, epoch, row)

    def num_rows(self, epoch: int) -> int:
        """Return the rows of an epoch, 0 of one that was not written."""
        return next((found.num_rows for found in self.header.epochs if found.epoch == epoch), 0)

    def place_of_row(self, position: int) -> tuple[int, int]:
        """Return epoch and row of a row counted over the epochs written."""
        epoch = next(e for e, first in reversed(self._first_rows.items()) if first <= position)
        return epoch, position - self._first_rows[epoch]

    def file(self, shard: int) -> Location:
        """Return where a shard is."""
        return Location(f"{self.folder.path.rstrip('/')}/{shard_file(shard)}")

    def check_file(self, shard: int) -> None:
        """Hold a whole shard against its hash.

        Raises:
            ShardsError: it is not the file that was written.
        """
        entry, file = self.header.shards[shard], self.file(shard)
        digest = hashlib.sha256()
        size = 0
        with file.open() as stream:
            while block := stream.read(8 << 20):
                digest.update(block)
                size += len(block)
        if digest.hexdigest() != entry.sha256:
            raise ShardsError(
                f"{file.path} is not the file that was written: it has {size:,} bytes with SHA-256 "
                f"{digest.hexdigest()[:12]}…, shards.json says {entry.num_bytes:,} with "
                f"{entry.sha256[:12]}…; restore it, or materialize again"
            )

    def _locate(self, epoch: int, row: int) -> tuple[int, int]:
        """Return which shard holds a row, and which of its record batches it is."""
        if not 0 <= row < self.num_rows(epoch):
            written = ", ".join(str(found.epoch) for found in self.header.epochs)
            what = f"epoch {epoch}" if epoch not in self._first_rows else f"row {row} of epoch {epoch}"
            raise PlanError(
                f"{what} is not in {self.folder.path}, which holds epoch {written}; materialize it, or all "
                "epochs (without --epoch)"
            )
        position = self._first_rows[epoch] + row
        shard = int(np.searchsorted(self._shard_rows, position, side="right")) - 1
        return shard, position - int(self._shard_rows[shard])

    def _index(self, shard: int) -> NDArray[Any]:
        """Return (rows,) where the record batches of a shard lie."""
        with self._lock:  # one of the threads that fetch ahead asks, the others wait for it
            if shard not in self._indexes:
                while len(self._indexes) >= _OPEN_INDEXES:
                    self._indexes.popitem(last=False)
                self._indexes[shard] = self._read_index(shard)
            return self._indexes[shard]

    def _read_index(self, shard: int) -> NDArray[Any]:
        entry = self.header.shards[shard]
        file = Location(f"{self.folder.path.rstrip('/')}/{BATCHES_FILE}")
        first = entry.first_row * BATCH.itemsize
        content = file.read(first, first + entry.num_rows * BATCH.itemsize)
        if hashlib.sha256(content).hexdigest() != entry.batches_sha256:
            raise ShardsError(
                f"{file.path} does not say what was written of {shard_file(shard)}; it is damaged or cut: "
                "restore it, or materialize again"
            )
        return np.frombuffer(content, BATCH)

    def _message(self, shard: int, entry: Any, *, whole: bool) -> Any:
        offset, num_bytes = int(entry["offset"]), int(entry["num_bytes"])
        if not self.folder.is_remote:
            return self._mapped(shard).slice(offset, num_bytes)
        num_read = num_bytes if whole else int(entry["num_read"])
        content = self.file(shard).read(offset, offset + num_read)
        if len(content) == num_bytes:
            return content
        # What training does not read is left blank behind it: the header says that it is there.
        message = np.zeros(num_bytes, np.uint8)
        message[: len(content)] = np.frombuffer(content, np.uint8)
        return message

    def _fetch(self, epoch: int, row: int) -> Any:
        shard, at = self._locate(epoch, row)
        return self._message(shard, self._index(shard)[at], whole=False)

    def _mapped(self, shard: int) -> pa.Buffer:
        buffer = self._buffers.get(shard)
        if buffer is None:
            path, entry = self.file(shard).path, self.header.shards[shard]
            try:
                with pa.memory_map(os.fsencode(path)) as source:
                    buffer = source.read_buffer()
            except FileNotFoundError:
                raise ShardsError(f"{path} is missing; restore it, or materialize again") from None
            except OSError as error:
                raise ShardsError(f"cannot read {path}: {error}") from error
            if buffer.size != entry.num_bytes:
                raise ShardsError(
                    f"{path} has {buffer.size:,} bytes, shards.json says {entry.num_bytes:,}; it was "
                    "cut or is of other shards: restore it, or materialize again"
                )
            self._buffers[shard] = buffer
        return buffer

    def _parse(self, message: Any, *, whole: bool) -> pa.RecordBatch:
        if self.header.compression == "none":
            return pa.ipc.read_record_batch(pa.py_buffer(message), self.schema)
        # Only a stream takes the columns to unpack; the others may be blank.
        options = pa.ipc.IpcReadOptions(
            included_fields=None if whole else list(range(self.header.num_columns_read)), use_threads=False
        )
        stream = pa.BufferReader(pa.py_buffer(self.header.arrow_schema + bytes(message)))
        return pa.ipc.open_stream(stream, options=options).read_next_batch()

    def _damaged(self, shard: int, at: int, epoch: int, row: int, problem: str) -> ShardsError:
        return ShardsError(
            f"record batch {at} of {self.file(shard).path} (row {row} of epoch {epoch}) is damaged: "
            f"{problem}; restore the file, or materialize again"
        )

    def _forget(self) -> None:
        """Hold nothing, as after a fork: threads and connections of another process are of no use here."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._indexes: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._buffers: dict[int, pa.Buffer] = {}
        self._waiting: dict[tuple[int, int], Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="packer-shards")
        return self._pool

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.header)


def _reopen(folder: Location, header: Header) -> ShardReader:
    """Open shards that another process had open, if they still are the same."""
    reader = ShardReader(folder)
    if reader.header != header:
        raise ShardsError(
            f"{folder.path} was replaced by other shards while it was in use; start the run again"
        )
    return reader
