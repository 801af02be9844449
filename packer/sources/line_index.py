"""Lines of a file by number: one pass notes where each begins, in a file that is mapped, not held."""

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from packer.arrays import mapped_bytes
from packer.errors import SourceError

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 30
_HELD_BYTES = 1 << 20
_NEWLINE = 0x0A
_BLANK = np.frombuffer(b" \t\r\n", np.uint8)


class LineIndex:
    """Where every row of a JSON Lines file begins and ends; blank lines are no rows.

    The offsets lie in an unlinked temporary file, 16 bytes a row: an index of any size costs no memory.
    """

    def __init__(self, blocks: Iterable[bytes], *, owner: str, max_line_bytes: int) -> None:
        """Index a file.

        Args:
            blocks: its bytes, in pieces.
            owner: what messages call it.
            max_line_bytes: a longer line is refused.
        """
        with tempfile.TemporaryFile(prefix="packer-") as file:
            for starts, stops in _line_bounds(blocks, owner, max_line_bytes):
                np.stack([starts, stops], axis=1).tofile(file)
            # (rows, 2) int64: first byte of the row and the one after its last
            self.bounds: NDArray[np.int64] = mapped(file, np.dtype(np.int64)).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.bounds)


def spooled(
    blocks: Iterable[bytes], *, owner: str, max_line_bytes: int
) -> tuple[NDArray[np.uint8], LineIndex]:
    """Write blocks to an unlinked temporary file and index it, in one pass; return its bytes, mapped."""
    with tempfile.TemporaryFile(prefix="packer-") as file:

        def copied() -> Iterator[bytes]:
            for block in blocks:
                file.write(block)
                yield block

        index = LineIndex(copied(), owner=owner, max_line_bytes=max_line_bytes)
        return mapped(file, np.dtype(np.uint8)), index


def mapped(file: BinaryIO, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return what was written to a temporary file, mapped where it is large; the file may be closed then."""
    file.flush()
    size = file.tell()
    if size <= _HELD_BYTES:  # thousands of small files would need too many maps
        file.seek(0)
        return np.frombuffer(file.read(), dtype)
    try:
        return mapped_bytes(f"/dev/fd/{file.fileno()}").view(dtype)
    except OSError:  # where there is no such folder, the map keeps a descriptor
        return np.memmap(file, dtype, "r", shape=size // dtype.itemsize)


def _line_bounds(
    blocks: Iterable[bytes], owner: str, max_line_bytes: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (starts, stops) of the rows that end in each block; the last line needs no line end."""
    offset = 0  # of the block in the file
    start = 0  # of the line that is open
    open_is_blank = True
    for block in blocks:
        view = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(view == _NEWLINE) + offset
        if len(ends):
            starts = np.concatenate([[start], ends[:-1] + 1])
            keep = np.array([not open_is_blank or _has_text(view, 0, int(ends[0]) - offset)])
            inner = starts[1:] - offset
            first = view[inner] if len(inner) else view[:0]
            blank = np.isin(first, _BLANK)
            if blank.any():
                # (bytes + 1,) letters before each
                letters = np.concatenate([[0], np.cumsum(~np.isin(view, _BLANK), dtype=np.int32)])
                blank &= letters[ends[1:] - offset] == letters[inner]
            keep = np.concatenate([keep, ~blank])
            yield starts[keep], ends[keep]
            start = int(ends[-1]) + 1
            open_is_blank = True
        open_is_blank &= not _has_text(view, start - offset if start > offset else 0, len(view))
        offset += len(block)
        if offset - start > max_line_bytes:
            raise SourceError(
                f"{owner}: the line at byte {start} is longer than {max_line_bytes} bytes; split it"
            )
    if offset > start and not open_is_blank:
        yield np.array([start]), np.array([offset])


def _has_text(view: NDArray[np.uint8], start: int, stop: int) -> bool:
    return bool(bytes(view[start:stop]).strip())
