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


def mark_skipped(batch: pa.RecordBatch, rows: Sequence[int]) -> pa.RecordBatch:
    """Return a batch that says which of its rows were skipped."""
    return batch.replace_schema_metadata({_KEY: json.dumps(list(rows))}) if rows else batch


def skipped_rows(batch: pa.RecordBatch) -> list[int]:
    """Return the rows that were skipped when the batch was read, ascending."""
    marked = (batch.schema.metadata or {}).get(_KEY)
    return [] if marked is None else list(json.loads(marked))
