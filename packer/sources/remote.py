"""Bytes of files that fsspec reaches: exact ranges, near ones in one request, asked for again on failure.

A process has one client for each store, and with it one pool of connections. Clients are never carried over a
fork: fsspec drops them there, and they are looked up anew for every request.
"""

import io
import random
import re
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from packer.errors import MissingExtraError, SourceError
from packer.node_cache import key_of, node_cache

Result = TypeVar("Result")
Range: TypeAlias = tuple[int, int]
"""First byte, and the one after the last."""

ATTEMPTS = 6
FIRST_DELAY_SECONDS = 0.2
"""Doubled after every attempt, and shortened at random, lest all workers come back at once: 6 s in all."""

WASTE = 16
"""Ranges are joined to one request as long as at most one byte in so many was not asked for."""

KEPT_BYTES = 64 << 10
"""Smaller ranges are single rows, which an epoch reads once: not worth a file of the node's cache."""

_VALIDATORS = re.compile(
    r"e-?tag|md5|modified|mtime|created|generation|version|digest|checksum", re.IGNORECASE
)


def file_system(url: str) -> tuple[Any, str]:
    """Return this process's client for a URL, and the path that the client knows the file by.

    Raises:
        MissingExtraError: no client is installed for this protocol.
    """
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise MissingExtraError(
            f"{url} cannot be reached: {first_line(error)}; install the fsspec package for it"
        ) from error
    return fs, path


def info(url: str) -> Mapping[str, Any]:
    """Return what the store says of a file or folder.

    Raises:
        FileNotFoundError: there is none.
    """
    fs, path = file_system(url)
    told: Mapping[str, Any] = attempted(lambda: fs.info(path))
    return told


def attempted(ask: Callable[[], Result]) -> Result:
    """Return what a request gives; one that fails for a while is made again, later each time."""
    for delay in _delays():
        try:
            return ask()
        except Exception as error:
            if not is_passing(error):
                raise
        time.sleep(delay)
    try:
        return ask()
    except FileNotFoundError as error:
        if is_passing(error):  # a server that is down has not said that there is no such file
            raise ConnectionError(first_line(next(iter([*causes(error)][1:]), error))) from error
        raise


