"""Arrays in NumPy's file format, of tokens or of features, as lists. Pickled ones are never opened."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_arrow


def decode_npy(content: bytes) -> NDArray[Any]:
    """Return the array of numbers that a ``.npy`` file holds.

    Raises:
        ValueError: it holds none, or one without axes.
    """
    try:
        array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # damage reaches the parser of its header, which raises what it meets
        raise ValueError(f"no array in .npy format ({error})") from error
    if array.dtype.kind not in "iufb" or array.dtype == np.longdouble or not array.ndim:
        raise ValueError(f"{array.dtype} of shape {array.shape} is no list of numbers")
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def lists_of_arrays(arrays: Sequence[NDArray[Any] | None]) -> pa.Array:
    """Return arrays, equal but for their first axis, as lists over it; further axes as fixed-size lists."""
    given = [array for array in arrays if array is not None]
    if not given:
        return pa.nulls(len(arrays))
    values = to_arrow(np.concatenate([array.reshape(-1) for array in given]))
    for size in reversed(given[0].shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    lengths = np.array([0 if array is None else len(array) for array in arrays], np.int64)
    is_null = pa.array([array is None for array in arrays])
    return pa.LargeListArray.from_arrays(to_arrow(np.append(0, np.cumsum(lengths))), values, mask=is_null)
