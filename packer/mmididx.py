"""The MMIDIDX index file: where each item of a ``.bin`` file starts and how long it is.

Megatron's token files and DeepSpeed's metric files share it (fairseq's mmap format): 9 bytes magic, ``<Q``
version, ``<B`` dtype code, ``<Q`` number of items N, ``<Q`` number of document entries D, int32 sizes (N,),
int64 byte pointers (N,), int64 document index (D,); Megatron's multimodal files append int8 modes (N,). The
two dialects agree on the dtype codes 1 to 5 only.
"""

import errno
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from packer.arrays import mapped_bytes
from packer.errors import PackerError, SourceError
from packer.wording import TOO_MANY_FILES

DEEPSPEED_DTYPES: Mapping[int, np.dtype[np.integer]] = MappingProxyType(
    {
        1: np.dtype(np.uint8),
        2: np.dtype(np.int8),
        3: np.dtype(np.int16),
        4: np.dtype(np.int32),
        5: np.dtype(np.int64),
        6: np.dtype(np.uint16),
        7: np.dtype(np.uint32),
        8: np.dtype(np.uint64),
    }
)
"""Dtype codes as DeepSpeed's indexed_dataset writes them."""

MEGATRON_DTYPES: Mapping[int, np.dtype[np.number]] = MappingProxyType(
    {
        **{code: DEEPSPEED_DTYPES[code] for code in range(1, 6)},
        6: np.dtype(np.float64),
        7: np.dtype(np.float32),
        8: np.dtype(np.uint16),
    }
)
"""Dtype codes as Megatron-LM and megatron-core write them."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_CHUNK_ITEMS = 1 << 15


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One index, memory-mapped: nothing is read before it is used."""

    dtype_code: int
    """Meaning by dialect: ``DEEPSPEED_DTYPES`` or ``MEGATRON_DTYPES``."""
    sizes: NDArray[np.int32]
    """(N,) elements of each item."""
    pointers: NDArray[np.int64]
    """(N,) byte offset of each item in the ``.bin`` file."""
    document_index: NDArray[np.int64]
    """(D,) item numbers at which documents begin and end."""


def read_index(path: str | os.PathLike[str], *, error: type[PackerError] = SourceError) -> IndexFile:
    """Map an index and check that its parts fill the file exactly; the items themselves are not looked at.

    Args:
        path: the ``.idx`` file.
        error: the class to raise, ``MetricsError`` where the file is one of a metrics directory.
    """
    path = Path(path)
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(_HEADER.size)
    except OSError as cause:
        too_many = cause.errno in (errno.EMFILE, errno.ENFILE)
        raise error(f"cannot read index {path}: {TOO_MANY_FILES if too_many else cause.strerror}") from cause
    if not head.startswith(_MAGIC[: len(head)]) or not head:
        raise error(f"{path} is no MMIDIDX index: it starts with {head[:9]!r}, not with {_MAGIC!r}")
    if len(head) < _HEADER.size:
        raise error(f"index {path} is truncated: {len(head)} bytes, the header alone takes {_HEADER.size}")
    _, version, dtype_code, num_items, num_entries = _HEADER.unpack(head)
    if version != _VERSION:
        raise error(f"index {path} has format version {version}; this packer reads version {_VERSION}")
    if dtype_code not in DEEPSPEED_DTYPES:
        raise error(f"index {path} has dtype code {dtype_code}; the codes of the format are 1 to 8")
    expected_bytes = _HEADER.size + 12 * num_items + 8 * num_entries
    if file_bytes not in (expected_bytes, expected_bytes + num_items):  # + num_items: Megatron's modes
        fault = "is truncated" if file_bytes < expected_bytes else "has bytes that belong to nothing"
        raise error(
            f"index {path} {fault}: {num_items} items and {num_entries} document entries take "
            f"{expected_bytes} bytes, the file has {file_bytes}"
        )
    try:
        data = mapped_bytes(path)
    except OSError as cause:
        raise error(f"cannot read index {path}: {cause.strerror or cause}") from cause
    sizes, pointers, document_index = np.split(
        data[_HEADER.size : expected_bytes], [4 * num_items, 12 * num_items]
    )
    return IndexFile(
        dtype_code=dtype_code,
        sizes=sizes.view("<i4"),
        pointers=pointers.view("<i8"),
        document_index=document_index.view("<i8"),
    )


def write_index(
    write: Callable[[bytes], object],
    sizes: NDArray[np.integer],
    *,
    dtype_code: int,
    item_bytes: int,
    document_index: NDArray[np.int64] | None,
) -> None:
    """Write an index chunk by chunk, so that memory stays flat at any number of items.

    Args:
        write: takes the bytes in order, such as the method of an open file.
        sizes: (N,) elements of each item, within int32; a broadcast or mapped array will do.
        dtype_code: the dialect's code of the element type.
        item_bytes: bytes of one element.
        document_index: item numbers at which documents begin and end; None: each item is one document.
    """
    num_items = len(sizes)
    num_entries = num_items + 1 if document_index is None else len(document_index)
    write(_HEADER.pack(_MAGIC, _VERSION, dtype_code, num_items, num_entries))
    starts = range(0, num_items, _CHUNK_ITEMS)
    for start in starts:
        write(sizes[start : start + _CHUNK_ITEMS].astype("<i4").tobytes())
    position = 0
    for start in starts:
        ends = position + np.cumsum(sizes[start : start + _CHUNK_ITEMS], dtype="<i8") * item_bytes
        write(np.concatenate([np.array([position], dtype="<i8"), ends[:-1]]).tobytes())
        position = int(ends[-1])
    if document_index is not None:
        write(document_index.astype("<i8").tobytes())
        return
    for start in range(0, num_entries, _CHUNK_ITEMS):
        write(np.arange(start, min(start + _CHUNK_ITEMS, num_entries), dtype="<i8").tobytes())
