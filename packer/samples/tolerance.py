"""Rows that cannot be read: what is made of a batch in spite of them."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

from packer.samples.ragged import RowError
from packer.sources import OnError, skipped_rows, without_rows

T = TypeVar("T")


def apply_to_readable(
    work: Callable[[pa.RecordBatch], T], batch: pa.RecordBatch, on_error: OnError
) -> tuple[T, list[int]]:
    """Return what ``work`` makes of a batch, and the rows that were skipped, ascending.

    Args:
        work: raises a `RowError` at a row that it cannot work on. It is given nulls in the place of a skipped
            one, and may be called several times.
        batch: the rows; its source may have skipped some.
        on_error: ``skip`` skips the rows that ``work`` refuses.

    Raises:
        RowError: a row that may not be skipped.
    """
    skipped = skipped_rows(batch)
    try:
        return work(batch), skipped
    except RowError:
        if on_error != "skip":
            raise
    refused = list(_refused(work, batch, 0))
    return work(without_rows(batch, refused)), sorted({*skipped, *refused})


def _refused(work: Callable[[pa.RecordBatch], object], batch: pa.RecordBatch, first: int) -> Iterator[int]:
    """Yield the rows that ``work`` refuses: an error names one only, so a batch that has one is halved."""
    try:
        work(batch)
    except RowError:
        if batch.num_rows == 1:
            yield first
            return
        half = batch.num_rows // 2
        yield from _refused(work, batch.slice(0, half), first)
        yield from _refused(work, batch.slice(half), first + half)
