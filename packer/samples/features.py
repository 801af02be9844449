"""Features of samples: lists of numbers, or of lists of numbers of one size, such as the bins of a frame."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_numpy
from packer.errors import ColumnError
from packer.samples.ragged import RowError, is_list_type, is_text_type, ragged, valid_rows


def is_feature_type(data_type: pa.DataType) -> bool:
    """Whether a column of this type is a list of numbers, or of such lists."""
    if not is_list_type(data_type):
        return False
    element = data_type.value_type
    return _is_numeric(element) or pat.is_null(element) or is_feature_type(element)


def _is_numeric(data_type: pa.DataType) -> bool:
    return bool(pat.is_integer(data_type) or pat.is_floating(data_type) or pat.is_boolean(data_type))


def count_frames(array: pa.Array, column: str) -> NDArray[np.integer]:
    """Return the (rows,) lengths of lists, whatever they are of; of JSON, as JSON Lines and CSV give it, too.

    Raises:
        ColumnError: the column holds no lists.
        RowError: a text is no list.
    """
    if not is_text_type(array.type):
        return ragged(array, column=column).lengths
    return np.array(
        [
            0 if text is None else len(_parsed(text, row, column))
            for row, text in enumerate(array.to_pylist())
        ],
        np.int64,
    )


def features_of_row(row: pa.Scalar, column: str) -> NDArray[Any]:
    """Return one row as an array of shape ``(frames, …)``, of the stored type; of JSON float32, or int64.

    Raises:
        RowError: frames of unlike sizes, or a null among the numbers.
    """
    if not row.is_valid:
        return np.zeros(0, np.int64)
    if is_text_type(row.type):
        return _parsed(row.as_py(), 0, column)
    values, shape = row.values, [len(row.values)]
    while is_list_type(values.type):
        _refuse_nulls(values, column)
        sizes = ragged(values, column=column).lengths
        if len(sizes) and sizes.min() < sizes.max():
            raise RowError(
                0, f"column {column!r} holds frames of {sizes.min()} to {sizes.max()} values; make them equal"
            )
        is_fixed = pat.is_fixed_size_list(values.type)
        shape.append(int(sizes[0]) if len(sizes) else values.type.list_size if is_fixed else 0)
        values = values.flatten()
    _refuse_nulls(values, column)
    if not (_is_numeric(values.type) or pat.is_null(values.type)):
        raise ColumnError(f"column {column!r} holds {values.type} elements, no numbers; name another column")
    return np.array(to_numpy(values)).reshape(shape)


def _refuse_nulls(values: pa.Array, column: str) -> None:
    if values.null_count and not valid_rows(values).all():
        raise RowError(0, f"column {column!r} holds a null among its features; correct it")


def _parsed(text: str, row: int, column: str) -> NDArray[Any]:
    try:
        array = np.array(json.loads(text))
    except (ValueError, RecursionError):  # no JSON, or frames of unlike sizes
        array = np.array(None)
    if array.ndim == 0 or (array.size and array.dtype.kind not in "iuf"):
        raise RowError(
            row, f"column {column!r} holds {text[:40]!r}, no list of numbers or of such lists of one size"
        )
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
