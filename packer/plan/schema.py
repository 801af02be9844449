"""The tables of a plan: names, columns, and how rows are cut into record batches."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.plan.epoch import DROP_REASONS

FORMAT = "packer-plan"
VERSION = 2
"""What is written. Since 2 an epoch states the design effect of its steps, and both rank imbalances."""
READABLE_VERSIONS = (1, 2)

HEADER_FILE = "plan.json"
DROPPED_FILE = "dropped.arrow"

ROWS_PER_BATCH = b"rows_per_batch"
"""Key of the schema's metadata: all record batches but the last hold this many rows."""

MAX_ROWS_PER_BATCH = 65_536
PIECES_PER_BATCH = 1 << 18
"""Samples that a record batch holds on average, at most: what a reader checks at once."""

PADDED_SEQLEN_PREFIX = "padded_seqlen_"
"""With several budgets, the column ``padded_seqlen_<metric>`` holds S of that member of the pair."""

LOSS_TOKENS = "num_loss_tokens"
"""A column of ``microbatches.arrow`` where labels were counted."""


def microbatches_file(epoch: int) -> str:
    """Return the name of an epoch's table of micro-batches, below the plan's folder."""
    return f"epoch-{epoch:05d}/microbatches.arrow"


def steps_file(epoch: int) -> str:
    """Return the name of an epoch's table of steps, below the plan's folder."""
    return f"epoch-{epoch:05d}/steps.arrow"


def plan_files(num_epochs: int) -> list[str]:
    """Return the names of all tables of a plan, in the order in which the content hash takes them."""
    epochs = [name for epoch in range(num_epochs) for name in (microbatches_file(epoch), steps_file(epoch))]
    return [*epochs, DROPPED_FILE]


def id_type(num_samples: int) -> pa.DataType:
    """Return the type of sample ids: int32 while every id fits."""
    return pa.int32() if num_samples <= np.iinfo(np.int32).max + 1 else pa.int64()


def microbatches_schema(
    *,
    sample_id: pa.DataType,
    has_starts: bool,
    metrics: Sequence[str],
    has_loss_tokens: bool,
    rows_per_batch: int,
) -> pa.Schema:
    """Return the columns of ``microbatches.arrow``: one row a micro-batch, no nulls anywhere."""
    fields = [
        ("step", pa.int64()),
        ("accum", pa.int32()),
        ("dp_rank", pa.int32()),
        ("sample_ids", _list_of(sample_id)),
        ("seqlens", _list_of(pa.int32())),
        *([("starts", _list_of(pa.int32()))] if has_starts else []),
        ("num_samples", pa.int32()),
        ("num_tokens", pa.int64()),
        ("max_seqlen", pa.int32()),
        ("padded_seqlen", pa.int32()),
        *((PADDED_SEQLEN_PREFIX + metric, pa.int32()) for metric in metrics),
        ("cost", pa.int64()),
        ("is_filler", pa.bool_()),
        ("is_repeat", pa.bool_()),
        *([(LOSS_TOKENS, pa.int64())] if has_loss_tokens else []),
    ]
    return _schema(fields, rows_per_batch)


def steps_schema(rows_per_batch: int = MAX_ROWS_PER_BATCH) -> pa.Schema:
    """Return the columns of ``steps.arrow``: one row a step; ``num_loss_tokens`` is null where unknown."""
    fields = [
        ("step", pa.int64()),
        ("num_samples", pa.int64()),
        ("num_tokens", pa.int64()),
        ("num_loss_tokens", pa.int64()),
        ("max_seqlen", pa.int32()),
        ("lr_scale", pa.float64()),
        ("samples_before", pa.int64()),
        ("tokens_before", pa.int64()),
    ]
    return _schema(fields, rows_per_batch, nullable=("num_loss_tokens",))


def dropped_schema(
    *, sample_id: pa.DataType, has_starts: bool, rows_per_batch: int = MAX_ROWS_PER_BATCH
) -> pa.Schema:
    """Return the columns of ``dropped.arrow``: one row a dropped sample; a null epoch means every epoch."""
    fields = [
        ("epoch", pa.int32()),
        ("sample_id", sample_id),
        ("seqlen", pa.int64()),
        *([("start", pa.int64())] if has_starts else []),
        ("num_tokens", pa.int64()),
        ("reason", pa.dictionary(pa.int8(), pa.string())),
    ]
    return _schema(fields, rows_per_batch, nullable=("epoch",))


def expected_schema(
    name: str, column_names: Sequence[str], num_samples: int, rows_per_batch: int
) -> pa.Schema:
    """Return what a file of a plan must hold, given the names of the columns that may be there or not."""
    sample_id = id_type(num_samples)
    if name == DROPPED_FILE:
        return dropped_schema(
            sample_id=sample_id, has_starts="start" in column_names, rows_per_batch=rows_per_batch
        )
    if name.endswith("/steps.arrow"):
        return steps_schema(rows_per_batch)
    return microbatches_schema(
        sample_id=sample_id,
        has_starts="starts" in column_names,
        metrics=metrics_of(column_names),
        has_loss_tokens=LOSS_TOKENS in column_names,
        rows_per_batch=rows_per_batch,
    )


def metrics_of(column_names: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that have a padded length of their own."""
    prefix = PADDED_SEQLEN_PREFIX
    return tuple(name.removeprefix(prefix) for name in column_names if name.startswith(prefix))


def reason_dictionary(reasons: Sequence[str] = DROP_REASONS) -> pa.StringArray:
    """Return the reasons, or the first of them, in the order of their codes."""
    ends = np.cumsum([0, *map(len, reasons)], dtype=np.int32)
    text = "".join(reasons).encode("ascii")
    return pa.StringArray.from_buffers(len(reasons), pa.py_buffer(ends), pa.py_buffer(text))


def is_reason_dictionary(found: pa.StringArray) -> bool:
    """Say whether codes mean the reasons that they mean here; many a plan has the first ones only."""
    return len(found) <= len(DROP_REASONS) and found.equals(reason_dictionary().slice(0, len(found)))


def rows_per_batch(offsets: NDArray[np.int64]) -> int:
    """Choose how many micro-batches a record batch holds, a power of two.

    A function of the plan alone, so that the same plan gives the same bytes.

    Args:
        offsets: (M + 1,) micro-batch m holds pieces ``offsets[m]:offsets[m + 1]``.
    """
    num_rows = len(offsets) - 1
    rows = MAX_ROWS_PER_BATCH
    while rows > 1 and num_rows and rows * int(offsets[-1]) > PIECES_PER_BATCH * num_rows:
        rows //= 2
    # List offsets are 32 bits wide: no record batch may hold 2^31 pieces.
    while rows > 1 and num_rows:
        edges = offsets[np.append(np.arange(0, num_rows, rows), num_rows)]
        if int(np.diff(edges).max()) <= np.iinfo(np.int32).max:
            break
        rows //= 2
    return rows


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", element, nullable=False))


def _schema(
    fields: Sequence[tuple[str, pa.DataType]], rows_per_batch: int, *, nullable: Sequence[str] = ()
) -> pa.Schema:
    return pa.schema(
        [pa.field(name, kind, nullable=name in nullable) for name, kind in fields],
        metadata={ROWS_PER_BATCH: str(rows_per_batch).encode()},
    )
