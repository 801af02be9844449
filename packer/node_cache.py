"""What a node keeps of data that lie elsewhere or cost much to make: by content, up to a number of bytes.

All processes of one user on a node share one folder. An entry appears under its name whole, by one rename,
and is made once: who wants the same one waits for it. Used least recently goes first.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from packer.errors import ConfigError

FOLDER_VARIABLE = "PACKER_CACHE"
LIMIT_VARIABLE = "PACKER_CACHE_BYTES"
LIMIT_BYTES = 16 << 30

_LOCKS = 64
_SWEEPS = 32
"""The folder is looked through once a process has added this fraction of the limit."""
_CHECK_BYTES = 4


def key_of(*facts: object) -> str:
    """Return the name of an entry from all that its content depends on."""
    return hashlib.sha256("\0".join(map(str, facts)).encode(errors="surrogateescape")).hexdigest()


def node_cache() -> "NodeCache":
    """Return this node's cache: in ``PACKER_CACHE``, else in the folder for temporary files.

    ``PACKER_CACHE_BYTES`` bounds it, 0 switches it off; and it never takes more than half of what is free.

    Raises:
        ConfigError: ``PACKER_CACHE_BYTES`` is no number of bytes.
    """
    limit = os.environ.get(LIMIT_VARIABLE, str(LIMIT_BYTES))
    if not (limit.isascii() and limit.isdecimal()):
        raise ConfigError(f"{LIMIT_VARIABLE} is {limit!r}; give a number of bytes, 0 for no cache")
    folder = os.environ.get(FOLDER_VARIABLE) or os.path.join(tempfile.gettempdir(), f"packer-{os.getuid()}")
    return _opened(folder, int(limit))


@lru_cache(maxsize=4)
def _opened(folder: str, limit: int) -> "NodeCache":
    return NodeCache(Path(folder), limit)


class NodeCache:
    """Entries, files or folders, by key. A folder that cannot be used keeps nothing, and nothing fails."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._added = 0

    @property
    def _is_usable(self) -> bool:
        """Whether there is such a folder now: what lies among temporary files may be cleared away."""
        return self._limit > 0 and _is_own_folder(self._folder)

    @property
    def limit(self) -> int:
        """Bytes that may be kept; 0 where nothing is."""
        return self._limit if self._is_usable else 0

    def made(self, key: str, make: Callable[[Path], None], *, suffix: str = "") -> Path | None:
        """Return the path of an entry, made now unless it is there.

        Args:
            key: of `key_of`.
            make: writes a file or a folder under the path that it is given.
            suffix: what the name ends with, by which its kind is told.

        Returns:
            The path; None where nothing can be kept, with ``make`` called never or in vain.
        """
        path = self._folder / (key + suffix)
        if not self._is_usable:
            return None
        if self._touched(path):
            return path
        try:
            with self._lock(key):
                if self._touched(path):
                    return path
                partial = self._folder / f".{key}{suffix}.{os.getpid()}.partial"
                _remove(partial)
                try:
                    make(partial)
                    size = _size_of(partial)
                    if size > self._room():
                        return None
                    partial.rename(path)
                finally:
                    _remove(partial)
        except OSError as error:
            if error.filename is not None and not str(error.filename).startswith(str(self._folder)):
                raise  # of what was read, not of the cache
            return None
        self._add(size)
        return path

    def block(self, key: str) -> bytes | None:
        """Return bytes that `keep_block` kept; None where it did not, or they were damaged since."""
        path = self._folder / key
        if not (self._is_usable and self._touched(path)):
            return None
        try:
            content = path.read_bytes()
        except OSError:  # swept away just now
            return None
        block, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
        if zlib.crc32(block).to_bytes(_CHECK_BYTES, "little") != check:
            _remove(path)
            return None
        return block

    def keep_block(self, key: str, block: bytes) -> None:
        """Keep bytes until others are used more recently."""
        if not self._is_usable or len(block) > self._limit // _SWEEPS:
            return
        partial = self._folder / f".{key}.{os.getpid()}.partial"
        try:
            with partial.open("wb") as file:
                file.write(block)
                file.write(zlib.crc32(block).to_bytes(_CHECK_BYTES, "little"))
            partial.rename(self._folder / key)
        except OSError:
            _remove(partial)
            return
        self._add(len(block))

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Keep others from making the same entry; the kernel drops the lock with the process."""
        number = int(key[:8], 16) % _LOCKS  # a fixed set of files, so that none has to be removed
        descriptor = os.open(self._folder / f".lock-{number}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: made twice, published once
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _touched(self, path: Path) -> bool:
        """Note that an entry is used; say whether it is there."""
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def _add(self, num_bytes: int) -> None:
        self._added += num_bytes
        if self._added > min(self._limit, self._room()) // _SWEEPS:
            self._sweep()
            self._added = 0

    def _room(self) -> int:
        """Return how many bytes may be kept beside what others have on this disk."""
        return min(self._limit, shutil.disk_usage(self._folder).free // 2)

    def _sweep(self) -> None:
        """Remove what was used least recently until the rest is within the limit."""
        entries = []
        with suppress(OSError), os.scandir(self._folder) as listed:
            for entry in listed:
                with suppress(OSError):
                    path = Path(entry.path)
                    is_ours = not entry.name.startswith(".") or not _is_made_now(path)
                    if is_ours and not entry.name.startswith(".lock-"):
                        entries.append((entry.stat().st_mtime_ns, _size_of(path), path))
        entries.sort()
        kept = sum(size for _, size, _ in entries)
        limit = min(self._limit, kept + self._room())
        for _, size, path in entries:
            is_left_behind = path.name.startswith(".")  # by a process that is no more
            if is_left_behind or (kept > limit and not _is_held(path)):
                _remove(path)
            else:
                continue
            kept -= size


_held: dict[Path, int] = {}


def hold(path: Path) -> None:
    """Keep an entry from being swept away as long as this process, or one forked from it, lives."""
    if path not in _held:
        descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[path] = descriptor


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _is_made_now(partial: Path) -> bool:
    """Whether the process that a partial entry names still runs; another user's cannot be ours."""
    number = partial.name.rsplit(".", 2)[-2]
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _is_own_folder(folder: Path) -> bool:
    """Make the folder; refuse one that others could write into, since what it holds is trusted."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        return status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK)
    except OSError:
        return False


def _size_of(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
