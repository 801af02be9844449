"""Where a file lives: on this machine or, as ``protocol://path``, wherever fsspec reaches."""

import errno
import glob
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

import pyarrow as pa

from packer.errors import PackerError, SourceError
from packer.sources.remote import (
    Range,
    RemoteFile,
    attempted,
    content_key,
    fetch,
    file_system,
    first_line,
    info,
    is_passing,
)
from packer.wording import TOO_MANY_FILES

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z][A-Za-z0-9+.-]+)*://")  # one letter would be a drive

READ_AHEAD_BYTES = 4 << 20
"""Of a remote file that is read in order; one request takes some 20 ms, however much it brings."""


@dataclass(frozen=True, slots=True)
class Location:
    """A file or folder by its path or URL; holds no handle, so it pickles."""

    path: str

    @property
    def is_remote(self) -> bool:
        """Whether fsspec has to fetch it; ``file://`` URLs were turned into paths before."""
        return _URL.match(self.path) is not None

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def folder(self) -> "Location":
        """Return the folder that this file is in."""
        return Location(self.path.rsplit("/", 1)[0])

    def joined(self, relative: str) -> "Location":
        """Return a file inside this folder; a name that leads out of the folder is refused."""
        parts = relative.replace("\\", "/").split("/")
        if relative.startswith("/") or ".." in parts or "" in parts or ":" in parts[0] or "\0" in relative:
            raise SourceError(f"{self.path} names a file outside its own folder ({relative!r}); refused")
        return Location(f"{self.path.rstrip('/')}/{relative}")

    def sibling(self, suffix: str) -> "Location":
        """Return the file of the same name with another suffix (``.bin`` beside ``.idx``)."""
        return Location(self.path.rsplit(".", 1)[0] + suffix)

    def is_file(self) -> bool:
        """Whether there is such a file."""
        with reading(self):
            if not self.is_remote:
                return os.path.isfile(self.path)
            try:
                return bool(info(self.path)["type"] == "file")
            except (FileNotFoundError, NotADirectoryError):
                return False

    def is_dir(self) -> bool:
        """Whether there is such a folder."""
        with reading(self):
            if self.is_remote:
                fs, path = file_system(self.path)
                return bool(attempted(lambda: fs.isdir(path)))
            return os.path.isdir(self.path)

    def size(self) -> int:
        """Return the number of bytes."""
        with reading(self):
            if not self.is_remote:
                return os.path.getsize(self.path)
            size = info(self.path)["size"]
            if size is None:
                raise SourceError(
                    f"{self.path}: its server does not say how long it is; name a copy on this machine"
                )
            return int(size)

    def content_key(self) -> str | None:
        """Return what tells the content of a file from any other; None where a server says nothing of it."""
        with reading(self):
            if self.is_remote:
                return content_key(self.path, info(self.path))
            status = os.stat(self.path)
            facts = {
                name: getattr(status, f"st_{name}") for name in ("dev", "ino", "size", "mtime_ns", "ctime_ns")
            }
            return content_key(os.path.realpath(self.path), facts)

    def open(self) -> BinaryIO:
        """Open for reading in order, of a remote file some MiB at a time; the caller closes it."""
        with reading(self):
            if self.is_remote:
                return io.BufferedReader(RemoteFile(self.path, self.size()), READ_AHEAD_BYTES)
            return open(self.path, "rb", buffering=0)

    def open_exactly(self) -> BinaryIO:
        """Open for reading here and there: of a remote file, no byte but those asked for."""
        with reading(self):
            if self.is_remote:
                return cast(BinaryIO, RemoteFile(self.path, self.size()))
            return open(self.path, "rb", buffering=0)

    def open_arrow(self, *, mapped: bool = False) -> pa.NativeFile:
        """Open as an Arrow file for reading here and there; ``mapped`` maps a local file into memory."""
        with reading(self):
            if self.is_remote:
                return pa.PythonFile(self.open_exactly(), mode="r")
            return pa.memory_map(self.path) if mapped else pa.OSFile(self.path)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes in ``[start, stop)``, fewer where the file ends."""
        with self.open_exactly() as file, reading(self):
            file.seek(start)
            pieces = []
            while start < stop and (piece := file.read(stop - start)):
                pieces.append(piece)
                start += len(piece)
            return b"".join(pieces)

    def fetch(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return ranges of a remote file that lie within it, asked for at once.

        Raises:
            SourceError: the file ends before, or cannot be reached.
        """
        with reading(self):
            return fetch(self.path, ranges)

    def walk(self) -> Iterator["Location"]:
        """Yield every file below this folder, hidden ones and those in hidden folders left out."""
        with reading(self):
            if self.is_remote:
                fs, path = file_system(self.path)
                root = fs._strip_protocol(path).rstrip("/")
                found = [file[len(root) :].lstrip("/") for file in attempted(lambda: fs.find(root))]
            else:
                found = [os.path.relpath(path, self.path) for path in _walk_local(self.path)]
        for relative in found:
            if not any(part[0] in "._" for part in relative.split("/")):
                yield Location(f"{self.path.rstrip('/')}/{relative}")

    def expanded(self) -> list["Location"]:
        """Return what a glob pattern matches, in no particular order."""
        with reading(self):
            if self.is_remote:
                fs, path = file_system(self.path)
                return [Location(fs.unstrip_protocol(match)) for match in attempted(lambda: fs.glob(path))]
            return [Location(match) for match in glob.glob(self.path, recursive=True)]


