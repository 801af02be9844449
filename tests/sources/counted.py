"""A remote file system in memory that counts what is fetched, reads ahead as clients do, and can fail."""

from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

PROTOCOL = "counted"


class CountedFileSystem(MemoryFileSystem):
    """``counted://``: what lies under ``memory://``."""

    protocol = PROTOCOL
    requests: list[tuple[int, int]] = []  # noqa: RUF012  one list for every instance, as there is one network
    calls = 0
    failures: list[Any] = []  # noqa: RUF012
    """What the next requests give in place of bytes: an exception, or a function of the bytes."""

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace(f"{PROTOCOL}://", "memory://"))

    def unstrip_protocol(self, name):
        return f"{PROTOCOL}:/{self._strip_protocol(name)}"

    def _open(self, path, mode="rb", **options):
        return CountedFile(self, path, mode, **options)

    def cat_ranges(self, paths, starts, ends, max_gap=None, on_error="return", **options):
        type(self).calls += 1
        return super().cat_ranges(paths, starts, ends, max_gap, on_error, **options)

    def cat_file(self, path, start=None, end=None, **options):
        with super()._open(path, "rb") as file:
            stored = file.getvalue()
        start, end = start or 0, len(stored) if end is None else min(end, len(stored))
        self.requests.append((start, end))
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, BaseException):
            raise failure
        return failure(stored[start:end]) if failure else stored[start:end]


class CountedFile(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        return self.fs.cat_file(self.path, start, end)


def num_fetched() -> int:
    """Return the bytes that were fetched since the last `forget`."""
    return sum(end - start for start, end in CountedFileSystem.requests)


def forget() -> None:
    """Count from 0 again, and fail no more."""
    CountedFileSystem.requests.clear()
    CountedFileSystem.failures.clear()
    CountedFileSystem.calls = 0


fsspec.register_implementation(PROTOCOL, CountedFileSystem, clobber=True)
