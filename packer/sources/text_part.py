"""What files of text have in common, plain or compressed (gzip, zstd): their bytes, in blocks."""

from collections.abc import Iterator
from copy import copy
from functools import cached_property
from typing import Any, Self

import pyarrow as pa

from packer.errors import SourceError
from packer.sources.line_index import BLOCK_BYTES, MAX_LINE_BYTES
from packer.sources.location import Location, edge_hash, reading
from packer.sources.part import OnError, Part

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""By the first bytes. A zstd file may begin with a frame to skip: ``pzstd`` writes one before each."""
COMPRESSIONS |= {bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PACKED_LINE_BYTES = 64 << 20
_PACKED_RATIO = 64
"""How often longer than its file a line of a compressed one may be: text packs to a tenth, a bomb to less."""


class TextPart(Part):
    """One file of UTF-8 text whose rows are lines, or begin and end with them."""

    utf8_rule: str
    """What is said of a file that is UTF-16."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._num_bytes = location.size()
        magic = location.read(0, 4)
        self._compression = next(
            (name for mark, name in COMPRESSIONS.items() if magic.startswith(mark)), None
        )
        if magic[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise SourceError(f"{location.path} is UTF-16; {self.utf8_rule}, convert the file")
        self._on_error: OnError = "error"
        self._is_empty = True
        self._num_bytes_read = 0

    def tolerating(self, on_error: OnError) -> Self:
        """Return the file as it is to be read."""
        if on_error == self._on_error:
            return self
        other = copy(self)
        other.__dict__ |= self.__dict__ | {"_on_error": on_error}  # with the index, which may be costly
        return other

    def identity(self) -> dict[str, Any]:
        """Return size and hash of the first and last MiB, as stored."""
        return {"num_bytes": self._num_bytes, "sha256": edge_hash(self.location, self._num_bytes)}

    def close(self) -> None:
        """Close the file; the index stays."""
        self.__dict__.pop("_file", None)

    @cached_property
    def _file(self) -> pa.NativeFile:
        return self.location.open_arrow()

    @property
    def _max_line_bytes(self) -> int:
        """A line is held whole, so what a small file unpacks to must not fill the memory."""
        if not self._compression:
            return MAX_LINE_BYTES
        return min(max(_PACKED_LINE_BYTES, _PACKED_RATIO * self._num_bytes), MAX_LINE_BYTES)

    def _blocks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of ``[start, stop)``; of a compressed file all, decompressed."""
        with self.location.open() as file:
            if self._compression:
                with reading(self.location):
                    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), self._compression)
                while True:
                    with reading(self.location):
                        block = stream.read(BLOCK_BYTES)
                        self._num_bytes_read = file.tell()
                    if not block:
                        return
                    yield block
            else:
                with reading(self.location):
                    file.seek(start)
                while start < stop:
                    with reading(self.location):
                        block = file.read(min(BLOCK_BYTES, stop - start))
                    if not block:
                        raise SourceError(f"{self.location.path} shrank while it was read; run again")
                    start += len(block)
                    yield block
