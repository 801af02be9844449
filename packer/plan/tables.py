"""Arrow IPC files in the making, on disk or in memory, hashed while they are written."""

import hashlib
import io
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa

from packer.plan import schema
from packer.plan.digest import batch_digest

_AHEAD = 4
"""Record batches that may wait to be hashed and written while the next ones are made."""


class Target(Protocol):
    """Where a plan's files go."""

    def open(self, name: str) -> Any:
        """Return a binary stream for the file ``name`` below the plan's folder."""


class FolderTarget:
    """Files below a folder, on their way to the disk while more is written, so that the end need not wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, name: str) -> Any:
        """Create the file and the folder that it lies in."""
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        return _EagerFile(open(path, "wb", buffering=0))


class MemoryTarget:
    """The same files as buffers in memory."""

    def __init__(self) -> None:
        self._streams: dict[str, pa.BufferOutputStream] = {}

    def open(self, name: str) -> Any:
        """Start an empty buffer."""
        return _KeptOpen(self._streams.setdefault(name, pa.BufferOutputStream()))

    def buffers(self) -> dict[str, pa.Buffer]:
        """Return the finished files."""
        return {name: stream.getvalue() for name, stream in self._streams.items()}


class TableFiles:
    """The tables of one plan; leaving the context closes what an error left open."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._values = ThreadPoolExecutor(max_workers=1)  # hashes them
        self._bytes = ThreadPoolExecutor(max_workers=1)  # hashes and writes them, in their order
        self._streams: list[Any] = []

    def open(self, name: str, columns: pa.Schema) -> "TableFile":
        """Begin a table."""
        stream = self._target.open(name)
        self._streams.append(stream)
        return TableFile(stream, columns, self._values, self._bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._values.shutdown(cancel_futures=True)
        self._bytes.shutdown(cancel_futures=True)
        for stream in self._streams:
            with suppress(OSError):  # a full disk has said so already
                stream.close()


class TableFile:
    """One table, appended batch by batch; threads hash and write while the next batches are made."""

    def __init__(
        self, stream: Any, columns: pa.Schema, values: ThreadPoolExecutor, in_turn: ThreadPoolExecutor
    ) -> None:
        self._sink = _HashingSink(stream, in_turn)
        self._writer = pa.ipc.new_file(self._sink, columns)
        self._values = values
        self._waiting: deque[tuple[Future[str], Future[None]]] = deque()
        self._digests: list[str] = []
        self._num_rows = 0
        self._rows_per_batch = int(columns.metadata[schema.ROWS_PER_BATCH])

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one record batch; only the last one of a file may hold less than ``rows_per_batch`` rows."""
        assert self._num_rows % self._rows_per_batch == 0, "a short record batch must be the last"
        digest = self._values.submit(batch_digest, batch)
        self._writer.write_batch(batch)
        self._num_rows += batch.num_rows
        self._waiting.append((digest, self._sink.hand_over()))
        self._settle(_AHEAD)

    def close(self) -> dict[str, Any]:
        """Finish the file; return its entry in the header."""
        self._settle(0)
        self._writer.close()
        self._sink.close()
        return {
            "size": self._sink.size,
            "sha256": self._sink.hexdigest(),
            "num_rows": self._num_rows,
            "rows_per_batch": self._rows_per_batch,
            "batch_digests": self._digests,
        }

    def _settle(self, most: int) -> None:
        """Wait until at most so many record batches wait; raise what went wrong with one."""
        while len(self._waiting) > most:
            digest, written = self._waiting.popleft()
            self._digests.append(digest.result())
            written.result()


class _HashingSink:
    """The file object that Arrow writes to: it collects bytes until they are handed over to a thread."""

    def __init__(self, stream: Any, in_turn: ThreadPoolExecutor) -> None:
        self._stream = stream
        self._in_turn = in_turn
        self._chunks: list[Any] = []
        self._digest = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: Any) -> None:
        self.size += len(data)
        self._chunks.append(data)

    def hand_over(self) -> Future[None]:
        """Have what was collected hashed and written, behind what was handed over before."""
        chunks, self._chunks = self._chunks, []
        return self._in_turn.submit(self._put, chunks)

    def flush(self) -> None:
        self.hand_over().result()
        self._stream.flush()

    def close(self) -> None:
        self.hand_over().result()
        self._stream.close()
        self.closed = True

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _put(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            self._digest.update(chunk)
            self._stream.write(chunk)


class _EagerFile:
    """A file whose bytes set out for the disk every few MiB, rather than all when it is flushed."""

    _EVERY = 32 << 20

    def __init__(self, stream: io.FileIO) -> None:
        self._stream = stream
        self._size = 0
        self._on_their_way = 0

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._stream.write(rest) :]
        self._size += len(data)
        if self._size - self._on_their_way >= self._EVERY and hasattr(os, "posix_fadvise"):
            # Linux starts to write what the cache should not keep, and keeps it because it is being written.
            length = self._size - self._on_their_way
            os.posix_fadvise(self._stream.fileno(), self._on_their_way, length, os.POSIX_FADV_DONTNEED)
            self._on_their_way = self._size

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _KeptOpen:
    """A buffer in memory that outlives the ``close`` of its writer."""

    def __init__(self, stream: pa.BufferOutputStream) -> None:
        self.write = stream.write

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> "_KeptOpen":
        return self

    def __exit__(self, *exc: object) -> None:
        pass
