"""Lines of a file by number: one pass notes where each begins, in a file that is mapped, not held."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from packer.arrays import mapped_bytes
from packer.errors import SourceError
from packer.node_cache import key_of, node_cache

BLOCK_BYTES = 4 << 20
_VERSION = "lines 1"
"""Of what is kept: an index that another rule made is another entry."""
MAX_LINE_BYTES = 1 << 30
_HELD_BYTES = 1 << 20
_NEWLINE = 0x0A
_BLANK = np.frombuffer(b" \t\r\n", np.uint8)


class LineIndex:
    """Where every row of a JSON Lines file begins and ends; blank lines are no rows.

    The offsets lie in a mapped file, 16 bytes a row: an index of any size costs no memory.
    """

    def __init__(self, bounds: NDArray[np.int64]) -> None:
        """Take the offsets.

        Args:
            bounds: (2 * rows,) first byte of each row and the one after its last.
        """
        self.bounds = bounds.reshape(-1, 2)
        """(rows, 2)"""

    def __len__(self) -> int:
        return len(self.bounds)


def index_lines(
    blocks: Callable[[], Iterable[bytes]], *, owner: str, max_line_bytes: int, content: str | None
) -> LineIndex:
    """Index a file, once for all processes of this node.

    Args:
        blocks: gives its bytes, in pieces.
        owner: what messages call it.
        max_line_bytes: a longer line is refused.
        content: what tells its content from any other; None: index it for this process alone.
    """

    def write(path: Path) -> None:
        with path.open("wb") as file:
            _write_bounds(blocks(), file, owner, max_line_bytes)

    kept = None if content is None else node_cache().made(key_of(content, _VERSION), write, suffix=".lines")
    with _opened(kept) as file:
        if kept is None:
            _write_bounds(blocks(), file, owner, max_line_bytes)
        return LineIndex(mapped(file, np.dtype(np.int64)))


def spooled(
    blocks: Callable[[], Iterable[bytes]], *, owner: str, max_line_bytes: int, content: str | None
) -> tuple[NDArray[np.uint8], LineIndex]:
    """Write blocks to a file and index it, in one pass, as `index_lines` does; return its bytes, mapped."""

    def write_both(spool: BinaryIO, lines: BinaryIO) -> None:
        def copied() -> Iterator[bytes]:
            for block in blocks():
                spool.write(block)
                yield block

        _write_bounds(copied(), lines, owner, max_line_bytes)

    def write(folder: Path) -> None:
        folder.mkdir()
        with (folder / "bytes").open("wb") as spool, (folder / "lines").open("wb") as lines:
            write_both(spool, lines)

    kept = None if content is None else node_cache().made(key_of(content, _VERSION), write, suffix=".spool")
    with (
        _opened(kept and kept / "bytes") as spool,
        _opened(kept and kept / "lines") as lines,
    ):
        if kept is None:
            write_both(spool, lines)
        return mapped(spool, np.dtype(np.uint8)), LineIndex(mapped(lines, np.dtype(np.int64)))


def _write_bounds(blocks: Iterable[bytes], file: BinaryIO, owner: str, max_line_bytes: int) -> None:
    for starts, stops in _line_bounds(blocks, owner, max_line_bytes):
        # (rows,) twice -> (rows, 2)
        file.write(np.stack([starts, stops], axis=1).tobytes())


def _opened(kept: Path | None) -> BinaryIO:
    """Open what the node keeps, or a file without a name that goes with the process."""
    return cast(BinaryIO, tempfile.TemporaryFile(prefix="packer-")) if kept is None else kept.open("rb")


def mapped(file: BinaryIO, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return what was written to a temporary file, mapped where it is large; the file may be closed then."""
    file.flush()
    size = file.seek(0, os.SEEK_END)
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
