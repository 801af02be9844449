"""Named arrays as bytes: what a worker sends back for a unit, and what the journal keeps of it."""

import json
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_HEAD = struct.Struct("<Q")
_ALIGNMENT = 64


def pack_arrays(arrays: Mapping[str, NDArray[np.integer]]) -> bytes:
    """Return one-dimensional arrays as bytes: length of a JSON list, the list, then each array, aligned."""
    listed = [(name, array.dtype.str, len(array)) for name, array in arrays.items()]
    described = json.dumps(listed).encode()
    pieces: list[bytes | memoryview] = [_HEAD.pack(len(described)), described]
    position = _HEAD.size + len(described)
    for array in arrays.values():
        padding = -position % _ALIGNMENT
        pieces += [bytes(padding), np.ascontiguousarray(array).data]
        position += padding + array.nbytes
    return b"".join(pieces)


def unpack_arrays(buffer: memoryview) -> dict[str, NDArray[np.integer]]:
    """Return the arrays as views of ``buffer``, without a copy."""
    (length,) = _HEAD.unpack_from(buffer)
    position = _HEAD.size + length
    arrays = {}
    for name, dtype, count in json.loads(bytes(buffer[_HEAD.size : position])):
        position += -position % _ALIGNMENT
        arrays[name] = np.frombuffer(buffer, dtype=dtype, count=count, offset=position)
        position += arrays[name].nbytes
    return arrays
