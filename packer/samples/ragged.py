"""List arrays of any Arrow kind as plain NumPy: values, and where each row begins and how long it is."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_numpy
from packer.errors import ColumnError, SourceError


class RowError(SourceError):
    """A row that has no length, or no tokens; `row` counts from the start of the batch."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


class Ragged(NamedTuple):
    """Rows of unequal length over one flat array; row i is ``values[starts[i] : starts[i] + lengths[i]]``."""

    values: pa.Array
    """Flat elements, not yet decoded; may hold more than the rows name."""
    starts: NDArray[np.integer]
    """(rows,)"""
    lengths: NDArray[np.integer]
    """(rows,) 0 for nulls, whatever lies under them; of the type of the offsets."""


def is_list_type(data_type: pa.DataType) -> bool:
    """Whether a column of this type is a list of some kind."""
    return bool(
        pat.is_list(data_type)
        or pat.is_large_list(data_type)
        or pat.is_fixed_size_list(data_type)
        or pat.is_list_view(data_type)
        or pat.is_large_list_view(data_type)
    )


def is_text_type(data_type: pa.DataType) -> bool:
    """Whether a column of this type holds strings, dictionary-encoded or not."""
    if pat.is_dictionary(data_type):
        data_type = data_type.value_type
    return bool(pat.is_string(data_type) or pat.is_large_string(data_type) or pat.is_string_view(data_type))


def is_token_list_type(data_type: pa.DataType) -> bool:
    """Whether a column of this type is a list of integers, which alone are token ids."""
    return is_list_type(data_type) and (
        pat.is_integer(data_type.value_type) or pat.is_null(data_type.value_type)
    )


def ragged(array: pa.Array, *, column: str) -> Ragged:
    """Take a list array apart without touching its values. Slices, chunks with offsets and nulls are exact.

    Raises:
        ColumnError: the array is no list.
    """
    data_type = array.type
    starts: NDArray[np.integer]
    lengths: NDArray[np.integer]
    if pat.is_null(data_type):
        nothing = np.zeros(len(array), np.int64)
        return Ragged(pa.nulls(0), nothing, nothing)
    if pat.is_fixed_size_list(data_type):
        size = data_type.list_size
        starts = (array.offset + np.arange(len(array), dtype=np.int64)) * size
        lengths = np.full(len(array), size, np.int64)
    elif pat.is_list_view(data_type) or pat.is_large_list_view(data_type):
        starts = to_numpy(array.offsets).astype(np.int64)
        lengths = to_numpy(array.sizes).astype(np.int64)
    elif is_list_type(data_type):
        starts, lengths = _between(to_numpy(array.offsets), column)
    else:
        raise ColumnError(f"column {column!r} is of type {data_type}, not a list; name a list column")
    if array.null_count:
        lengths = np.where(valid_rows(array), lengths, 0)
    return Ragged(array.values, starts, lengths)


def _between(offsets: NDArray[np.integer], column: str) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return where rows start and how long they are; the difference of two offsets below 0 might overflow."""
    starts = offsets[:-1]
    lengths = np.subtract(offsets[1:], starts)
    if len(lengths) and (offsets.min() < 0 or lengths.min() < 0):
        row = int(np.argmax((starts < 0) | (offsets[1:] < starts)))
        raise RowError(row, f"column {column!r} has damaged offsets; fetch the file again")
    return starts, lengths


def refuse_null_elements(rows: Ragged, column: str) -> None:
    """Check that no row holds a null: token ids are never null.

    Raises:
        RowError: one does.
    """
    if not rows.values.null_count:
        return
    if pat.is_null(rows.values.type):
        has_null = rows.lengths > 0
    else:
        nulls = np.flatnonzero(~valid_rows(rows.values))
        before, within = (np.searchsorted(nulls, ends) for ends in (rows.starts, rows.starts + rows.lengths))
        has_null = before < within
    if has_null.any():
        raise RowError(int(np.argmax(has_null)), f"column {column!r} {NULL_ELEMENT}")


NULL_ELEMENT = "holds a null among its elements; token ids are never null, correct it"


def valid_rows(array: pa.Array) -> NDArray[np.bool_]:
    """(rows,) False where the array is null."""
    return to_numpy(array.is_valid())
