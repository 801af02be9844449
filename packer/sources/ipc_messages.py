"""Where the record batches of an Arrow IPC file or stream lie, read from message headers alone.

Neither pyarrow's stream reader nor its file reader tells a batch's row count without reading its body. The
headers do: an encapsulated message is ``0xFFFFFFFF, int32 metadata size, flatbuffer, body`` (before Arrow
0.15 without the first four bytes). See the Arrow columnar format, "Serialization and Interprocess
Communication".
"""

import struct
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import SourceError

FILE_MAGIC = b"ARROW1"
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_CONTINUATION = b"\xff\xff\xff\xff"
_MAX_METADATA = 256 << 20
_LOOKED_AT_BEHIND = 1 << 16
"""Bytes after the end-of-stream mark: damage may make one, and rows would be missing."""


class Message(NamedTuple):
    """One record batch of a stream or file."""

    offset: int
    """Byte at which the encapsulated message begins."""
    num_rows: int
    num_bytes: int
    """Size of header and body."""
    is_compressed: bool
    metadata: bytes = b""
    """The header itself, where it was to be kept."""


class BatchLayout(NamedTuple):
    """Where the values of a record batch lie in its file."""

    nodes: NDArray[np.int64]
    """(columns and those below them, 2) their lengths and numbers of nulls"""
    buffers: NDArray[np.int64]
    """(buffers, 2) byte of the file at which each begins, and the one after its last"""

    def within(self, buffer: int, start: int, stop: int) -> tuple[int, int]:
        """Return where bytes ``[start, stop)`` of a buffer lie in the file.

        Raises:
            ValueError: it does not reach that far.
        """
        first, last = self.buffers[buffer].tolist()
        if stop > start and first + stop > last:
            raise ValueError(f"a buffer of {last - first} bytes where {stop} are needed")
        return first + start, first + max(stop, start)


def layout_of(message: Message) -> BatchLayout:
    """Return where the values of a batch lie, from the header that was kept of it.

    Raises:
        SourceError: the header is damaged.
    """
    metadata = message.metadata
    try:
        batch = _table(metadata, _root(metadata), 2)
        nodes, buffers = (_structs(metadata, batch, field) for field in (1, 2))
    except (struct.error, IndexError, ValueError) as error:
        raise SourceError("the header of a record batch is damaged; fetch the file again") from error
    body = message.offset + message.num_bytes - _scalar(metadata, _root(metadata), 3, "<q")
    starts = buffers[:, 0] + body
    stops = starts + buffers[:, 1]
    if (buffers < 0).any() or (stops > message.offset + message.num_bytes).any() or (nodes < 0).any():
        raise SourceError("a record batch has values outside of its body; fetch the file again")
    return BatchLayout(nodes, np.stack([starts, stops], axis=1))


def scan_stream(file: BinaryIO, size: int, *, keep: bool = False) -> tuple[list[Message], bool]:
    """Return the record batches of a stream in order, and whether it holds dictionaries.

    Only headers are read, so that a scan costs the same however large the bodies are; ``keep`` keeps them.

    Raises:
        SourceError: the stream ends within a message.
    """
    batches: list[Message] = []
    has_dictionaries = False
    offset = 0
    while offset < size:
        header = _read_header(file, offset, size)
        if header is None:
            file.seek(offset)
            if file.read(_LOOKED_AT_BEHIND).strip(b"\0\xff"):
                raise SourceError(
                    f"the stream ends at byte {offset}, but the file at {size}; it is damaged, fetch it again"
                )
            break
        kind, num_rows, num_bytes, is_compressed, metadata = header
        if offset + num_bytes > size:
            raise SourceError(
                f"record batch {len(batches)} needs {num_bytes} bytes from byte {offset} on, "
                f"but the file ends at {size}; it was cut, fetch it again"
            )
        if (kind == _SCHEMA) != (offset == 0):  # else rows would be missing, and nobody told
            raise SourceError(f"no record batch at byte {offset}; the file is damaged, fetch it again")
        if kind == _RECORD_BATCH:
            kept = metadata if keep else b""
            batches.append(Message(offset, num_rows, num_bytes, is_compressed, kept))
        has_dictionaries |= kind == _DICTIONARY
        offset += num_bytes
    return batches, has_dictionaries


def header_ranges(footer: bytes, size: int) -> list[tuple[int, int]]:
    """Return where the headers lie that `scan_file` reads, as far as the footer is to be believed."""
    return [
        (offset, offset + metadata_size)
        for offset, metadata_size, _ in _footer_blocks(footer)
        if 0 <= offset <= offset + metadata_size <= size and metadata_size <= _MAX_METADATA
    ]


def scan_file(file: BinaryIO, footer: bytes, size: int, *, keep: bool = False) -> list[Message]:
    """Return the record batches that the footer of an IPC file lists, in its order; ``keep`` keeps headers.

    Raises:
        SourceError: a batch lies outside the file or is no record batch.
    """
    batches: list[Message] = []
    for number, (offset, metadata_size, body_size) in enumerate(_footer_blocks(footer)):
        header = None
        if (
            offset >= 0
            and body_size >= 0
            and metadata_size >= 0
            and offset + metadata_size + body_size <= size
        ):
            header = _read_header(file, offset, size)
        if header is None or header[0] != _RECORD_BATCH:
            raise SourceError(
                f"record batch {number} is not where the footer says; the file is damaged, fetch it again"
            )
        kept = header[4] if keep else b""
        batches.append(Message(offset, header[1], metadata_size + body_size, header[3], kept))
    return batches


