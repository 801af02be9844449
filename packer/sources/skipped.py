"""Rows that were skipped: nulls in their place, and their numbers in the metadata of the batch."""

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

_KEY = b"packer.skipped"


def without_rows(batch: pa.RecordBatch, rows: Sequence[int]) -> pa.RecordBatch:
    """Return a batch in which some rows are null in every column."""
    is_left_out = np.zeros(batch.num_rows, np.bool_)
    is_left_out[rows] = True
    return batch.take(pa.array(np.arange(batch.num_rows), mask=is_left_out))


def among_skipped(batch: pa.RecordBatch, skipped: Sequence[int]) -> pa.RecordBatch:
    """Return the rows of a batch that was made without some, with nulls in their places, and these marked.

    Args:
        batch: the other rows.
        skipped: numbers in the result, ascending.
    """
    is_skipped = np.zeros(batch.num_rows + len(skipped), np.bool_)
    is_skipped[skipped] = True
    places = np.maximum(np.cumsum(~is_skipped) - 1, 0)
    return mark_skipped(batch.take(pa.array(places, mask=is_skipped)), skipped)


def mark_skipped(batch: pa.RecordBatch, rows: Sequence[int]) -> pa.RecordBatch:
    """Return a batch that says which of its rows were skipped."""
    return batch.replace_schema_metadata({_KEY: json.dumps(list(rows))}) if rows else batch


def skipped_rows(batch: pa.RecordBatch) -> list[int]:
    """Return the rows that were skipped when the batch was read, ascending."""
    marked = (batch.schema.metadata or {}).get(_KEY)
    return [] if marked is None else list(json.loads(marked))