def fetch(url: str, ranges: Sequence[Range]) -> list[bytes]:
    """Return the bytes of ranges within a file: few requests, all under way at once.

    Raises:
        SourceError: the file ends before a range does, or its server sends whole files only.
    """
    blocks = joined(ranges)
    firsts = [start for start, _ in blocks]
    held = dict(zip(firsts, _fetch_blocks(url, blocks), strict=True))
    pieces = []
    for start, stop in ranges:
        if stop <= start:
            pieces.append(b"")
            continue
        first = firsts[bisect_right(firsts, start) - 1]
        pieces.append(held[first][start - first : stop - first])
    return pieces


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Return ascending blocks that hold all ranges; of each at most one byte in `WASTE` was not asked for."""
    blocks: list[list[int]] = []  # first byte, stop, bytes that were asked for
    for start, stop in sorted(ranges):
        if stop <= start:
            continue
        if blocks:
            block = blocks[-1]
            asked = block[2] + max(stop - max(start, block[1]), 0)
            if start <= block[1] or (stop - block[0] - asked) * WASTE <= stop - block[0]:
                block[1:] = [max(block[1], stop), asked]
                continue
        blocks.append([start, stop, stop - start])
    return [(start, stop) for start, stop, _ in blocks]


def _fetch_blocks(url: str, blocks: list[Range]) -> list[bytes]:
    fs, path = file_system(url)
    found: dict[Range, bytes] = {}
    failures: dict[Range, BaseException] = {}
    for delay in [*_delays(), None]:
        missing = [block for block in blocks if block not in found]
        starts, stops = [start for start, _ in missing], [stop for _, stop in missing]
        failures = {}
        if missing:
            pieces = fs.cat_ranges([path] * len(missing), starts, stops, on_error="return")
            for block, piece in zip(missing, pieces, strict=True):
                if isinstance(piece, BaseException):
                    failures[block] = piece
                elif len(piece) < block[1] - block[0]:  # what a cut connection leaves, with some clients
                    failures[block] = ConnectionError(
                        f"{len(piece)} bytes came of {block[1] - block[0]} from byte {block[0]} on"
                    )
                else:
                    found[block] = _as_asked(url, block, piece)
        lasting = next((error for error in failures.values() if not is_passing(error)), None)
        if lasting is not None:
            raise lasting
        if not failures:
            break
        if delay is not None:
            time.sleep(delay)
    if failures:
        raise next(iter(failures.values()))
    return [found[block] for block in blocks]


def _as_asked(url: str, block: Range, piece: bytes) -> bytes:
    if len(piece) > block[1] - block[0]:
        raise SourceError(
            f"{url}: its server sends the whole file where a part is asked for; name a copy on this machine, "
            "or serve it with support for ranges"
        )
    return piece


def fetch_kept(url: str, ranges: Sequence[Range], content: str | None) -> list[bytes]:
    """Return ranges that are worth keeping on this node: from its cache, else fetched and kept there.

    Args:
        url: the file.
        ranges: within the file.
        content: of `content_key`; None: what the store says does not tell one content from another.
    """
    if content is None:
        return fetch(url, ranges)
    cache = node_cache()
    keys = {bounds: key_of(content, *bounds) for bounds in ranges if bounds[1] - bounds[0] >= KEPT_BYTES}
    held = {bounds: block for bounds, key in keys.items() if (block := cache.block(key)) is not None}
    missing = [bounds for bounds in ranges if bounds not in held]
    for bounds, block in zip(missing, fetch(url, missing), strict=True):
        held[bounds] = block
        if bounds in keys:
            cache.keep_block(keys[bounds], block)
    return [held[bounds] for bounds in ranges]


def content_key(url: str, told: Mapping[str, Any]) -> str | None:
    """Return what tells this content from any other that the URL may have; None where nothing does."""
    if not any(_VALIDATORS.search(name) and value for name, value in told.items()):
        return None
    return key_of(url, *(f"{name}={told[name]}" for name in sorted(told)))


class RemoteFile(io.RawIOBase):
    """A remote file for readers that seek: every read is one request of just these bytes.

    What is about to be read can be fetched at once, before, with `hold`.
    """

    def __init__(self, url: str, size: int) -> None:
        super().__init__()
        self._url = url
        self._size = size
        self._at = 0
        self._held: list[tuple[int, bytes]] = []

    def hold(self, ranges: Sequence[Range], content: str | None = None) -> None:
        """Get ranges, of which reads are served until others are held; see `fetch_kept`."""
        within = [(max(start, 0), min(stop, self._size)) for start, stop in ranges]
        pieces = fetch_kept(self._url, within, content)
        self._held = [(start, piece) for (start, _), piece in zip(within, pieces, strict=True)]

    def drop(self) -> None:
        """Hold nothing any more."""
        self._held = []

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position; return it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer as far as the file reaches; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._size)
        if stop <= self._at:
            return 0
        piece = self._piece(self._at, stop)
        view[: len(piece)] = piece
        self._at = stop
        return len(piece)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to ``size`` bytes, all that are left if negative."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b""
        piece = self._piece(self._at, stop)
        self._at = stop
        return piece

    def _piece(self, start: int, stop: int) -> bytes:
        for first, held in self._held:
            if first <= start and stop <= first + len(held):
                return held[start - first : stop - first]
        return fetch(self._url, [(start, stop)])[0]


def is_passing(error: BaseException) -> bool:
    """Whether a request may succeed when it is made again: each client has exceptions of its own for it."""
    statuses = [status for cause in causes(error) if (status := _status(cause)) is not None]
    if statuses:
        return any(status in (408, 425, 429) or status >= 500 for status in statuses)
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    return is_unreachable(error)


def is_unreachable(error: BaseException) -> bool:
    """Whether a client has not come as far as the data, or has lost them on the way."""
    return any(
        isinstance(cause, ConnectionError | TimeoutError | socket.gaierror)
        or _CONNECTION.search(type(cause).__name__) is not None
        for cause in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came of."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


_CONNECTION = re.compile(r"[Cc]onnect|Timeout|Offline|Payload|Incomplete|ServiceRe(quest|sponse)Error")
"""In the names of exceptions of aiohttp, botocore, httpx and Azure's client."""


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error stands for, where it says one."""
    response = getattr(error, "response", None)
    told: Any = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    for status in (
        getattr(error, "status", None),
        getattr(error, "status_code", None),
        told.get("HTTPStatusCode") if isinstance(told, dict) else None,
    ):
        if isinstance(status, int) and status >= 400:
            return status
    return None


def _delays() -> list[float]:
    """Return how long to wait after each attempt but the last."""
    draw = random.SystemRandom()  # the run's own random numbers stay as they are
    return [FIRST_DELAY_SECONDS * 2**attempt * draw.uniform(0.5, 1.0) for attempt in range(ATTEMPTS - 1)]