def end_of_buffers(message: bytes, num_buffers: int) -> int:
    """Return how many bytes of a record batch's message hold its header and the first of its buffers.

    Args:
        message: header and body, as written since Arrow 0.15.
        num_buffers: in the order of the columns, those of nested ones after their own.
    """
    (metadata_size,) = struct.unpack_from("<i", message, 4)
    metadata = message[8 : 8 + metadata_size]
    batch = _table(metadata, _root(metadata), 2)
    vector = _table(metadata, batch, 2)
    ends = [
        sum(struct.unpack_from("<qq", metadata, vector + 4 + 16 * number)) for number in range(num_buffers)
    ]
    return int(8 + metadata_size + max(ends, default=0))


def decoded_bytes(file: BinaryIO, batch: Message) -> int:
    """Return what the buffers of a record batch take in memory; compressed ones say it in front of each.

    Raises:
        SourceError: a buffer lies outside the batch.
    """
    if not batch.is_compressed:
        return batch.num_bytes
    file.seek(batch.offset)
    prefix = file.read(8)
    skip = 8 if prefix[:4] == _CONTINUATION else 4
    (metadata_size,) = struct.unpack("<i", prefix[skip - 4 : skip])
    file.seek(batch.offset + skip)
    metadata = file.read(metadata_size)
    total = 0
    try:
        vector = _table(metadata, _table(metadata, _root(metadata), 2), 2)
        (count,) = struct.unpack_from("<I", metadata, vector)
        for place in range(vector + 4, vector + 4 + 16 * count, 16):
            start, size = struct.unpack_from("<qq", metadata, place)
            if size == 0:
                continue
            file.seek(batch.offset + skip + metadata_size + start)
            (decoded,) = struct.unpack("<q", file.read(8))
            total += size - 8 if decoded < 0 else decoded  # below 0: this one is stored as it is
    except (struct.error, IndexError, OSError, ValueError) as error:
        raise SourceError(
            f"the buffers of the record batch at byte {batch.offset} are not where its header says; the file "
            "is damaged, fetch it again"
        ) from error
    return total


def _read_header(file: BinaryIO, offset: int, size: int) -> tuple[int, int, int, bool, bytes] | None:
    """Return (kind, rows, bytes, whether compressed, header) of a message; None at the end-of-stream mark."""
    file.seek(offset)
    prefix = file.read(8)
    skip = 8 if prefix[:4] == _CONTINUATION else 4
    if len(prefix) < skip:
        raise SourceError(f"the file ends within a message at byte {offset}; it was cut, fetch it again")
    (metadata_size,) = struct.unpack("<i", prefix[skip - 4 : skip])
    if metadata_size == 0:
        return None
    if not 0 < metadata_size <= min(_MAX_METADATA, size - offset):
        raise SourceError(
            f"no Arrow message at byte {offset}; the file is damaged or was cut, fetch it again"
        )
    file.seek(offset + skip)
    metadata = file.read(metadata_size)
    try:
        message = _root(metadata)
        kind = _scalar(metadata, message, 1, "<B")
        body_size = _scalar(metadata, message, 3, "<q")
        num_rows, is_compressed = 0, False
        if kind == _RECORD_BATCH:
            batch = _table(metadata, message, 2)
            num_rows = _scalar(metadata, batch, 0, "<q")
            is_compressed = _field(metadata, batch, 3) is not None
    except (struct.error, IndexError) as error:
        raise SourceError(
            f"no Arrow message at byte {offset}; the file is damaged, fetch it again"
        ) from error
    if kind not in (_SCHEMA, _DICTIONARY, _RECORD_BATCH) or body_size < 0 or num_rows < 0:
        raise SourceError(f"no Arrow message at byte {offset}; the file is damaged, fetch it again")
    return kind, num_rows, skip + metadata_size + body_size, is_compressed, metadata


def _footer_blocks(footer: bytes) -> list[tuple[int, int, int]]:
    """Return (offset, metadata size, body size) of each record batch in a footer."""
    try:
        root = _root(footer)
        field = _field(footer, root, 3)
        if field is None:
            return []
        vector = field + struct.unpack_from("<I", footer, field)[0]
        (count,) = struct.unpack_from("<I", footer, vector)
        blocks = [struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * block) for block in range(count)]
    except (struct.error, IndexError) as error:
        raise SourceError("the footer is damaged; fetch the file again") from error
    return [(offset, metadata_size, body_size) for offset, metadata_size, body_size in blocks]


# Flatbuffers, as much as is needed: a table begins with the distance back to its vtable, which holds the size
# of itself, the size of the table, and for each field its place in the table, 0 where it is absent.


def _root(buffer: bytes) -> int:
    return int(struct.unpack_from("<I", buffer, 0)[0])


def _field(buffer: bytes, table: int, number: int) -> int | None:
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0 or 4 + 2 * number + 2 > struct.unpack_from("<H", buffer, vtable)[0]:
        return None
    place = struct.unpack_from("<H", buffer, vtable + 4 + 2 * number)[0]
    return table + place if place else None


def _scalar(buffer: bytes, table: int, number: int, code: str) -> int:
    field = _field(buffer, table, number)
    return 0 if field is None else int(struct.unpack_from(code, buffer, field)[0])


def _structs(buffer: bytes, table: int, number: int) -> NDArray[np.int64]:
    """(structs, 2) a vector of structs of two numbers."""
    field = _field(buffer, table, number)
    if field is None:
        return np.zeros((0, 2), np.int64)
    vector = field + int(struct.unpack_from("<I", buffer, field)[0])
    (count,) = struct.unpack_from("<I", buffer, vector)
    return np.frombuffer(buffer, "<i8", 2 * count, vector + 4).reshape(-1, 2)


def _table(buffer: bytes, table: int, number: int) -> int:
    field = _field(buffer, table, number)
    if field is None:
        raise IndexError(number)
    return field + int(struct.unpack_from("<I", buffer, field)[0])
