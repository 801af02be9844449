"""Arrow arrays as NumPy arrays and back, without a copy and without pandas.

pyarrow's own conversions import pandas where it is installed, which takes every process half a second.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray


def to_numpy(array: pa.Array) -> NDArray[Any]:
    """(len(array),) the elements of an array of numbers, a read-only view; of booleans a copy.

    Nulls are not looked at: whatever lies under them is delivered.
    """
    data = array.buffers()[1]
    if not len(array) or data is None:
        return np.zeros(len(array), array.type.to_pandas_dtype())
    if pat.is_boolean(array.type):
        first = array.offset // 8 * 8
        bits = np.frombuffer(data, np.uint8, offset=first // 8)
        marks = np.unpackbits(bits, count=array.offset - first + len(array), bitorder="little")
        return marks[array.offset - first :].view(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(data, dtype, count=len(array), offset=array.offset * dtype.itemsize)


def to_arrow(values: NDArray[Any]) -> pa.Array:
    """Return a one-dimensional array of numbers as an Arrow array over the same memory."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, data])
