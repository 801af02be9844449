"""Record batches that were costly to make, kept up to a number of bytes: least recently used go first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import pyarrow as pa

CACHE_BYTES = 256 << 20


class BatchCache:
    """Keeps lists of batches; the newest list stays even if it alone is over the limit."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, list[pa.RecordBatch]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: Hashable, make: Callable[[], list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
        """Return what a key stands for, made now unless it is held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        batches = make()
        self._held[key] = batches
        self._num_bytes += _size_of(batches)
        while self._num_bytes > self._limit and len(self._held) > 1:
            _, oldest = self._held.popitem(last=False)
            self._num_bytes -= _size_of(oldest)
        return batches


def _size_of(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.get_total_buffer_size() for batch in batches)
