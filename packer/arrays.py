"""Arrow arrays as NumPy arrays and back, without a copy and without pandas.

pyarrow's own conversions import pandas where it is installed, which takes every process half a second.
"""

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

_DTYPES = {pa.from_numpy_dtype(kind): np.dtype(kind) for kind in "?bhilqBHILQefd"}


def numpy_dtype(arrow_type: pa.DataType) -> np.dtype[Any]:
    """Return the dtype of numbers, or booleans, of an Arrow type."""
    return _DTYPES[arrow_type]


def to_numpy(array: pa.Array) -> NDArray[Any]:
    """(len(array),) the elements of an array of numbers, a read-only view; of booleans a copy.

    Nulls are not looked at: whatever lies under them is delivered.
    """
    data = array.buffers()[1]
    if not len(array) or data is None:
        return np.zeros(len(array), numpy_dtype(array.type))
    if pat.is_boolean(array.type):
        return _bits(data, array.offset, len(array))
    dtype = numpy_dtype(array.type)
    return np.frombuffer(data, dtype, count=len(array), offset=array.offset * dtype.itemsize)


def to_arrow(values: NDArray[Any]) -> pa.Array:
    """Return a one-dimensional array as an Arrow array: numbers over the same memory, booleans as bits."""
    is_bits = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_bits else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(data)])


def validity(array: pa.Array) -> NDArray[np.bool_]:
    """(len(array),) which elements are not null."""
    marks = array.buffers()[0]
    if marks is None:
        return np.ones(len(array), np.bool_)
    return _bits(marks, array.offset, len(array))


def mapped_bytes(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """(bytes,) a file mapped into memory, read-only; no descriptor stays open, as with ``np.memmap``.

    Raises:
        OSError: it cannot be opened.
    """
    with pa.memory_map(os.fspath(path)) as file:
        return np.frombuffer(file.read_buffer(), np.uint8)


def _bits(data: pa.Buffer, offset: int, length: int) -> NDArray[np.bool_]:
    """Unpack ``length`` bits from bit ``offset`` on."""
    first = offset // 8 * 8
    marks = np.unpackbits(
        np.frombuffer(data, np.uint8, offset=first // 8), count=offset - first + length, bitorder="little"
    )
    return marks[offset - first :].view(np.bool_)
