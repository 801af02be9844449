"""The journal: finished units of a job in one file that only grows, so that an interrupted run goes on.

Every record carries a checksum. A kill in the middle of a write leaves a torn record at the end, which the
next run cuts off. The first record says which job it is; the journal of another job is thrown away.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_RECORD = struct.Struct("<4sIQQI36x")  # magic, stage, unit, payload bytes, checksum; padded to a cache line
_MAGIC = b"unit"
_JOB = 0xFFFF_FFFF  # stage number of the record that names the job


class Journal:
    """Payloads by stage and unit; one process writes, under the lock of ``published_directory``."""

    def __init__(self, path: Path, job: Mapping[str, Any]) -> None:
        """Open ``path`` and keep what it holds of the same job; start anew where it is of another."""
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._map: mmap.mmap | None = None
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")  # noqa: SIM115 (closed by close)
        named = json.dumps(job, sort_keys=True).encode()
        end = self._scan(named)
        self._file.truncate(end)
        self._file.seek(end)
        if end == 0:
            self._write(_JOB, 0, named)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, unit: tuple[int, int]) -> bool:
        return unit in self._places

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield stage and number of every finished unit."""
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def append(self, stage: int, number: int, payload: bytes) -> None:
        """Keep the payload of a finished unit; it is in the operating system's hands when this returns."""
        start = self._write(stage, number, payload)
        self._places[stage, number] = (start, len(payload))

    def payload(self, stage: int, number: int) -> memoryview:
        """Return a mapped payload; valid until the journal is closed."""
        start, length = self._places[stage, number]
        if self._map is None or start + length > len(self._map):
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)[start : start + length]

    def close(self) -> None:
        """Close the file; mapped payloads keep their pages until they are dropped."""
        self._map = None
        self._file.close()

    def _write(self, stage: int, number: int, payload: bytes) -> int:
        header = _RECORD.pack(_MAGIC, stage, number, len(payload), _checksum(stage, number, payload))
        start = self._file.tell() + _RECORD.size
        self._file.write(header)
        self._file.write(payload)
        self._file.write(bytes(-len(payload) % _RECORD.size))
        self._file.flush()
        return start

    def _scan(self, named: bytes) -> int:
        """Note the intact records, if they are of this job; return where the last one ends."""
        end = 0
        while header := self._file.read(_RECORD.size):
            if len(header) < _RECORD.size:
                break
            magic, stage, number, length, checksum = _RECORD.unpack(header)
            start = end + _RECORD.size
            if magic != _MAGIC or start + length > os.fstat(self._file.fileno()).st_size:
                break
            payload = self._file.read(length)
            if _checksum(stage, number, payload) != checksum:
                break
            if end == 0 and (stage != _JOB or payload != named):
                break
            if stage != _JOB:
                self._places[stage, number] = (start, length)
            end = start + length + -length % _RECORD.size
            self._file.seek(end)
        return end


def _checksum(stage: int, number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(f"{stage}/{number}".encode()))
