"""From the values of all units to one metric's files and its summary, a piece at a time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packer.metrics import FileDigest, MetricSummary, write_sample_to_metric

Pieces = Callable[[], Iterable[NDArray[np.integer]]]
"""Gives the values of all samples in order, in pieces; may be called again."""

_DIGIT_BITS = 20
_CHUNK_ITEMS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedMetric:
    """One metric, written."""

    summary: MetricSummary
    files: dict[str, FileDigest]
    """By path inside the metrics directory."""
    values: NDArray[np.integer]
    """(samples,) the file, mapped."""


def merge_metric(folder: Path, name: str, pieces: Pieces, num_samples: int) -> MergedMetric:
    """Write the sample_to_metric files of one metric.

    Args:
        folder: the metrics directory.
        name: the metric.
        pieces: the values, one or more.
        num_samples: how many there are.
    """
    smallest, largest, total = np.iinfo(np.int64).max, np.iinfo(np.int64).min, 0
    for values in pieces():
        if len(values):
            smallest = min(smallest, int(values.min()))
            largest = max(largest, int(values.max()))
            total += exact_sum(values)
    bounds = np.iinfo(np.int32)
    fits = bounds.min <= smallest and largest <= bounds.max
    dtype: np.dtype[np.integer] = np.dtype(np.int32) if fits else np.dtype(np.int64)
    files = write_sample_to_metric(folder, name, pieces(), num_samples, dtype)

    written = np.memmap(folder / name / f"{name}_sample_to_metric.bin", dtype=dtype, mode="r")

    def above_smallest() -> Iterator[NDArray[np.int64]]:
        for start in range(0, num_samples, _CHUNK_ITEMS):
            yield written[start : start + _CHUNK_ITEMS].astype(np.int64) - smallest

    median, p99 = (
        smallest + order_statistic(above_smallest, rank, largest - smallest)
        for rank in ((num_samples - 1) // 2, -(-num_samples * 99 // 100) - 1)
    )
    summary = MetricSummary(min=smallest, median=median, p99=p99, max=largest, total=total)
    return MergedMetric(summary=summary, files=files, values=written)


def exact_sum(values: NDArray[np.integer]) -> int:
    """Sum int64 values whose sum may not fit 64 bits: upper and lower halves on their own."""
    upper, lower = values >> 31, values & 0x7FFF_FFFF
    return (int(upper.sum(dtype=np.int64)) << 31) + int(lower.sum(dtype=np.int64))


def order_statistic(pieces: Pieces, rank: int, largest: int) -> int:
    """Return the value with ``rank`` others before it in sorted order, without sorting.

    Radix selection from the highest digit down. It keeps one histogram, so its memory does not depend on the
    number of values, and values below 2^20 take one pass.

    Args:
        pieces: non-negative values.
        rank: from 0.
        largest: the greatest value.
    """
    found = 0
    shift = largest.bit_length()
    while shift > 0:
        bits = min(_DIGIT_BITS, shift)
        shift -= bits
        counts = np.zeros(1 << bits, dtype=np.int64)
        for values in pieces():
            leading = values >> shift
            digits = leading[leading >> bits == found] & ((1 << bits) - 1)
            counts += np.bincount(digits, minlength=1 << bits)
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, rank, side="right"))
        rank -= int(ends[digit] - counts[digit])
        found = (found << bits) | digit
    return found
