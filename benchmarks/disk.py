"""What the disk itself takes: the yardstick of the benchmarks that write."""

import os
import time
from pathlib import Path


def write_zeros(path: Path, num_bytes: int) -> float:
    """Return the seconds to write and flush so many zeros in one file, which is removed again."""
    block = bytes(8 << 20)
    start = time.perf_counter()
    with path.open("wb") as stream:
        for _ in range(num_bytes // len(block)):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds
