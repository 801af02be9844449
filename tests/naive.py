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


def row(samples: list[dict[str, list]], segments: list[tuple[int, int]], is_filler: bool) -> dict[str, list]:
    """Build a row in the stated order: concatenate, mask starts, pad, shift once, restart positions.

    ``segments`` are the edges of each sample with its padding and, last, of the padding of the row.
    """
    length = segments[-1][1]
    built = {
        "input_ids": [0] * length,
        "weights": [[0.0, 0.0] for _ in range(length)],
        "labels": [-100] * length,
        "position_ids": [position - first for first, last in segments for position in range(first, last)],
        "is_token": [False] * length,
    }
    for sample, (first, _) in zip(samples, segments, strict=False):
        labels = sample.get("labels", sample["input_ids"])
        for offset, token in enumerate(sample["input_ids"]):
            built["input_ids"][first + offset] = token
            built["weights"][first + offset] = sample["weights"][offset]
            built["labels"][first + offset] = labels[offset] if offset else -100
            built["is_token"][first + offset] = True
    shifted = [*built["labels"][1:], -100]
    built["shift_labels"] = [-100] * length if is_filler else shifted
    return built
