"""The members of a tar archive one after the other: ustar, PAX headers, GNU's long names and large sizes.

Written anew because ``tarfile`` ends in silence where a header is damaged, and the rest would be lost.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from packer.errors import SourceError

BLOCK_BYTES = 512

_REGULAR = b"0\0007"  # plain, plain of old archives, contiguous
_FOLDER, _GLOBAL = b"5", b"g"
_LONG_NAME, _LONG_LINK, _EXTENDED, _EXTENDED_OF_SUN = b"L", b"K", b"x", b"X"
_UNREAD = {
    b"1": "a hard link; write the archive with tar --hard-dereference",
    b"2": "a symbolic link; write the archive with tar --dereference",
    b"S": "a sparse file; write the archive without --sparse",
    b"M": "continued from another volume; join the volumes",
}
_MAX_HEADER_BYTES = 1 << 20
_MAX_PADDING_BYTES = 1 << 16  # records of tar are 10 KiB unless asked otherwise
_OVER_LONG_BYTES = 1 << 62

ReadAt = Callable[[int, int], bytes]
"""Takes an offset and a number of bytes; returns fewer where the file ends."""


class Member(NamedTuple):
    """A regular file of an archive."""

    name: str
    header: int
    """Byte at which its headers begin."""
    start: int
    """Byte at which its content begins."""
    size: int
    """Bytes of the content."""

    @property
    def end(self) -> int:
        """The byte after its last block."""
        return self.start + -(-self.size // BLOCK_BYTES) * BLOCK_BYTES


def tar_members(read_at: ReadAt, start: int, stop: int, *, num_bytes: int, owner: str) -> Iterator[Member]:
    """Yield the regular files whose headers begin in ``[start, stop)``.

    Args:
        read_at: reads the archive.
        start: where a header begins.
        stop: the end of the archive, or where another header begins.
        num_bytes: the size of the archive.
        owner: what messages call it.

    Raises:
        SourceError: a damaged header, a member that is cut, or one of a kind that cannot be read; at the end
            of the archive, if the blocks that mark it are missing.
    """
    at = first = start
    name: str | None = None
    size: int | None = None
    while at < stop:
        header = read_at(at, BLOCK_BYTES)
        if not header.strip(b"\0"):
            if first != at:
                raise SourceError(
                    f"{owner}, byte {first}: a header that belongs to no member; fetch the archive again"
                )
            _check_end(read_at, at, num_bytes, owner)
            return
        try:
            found, kind, stored = _parse(header)
        except ValueError as error:
            raise SourceError(f"{owner}, byte {at}: {error}; fetch the archive again") from error
        taken = (
            stored
            if kind in (_LONG_NAME, _LONG_LINK, _EXTENDED, _EXTENDED_OF_SUN, _GLOBAL)
            else (stored if size is None else size)
        )
        member = Member(found if name is None else name, first, at + BLOCK_BYTES, taken)
        if member.start + member.size > num_bytes:
            raise SourceError(
                f"{owner}: member {member.name!r} has {member.size} bytes from byte {member.start} on, and "
                f"the archive ends at byte {num_bytes}; it was cut, fetch it again"
            )
        at = member.end
        if kind in (_LONG_NAME, _EXTENDED, _EXTENDED_OF_SUN):
            if member.size > _MAX_HEADER_BYTES:
                raise SourceError(f"{owner}, byte {member.header}: a header of {member.size} bytes; refused")
            content = read_at(member.start, member.size)
            if kind == _LONG_NAME:
                name = _text(content.split(b"\0")[0])
                continue
            try:
                records = dict(_records(content))
                name = records.get("path", name)
                size = int(records["size"]) if "size" in records else size
            except ValueError as error:
                raise SourceError(
                    f"{owner}, byte {member.header}: a damaged PAX header ({error}); fetch the archive again"
                ) from error
            if "GNU.sparse.major" in records or "GNU.sparse.size" in records:
                raise SourceError(f"{owner}: member {name!r} is {_UNREAD[b'S']}")
            continue
        if kind in (_LONG_LINK, _GLOBAL):
            continue
        if kind in _REGULAR:
            yield member
        elif kind != _FOLDER:
            what = _UNREAD.get(kind, f"of kind {kind!r}, no file; write the archive without it")
            raise SourceError(f"{owner}: member {member.name!r} is {what}")
        first, name, size = at, None, None
    if stop >= num_bytes:
        raise SourceError(f"{owner} lacks the blocks that end an archive; it was cut, fetch it again")


def _check_end(read_at: ReadAt, at: int, num_bytes: int, owner: str) -> None:
    """Check that nothing but padding follows."""
    rest = num_bytes - at
    if rest < 2 * BLOCK_BYTES:
        raise SourceError(f"{owner} lacks the blocks that end an archive; it was cut, fetch it again")
    if read_at(at, min(rest, _MAX_PADDING_BYTES)).strip(b"\0"):
        raise SourceError(
            f"{owner} goes on behind the end of its archive, at byte {at}; if archives were joined, join "
            "them with tar --concatenate, or name each"
        )


def _parse(header: bytes) -> tuple[str, bytes, int]:
    """Return name, kind and size of one header.

    Raises:
        ValueError: it is none.
    """
    if len(header) < BLOCK_BYTES:
        raise ValueError("a header that is cut")
    with_spaces = header[:148] + b" " * 8 + header[156:]
    if _number(header[148:156]) not in (sum(with_spaces), sum(with_spaces) - 256 * _num_high(with_spaces)):
        raise ValueError("a header whose checksum is wrong")
    name = header[:100].split(b"\0")[0]
    prefix = header[345:500].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and prefix:
        name = prefix + b"/" + name
    size = _number(header[124:136])
    if not 0 <= size < _OVER_LONG_BYTES:
        raise ValueError(f"a member of {size} bytes")
    kind = header[156:157]
    has_content = kind not in (b"1", b"2", b"3", b"4", b"5", b"6")
    return _text(name), kind, size if has_content else 0


def _num_high(header: bytes) -> int:
    """Return how many bytes count as negative in the checksums of old programs."""
    return sum(byte > 127 for byte in header)


def _number(field: bytes) -> int:
    """Read octal digits, or GNU's base 256."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big", signed=False) - (
            (1 << 8 * (len(field) - 1)) if field[0] == 0xFF else 0
        )
    digits = field.split(b"\0")[0].strip()
    if digits.strip(b"01234567"):
        raise ValueError(f"a number that is none ({digits!r})")
    return int(digits or b"0", 8)


def _records(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield keys and values of a PAX header: the length of all, a space, ``KEY=VALUE``, a line feed."""
    while content.strip(b"\0"):
        digits, space, _ = content.partition(b" ")
        if not space or not digits.isdigit() or not len(digits) < int(digits) <= len(content):
            raise ValueError("a record of no length")
        record, content = content[len(digits) + 1 : int(digits)], content[int(digits) :]
        key, equals, value = record.partition(b"=")
        if not equals or value[-1:] != b"\n":
            raise ValueError("a record without key and value")
        yield _text(key), _text(value[:-1])


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
