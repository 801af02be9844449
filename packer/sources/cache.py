"""Record batches that were costly to make, kept up to a number of bytes: least recently used go first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import pyarrow as pa

from packer.rereading import CACHE_BYTES

VIEW_BYTES = 4 << 10
"""What a batch over a mapped file takes: the objects that describe it, not the file's pages."""


class BatchCache:
    """Keeps lists of batches; the newest list stays even if it alone is over the limit."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, tuple[list[pa.RecordBatch], int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()  # files of several servers are read by a thread each

    @property
    def limit(self) -> int:
        """Bytes that batches may take together."""
        return self._limit

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def get(
        self, key: Hashable, make: Callable[[], list[pa.RecordBatch]], *, are_views: bool = False
    ) -> list[pa.RecordBatch]:
        """Return what a key stands for, made now unless it is held.

        Args:
            key: what the batches depend on.
            make: makes them.
            are_views: their values lie in a mapped file, and take no memory that could be given back.
        """
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
        batches = make()
        size = VIEW_BYTES * len(batches) if are_views else _size_of(batches)
        with self._lock:
            self._held[key] = batches, size
            self._num_bytes += size
            while self._num_bytes > self._limit and len(self._held) > 1:
                _, (_, oldest) = self._held.popitem(last=False)
                self._num_bytes -= oldest
        return batches


def _size_of(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.get_total_buffer_size() for batch in batches)
