"""Where shards are published: a folder, by rename, or an object store, where ``shards.json`` comes last."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from packer.errors import PackerError, TargetExistsError, TargetWriteError
from packer.publish import exclusive_lock, published_directory
from packer.shards.format import HEADER_FILE, is_shards
from packer.sources.location import Location, from_user
from packer.sources.remote import file_system

_OURS = re.compile(r"shard-\d{5,}\.arrow|batches\.bin")


class Target(Protocol):
    """A place for shards, and a folder of this machine in which they are made."""

    folder: Path

    def publish(self, name: str) -> None:
        """Bring a finished file of the folder to its place."""

    def finish(self, names: list[str]) -> None:
        """Make the whole visible; ``names`` are all its files."""


@contextmanager
def opened_target(
    out: str | os.PathLike[str], *, overwrite: bool, scratch: str | os.PathLike[str] | None
) -> Iterator[Target]:
    """Open a target; what an interrupted run of the same target left is found in its folder.

    Raises:
        TargetExistsError: there is something already, and it may not be replaced.
        TargetBusyError: another process is writing the same target.
        TargetWriteError: no room, no permission, or a store that cannot be reached.
    """
    location = from_user(out)
    if location.is_remote:
        with _opened_store(location, overwrite=overwrite, scratch=scratch) as store:
            yield store
        return
    with published_directory(
        location.path, marker=HEADER_FILE, overwrite=overwrite, keep_partial=True
    ) as folder:
        yield _Folder(folder)


class _Folder:
    """A folder that gets its name when all is there; files are made where they stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, name: str) -> None:
        """Nothing to do: it becomes visible with the folder."""

    def finish(self, names: list[str]) -> None:
        """Leave nothing but the files themselves."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in names:
                path.unlink()


class _Store:
    """A folder of an object store: files are made on this machine and copied, the header last."""

    def __init__(self, location: Location, folder: Path, filesystem: Any, root: str) -> None:
        self.folder = folder
        self._location = location
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def publish(self, name: str) -> None:
        """Copy a file; before the first one the old header goes, or it would be taken for that of the new."""
        with writing(self._location):
            if name != HEADER_FILE and self._filesystem.exists(f"{self._root}/{HEADER_FILE}"):
                self._filesystem.rm_file(f"{self._root}/{HEADER_FILE}")
            self._filesystem.put_file(str(self.folder / name), f"{self._root}/{name}")

    def finish(self, names: list[str]) -> None:
        """Copy what is small, the header last, and remove what another set of shards has left."""
        with writing(self._location):
            listed = self._filesystem.find(self._root)
        old = {str(path).rsplit("/", 1)[-1] for path in listed} - set(names)
        for name in sorted(filter(_OURS.fullmatch, old)):
            with writing(self._location):
                self._filesystem.rm_file(f"{self._root}/{name}")
        self.publish(HEADER_FILE)
        shutil.rmtree(self.folder)


@contextmanager
def _opened_store(
    location: Location, *, overwrite: bool, scratch: str | os.PathLike[str] | None
) -> Iterator[_Store]:
    filesystem, root = file_system(location.path)
    with writing(location):
        listed = filesystem.find(root) if filesystem.exists(root) else []
    names = [str(path).rsplit("/", 1)[-1] for path in listed]
    # Files of ours without a header are what an interrupted run has copied: nobody reads them.
    is_taken = HEADER_FILE in names or not all(map(_OURS.fullmatch, names))
    if is_taken and not overwrite:
        raise TargetExistsError(f"{location.path} exists already; choose another --out or add --overwrite")
    if is_taken and not is_shards(location):
        raise TargetExistsError(
            f"{location.path} holds no {HEADER_FILE}, so it is not what --overwrite may replace; choose "
            "another --out"
        )
    name = f"packer-shards-{hashlib.sha256(location.path.encode()).hexdigest()[:16]}"
    folder = Path(scratch or tempfile.gettempdir()).absolute() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder):
            folder.mkdir(exist_ok=True)
            yield _Store(location, folder, filesystem, root)
    except OSError as error:
        if isinstance(error, PackerError):
            raise
        raise TargetWriteError(
            f"cannot write below {folder.parent}: {error.strerror or error}; choose another --scratch"
        ) from error


@contextmanager
def writing(location: Location) -> Iterator[None]:
    """Turn whatever a client of an object store raises into one error that names the place."""
    try:
        yield
    except PackerError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise TargetWriteError(
            f"cannot write {location.path}: {text[0] if text else type(error).__name__}; nothing was "
            "published, run again to go on"
        ) from error
