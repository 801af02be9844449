"""Named arrays as bytes: what a worker sends back for a unit, and what the journal keeps of it."""

import json
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_HEAD = struct.Struct("<Q")
_ALIGNMENT = 64


def pack_arrays(arrays: Mapping[str, Sequence[NDArray[np.integer]]]) -> bytes:
    """Return arrays as bytes: length of a JSON list, the list, then each array, aligned.

    Args:
        arrays: one-dimensional ones, each in one or more pieces of one type, which are copied once.
    """
    listed = [(name, pieces[0].dtype.str, sum(map(len, pieces))) for name, pieces in arrays.items()]
    described = json.dumps(listed).encode()
    content: list[bytes | memoryview] = [_HEAD.pack(len(described)), described]
    position = _HEAD.size + len(described)
    for pieces in arrays.values():
        padding = -position % _ALIGNMENT
        content += [bytes(padding), *(np.ascontiguousarray(piece).data for piece in pieces)]
        position += padding + sum(piece.nbytes for piece in pieces)
    return b"".join(content)


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
