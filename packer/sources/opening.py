"""From what a user types to files: folders, globs, lists and URLs; natural order; the format of each."""

import os
from collections.abc import Callable, Sequence

from packer.errors import SourceError
from packer.sources.location import Location, from_user, natural_key, reading
from packer.sources.parquet import ParquetPart
from packer.sources.part import Part
from packer.sources.source import Source

PathLike = str | os.PathLike[str]


def open_source(paths: PathLike | Sequence[PathLike]) -> Source:
    """Open a data set: files, folders, glob patterns or fsspec URLs, alone or in a list.

    A folder or a pattern gives its files in natural order of their names (``shard-2`` before ``shard-10``); a
    list keeps the order it has. Formats are told by their content. Reads metadata only.

    Raises:
        SourceError: nothing there, nothing readable, or a damaged file; the message names it.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise SourceError("no source was named; name a file, a folder or a pattern")
    parts = [part for path in listed for part in _open_path(from_user(path))]
    return Source(parts)


def _open_path(location: Location) -> list[Part]:
    if location.is_file():
        return [_open_file(location)]
    if location.is_dir():
        files = sorted(location.walk(), key=lambda file: natural_key(file.path))
        if not files:
            raise SourceError(f"{location.path} is a folder without data files; name another")
        return [_open_file(file) for file in files]
    matches = location.expanded() if any(sign in location.path for sign in "*?[") else []
    if not matches:
        raise SourceError(f"{location.path}: no such file or directory; check the path")
    return [
        part
        for match in sorted(matches, key=lambda match: natural_key(match.path))
        for part in _open_path(match)
    ]


def _open_file(location: Location) -> Part:
    with reading(location):
        head = location.read(0, 16)
    for magic, opener in _MAGIC.items():
        if head.startswith(magic):
            return opener(location)
    raise SourceError(f"{location.path} is of no format that packer reads; name a Parquet file")


_MAGIC: dict[bytes, Callable[[Location], Part]] = {b"PAR1": ParquetPart}
