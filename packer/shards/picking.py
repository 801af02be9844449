"""Rows of several record batches in any order, cut where the plan cuts: the inner loop of the shuffle.

Arrow's own ``take`` of lists copies element by element; here a row of numbers is one copy of bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_arrow, to_numpy
from packer.errors import SourceError
from packer.samples.ragged import ragged, valid_rows
from packer.shards.format import tokens_type

_AT_ONCE = 1 << 14
"""Rows copied at a time: as many Python objects are alive."""


class Cut(NamedTuple):
    """Which part of each picked row is taken, in the columns that have one number for each token."""

    starts: NDArray[np.int64]
    """(n,)"""
    lengths: NDArray[np.int64]
    """(n,)"""
    whole: NDArray[np.int64]
    """(n,) tokens of the whole sample: a list that is as long is cut, any other is taken whole."""


def pick_rows(
    batches: Sequence[pa.RecordBatch],
    owners: NDArray[np.integer],
    rows: NDArray[np.integer],
    *,
    cut: Cut | None = None,
) -> pa.RecordBatch:
    """Return rows of batches of one schema, one after the other, as one batch of that schema.

    Args:
        batches: where they come from.
        owners: (n,) which batch.
        rows: (n,) which row of it.
        cut: what of them is taken; None: all.
    """
    schema = batches[0].schema
    # (n,) row of the batches end to end
    firsts = np.cumsum([0] + [batch.num_rows for batch in batches], dtype=np.int64)
    index = firsts[owners] + rows
    columns = []
    for number, field in enumerate(schema):
        arrays = [batch.column(number) for batch in batches]
        if is_list_of_numbers(field.type):
            columns.append(_pick_lists(arrays, field, owners, index, cut))
        elif pat.is_integer(field.type) and not field.nullable:
            columns.append(to_arrow(np.concatenate([to_numpy(array) for array in arrays])[index]))
        else:
            joined = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
            columns.append(joined.take(to_arrow(index)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def plain_lists(array: pa.Array, column: str) -> pa.ListArray:
    """Return lists of numbers of another kind (large, of fixed size, views) as plain ones, by a copy."""
    field = pa.field(column, tokens_type(array.type.value_type))
    index = np.arange(len(array))
    return _pick_lists([array], field, np.zeros(len(array), np.int64), index, None)


def is_list_of_numbers(data_type: pa.DataType) -> bool:
    """Whether rows of a column of this type are copied as runs of bytes, and cut where they are as long."""
    return bool(
        pat.is_list(data_type)
        and (pat.is_integer(data_type.value_type) or pat.is_floating(data_type.value_type))
    )


def _pick_lists(
    arrays: Sequence[pa.ListArray],
    field: pa.Field,
    owners: NDArray[np.integer],
    index: NDArray[np.int64],
    cut: Cut | None,
) -> pa.ListArray:
    """Copy lists of numbers end to end, each as one run of bytes."""
    taken = [ragged(array, column=field.name) for array in arrays]
    begins = np.concatenate([rows.starts.astype(np.int64, copy=False) for rows in taken])[index]
    lengths = np.concatenate([rows.lengths.astype(np.int64, copy=False) for rows in taken])[index]
    if cut is not None:
        is_aligned = lengths == cut.whole
        begins = begins + np.where(is_aligned, cut.starts, 0)
        lengths = np.where(is_aligned, cut.lengths, lengths)
    offsets = np.zeros(len(index) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise SourceError(
            f"column {field.name!r} holds {int(lengths.max()):,} numbers in a row, more than a record batch "
            "can; cut the samples (packer plan --too-long split), or leave the column out (--keep-columns)"
        )
    kind = field.type.value_type
    width = kind.bit_width // 8
    data = _joined([_bytes_of(rows.values, width) for rows in taken], width, owners, begins, lengths)
    element_marks = None
    if any(rows.values.null_count for rows in taken):
        views = [valid_rows(rows.values).view(np.uint8).data for rows in taken]
        kept = _joined(views, 1, owners, begins, lengths)
        element_marks = pa.py_buffer(np.packbits(kept, bitorder="little"))
    values = pa.Array.from_buffers(kind, int(offsets[-1]), [element_marks, pa.py_buffer(data)])
    marks = None
    if any(array.null_count for array in arrays):
        valid = np.concatenate([valid_rows(array) for array in arrays])[index]
        marks = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(
        field.type, len(index), [marks, pa.py_buffer(offsets.astype(np.int32))], children=[values]
    )


def _joined(
    views: Sequence[memoryview],
    width: int,
    owners: NDArray[np.integer],
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Copy stretches of elements of ``width`` bytes end to end."""
    stops = (begins + lengths) * width
    starts = begins * width
    data = np.empty(int(lengths.sum()) * width, np.uint8)
    target, position = data.data, 0
    for first in range(0, len(owners), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        pieces = zip(owners[part].tolist(), starts[part].tolist(), stops[part].tolist(), strict=True)
        joined = b"".join([views[owner][start:stop] for owner, start, stop in pieces])
        target[position : position + len(joined)] = joined
        position += len(joined)
    return data


def _bytes_of(values: pa.Array, width: int) -> memoryview:
    """Return the bytes of an array of numbers, from its first element on."""
    data = values.buffers()[1]
    if data is None or not len(values):
        return memoryview(b"")
    return memoryview(data)[values.offset * width : (values.offset + len(values)) * width].cast("B")
