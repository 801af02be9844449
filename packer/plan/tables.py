"""Arrow IPC files in the making, on disk or in memory, hashed while they are written."""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa

from packer.plan import schema
from packer.plan.digest import batch_digest

_WORTH_A_THREAD = 1 << 18
"""Bytes."""


class Target(Protocol):
    """Where a plan's files go."""

    def open(self, name: str) -> Any:
        """Return a binary stream for the file ``name`` below the plan's folder."""


class FolderTarget:
    """Files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, name: str) -> Any:
        """Create the file and the folder that it lies in."""
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        return open(path, "wb")


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
        self._pool = ThreadPoolExecutor(max_workers=2)  # hashes of values, and of bytes
        self._streams: list[Any] = []

    def open(self, name: str, columns: pa.Schema) -> "TableFile":
        """Begin a table."""
        stream = self._target.open(name)
        self._streams.append(stream)
        return TableFile(stream, columns, self._pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        for stream in self._streams:
            with suppress(OSError):  # a full disk has said so already
                stream.close()


class TableFile:
    """One table, appended batch by batch; values and bytes are hashed in threads while they are written."""

    def __init__(self, stream: Any, columns: pa.Schema, pool: ThreadPoolExecutor) -> None:
        self._sink = _HashingSink(stream, pool)
        self._writer = pa.ipc.new_file(self._sink, columns)
        self._pool = pool
        self._digests: list[str] = []
        self._num_rows = 0
        self._rows_per_batch = int(columns.metadata[schema.ROWS_PER_BATCH])

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one record batch; only the last one of a file may hold less than ``rows_per_batch`` rows."""
        assert self._num_rows % self._rows_per_batch == 0, "a short record batch must be the last"
        digest: Future[str] = self._pool.submit(batch_digest, batch)
        self._writer.write_batch(batch)
        self._digests.append(digest.result())
        self._num_rows += batch.num_rows

    def close(self) -> dict[str, Any]:
        """Finish the file; return its entry in the header."""
        self._writer.close()
        self._sink.close()
        return {
            "size": self._sink.size,
            "sha256": self._sink.hexdigest(),
            "num_rows": self._num_rows,
            "rows_per_batch": self._rows_per_batch,
            "batch_digests": self._digests,
        }


class _HashingSink:
    """The file object that Arrow writes to."""

    def __init__(self, stream: Any, pool: ThreadPoolExecutor) -> None:
        self._stream = stream
        self._pool = pool
        self._digest = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: Any) -> None:
        self.size += len(data)
        if len(data) < _WORTH_A_THREAD:
            self._digest.update(data)
            self._stream.write(data)
            return
        hashed = self._pool.submit(self._digest.update, data)
        self._stream.write(data)
        hashed.result()

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()
        self.closed = True

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


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
