"""Kernels side by side in plain threads. What they compute never depends on how many there are."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from packer.machine import num_cores

Result = TypeVar("Result")

MIN_CHUNK = 1 << 18
"""Items below which a thread is not worth its start."""


def chunk_edges(num_items: int, *, min_chunk: int = MIN_CHUNK) -> NDArray[np.int64]:
    """Cut ``num_items`` into a chunk for each thread; return the (chunks + 1,) edges."""
    chunks = max(1, min(num_cores(), num_items // min_chunk))
    return np.arange(chunks + 1, dtype=np.int64) * num_items // chunks


def run_chunks(task: Callable[[int, int, int], Result], edges: NDArray[np.int64]) -> list[Result]:
    """Run ``task(chunk, start, stop)`` for every chunk; return the results in order."""
    spans = [(chunk, int(edges[chunk]), int(edges[chunk + 1])) for chunk in range(len(edges) - 1)]
    if len(spans) == 1:
        return [task(*spans[0])]
    with ThreadPoolExecutor(max_workers=num_cores()) as pool:
        return list(pool.map(lambda span: task(*span), spans))