def from_user(path: str | os.PathLike[str]) -> Location:
    """Return the location of a path or URL as a user typed it."""
    text = os.fspath(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return Location(text)


def _walk_local(root: str) -> Iterator[str]:
    """Yield every file below a folder; linked folders are entered, each once."""
    entered = {os.path.realpath(root)}

    def raise_it(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=raise_it):
        yield from (os.path.join(folder, name) for name in names)
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in subfolders}
        subfolders[:] = [name for name in subfolders if real[name] not in entered]
        entered.update(real.values())


def edge_hash(location: Location, size: int) -> str:
    """Return the SHA-256 of the first and last MiB of a file, of the whole file where that is shorter."""
    edge = 1 << 20
    digest = hashlib.sha256(location.read(0, min(size, edge)))
    digest.update(location.read(max(size - edge, edge), size))
    return digest.hexdigest()


def file_hash(location: Location) -> str:
    """Return the SHA-256 of a whole file."""
    digest = hashlib.sha256()
    with location.open() as file, reading(location):
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts ``shard-2`` before ``shard-10``, the same on every machine and in every locale."""
    return [
        (0, int(piece), piece) if piece.isdecimal() and piece.isascii() else (1, 0, piece)
        for piece in re.split(r"([0-9]+)", name)
        if piece
    ]


@contextmanager
def reading(
    location: Location, where: str = "", cure: str = "check the file, or fetch it again"
) -> Iterator[None]:
    """Turn whatever a reader raises on damaged or missing data into one `SourceError` that names the file.

    Args:
        location: the file being read.
        where: the place in it, such as ``"row group 3"``.
        cure: what the user can do.
    """
    place = f"{location.path}, {where}" if where else location.path
    try:
        yield
    except PackerError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"{place}: no such file or directory; check the path") from error
    except PermissionError as error:
        raise SourceError(f"{place}: permission denied; make it readable for this user") from error
    except MemoryError as error:
        raise SourceError(f"{place}: needs more memory than there is; {cure}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise SourceError(f"{place}: {TOO_MANY_FILES}") from error
        # A file system of fsspec raises what its client raises; here, only what damaged data cause is meant.
        if not (location.is_remote or isinstance(error, _DATA_ERRORS)):
            raise
        if location.is_remote and is_passing(error):
            raise SourceError(
                f"{place}: cannot be reached ({first_line(error)}); check the network, or name a copy on "
                "this machine"
            ) from error
        raise SourceError(f"{place}: cannot be read ({first_line(error)}); {cure}") from error


_DATA_ERRORS = (OSError, EOFError, pa.ArrowException, ValueError, OverflowError, RecursionError)
