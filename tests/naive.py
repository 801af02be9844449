"""Naive twins: the slow and obvious way to what the package does fast."""

import struct
from pathlib import Path

import numpy as np


def read_items(prefix: Path, dtypes: dict[int, np.dtype]) -> list[list[int]]:
    """Read a ``.bin``/``.idx`` pair field by field."""
    with open(f"{prefix}.idx", "rb") as index, open(f"{prefix}.bin", "rb") as data:
        assert index.read(9) == b"MMIDIDX\x00\x00"
        (version,) = struct.unpack("<Q", index.read(8))
        (code,) = struct.unpack("<B", index.read(1))
        (num_items,) = struct.unpack("<Q", index.read(8))
        (num_entries,) = struct.unpack("<Q", index.read(8))
        assert version == 1
        sizes = [struct.unpack("<i", index.read(4))[0] for _ in range(num_items)]
        pointers = [struct.unpack("<q", index.read(8))[0] for _ in range(num_items)]
        documents = [struct.unpack("<q", index.read(8))[0] for _ in range(num_entries)]
        assert index.read() == b""
        assert documents[0] == 0
        assert documents[-1] == num_items
        items = []
        for size, pointer in zip(sizes, pointers, strict=True):
            data.seek(pointer)
            items.append(np.frombuffer(data.read(size * dtypes[code].itemsize), dtypes[code]).tolist())
        return items
