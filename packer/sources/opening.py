"""From what a user types to files: folders, globs, lists and URLs; natural order; the format of each."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence, Set

from packer.errors import ConfigError, SourceError
from packer.sources.arrow import ArrowPart
from packer.sources.huggingface import refuse_mixed_cache, saved_files
from packer.sources.indexed import IndexedPart
from packer.sources.ipc_messages import FILE_MAGIC
from packer.sources.jsonl import COMPRESSIONS, JsonLinesPart
from packer.sources.location import Location, from_user, natural_key
from packer.sources.mds import INDEX_NAME, mds_shards
from packer.sources.outputs import is_output, refuse_output, without_outputs
from packer.sources.parquet import ParquetPart
from packer.sources.part import Part
from packer.sources.source import Source

PathLike = str | os.PathLike[str]

_DATA_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".ipc", ".feather"),
    "indexed": (".idx",),
    "jsonl": tuple(f"{name}{packed}" for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst")),
}
_JSON_SUFFIXES = (*_DATA_SUFFIXES["jsonl"], ".json", ".json.gz", ".json.zst")
_STREAM_HEAD = b"\xff\xff\xff\xff"
_INDEX_HEAD = b"MMIDIDX"
_OTHER_COMPRESSIONS = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
}
_LFS_POINTER = b"version https://git-lfs"


def open_source(paths: PathLike | Sequence[PathLike]) -> Source:
    """Open a data set: files, folders, glob patterns or fsspec URLs, alone or in a list.

    A folder or a pattern gives its files in natural order of their names (``shard-2`` before ``shard-10``); a
    list keeps the order it has. Formats are told by content, not by name. Reads metadata only.

    Raises:
        ConfigError: what was given is no path, but a data set, say.
        SourceError: nothing there, nothing to read, or a damaged file; the message names it.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else _listed(paths)
    if not listed:
        raise SourceError("no source was named; name a file, a folder or a pattern")
    parts = [part for path in listed for part in _open_path(from_user(path))]
    if all(part.known_num_rows == 0 for part in parts):
        raise SourceError(
            f"{', '.join(os.fspath(path) for path in listed)}: the data set is empty; name one that has rows"
        )
    return Source(parts)


def _listed(paths: Sequence[PathLike]) -> list[PathLike]:
    is_list = isinstance(paths, Sequence | Set | Iterator)  # a data set is iterable, too, and may be long
    listed = list(paths) if is_list else []
    odd = paths if not is_list else next((p for p in listed if not isinstance(p, str | os.PathLike)), None)
    if odd is not None:
        raise ConfigError(
            f"a {type(odd).__name__} is no path; name files, folders, patterns or URLs, or measure a data "
            "set in memory with packer.analyze_dataset(dataset, seqlens_fn, out=...)"
        )
    return listed


def _open_path(location: Location) -> list[Part]:
    if location.is_file():
        return [_open_file(location)]
    if location.is_dir():
        return _open_folder(location)
    prefixed = Location(f"{location.path}.idx")
    if prefixed.is_file():  # a .bin/.idx pair, named as Megatron names it
        return [IndexedPart(prefixed)]
    is_pattern = any(sign in location.path for sign in "*?[")
    matches = location.expanded() if is_pattern else []
    matches = without_outputs(matches, location)
    if not matches:
        problem = "the pattern matches no data" if is_pattern else "no such file or directory"
        raise SourceError(f"{location.path}: {problem}; check the path")
    named = {match.path.rstrip("/") for match in matches}
    folders = {path.rsplit("/", 1)[0] for path in named}
    return [
        part
        for match in sorted(matches, key=lambda match: natural_key(match.path))
        if match.path.rstrip("/") not in folders  # its files are matches themselves
        and not (match.name.endswith(".bin") and match.sibling(".idx").path in named)  # one pair, one part
        and not (match.is_dir() and is_output(match))
        for part in _open_path(match)
    ]


def _open_folder(folder: Location) -> list[Part]:
    saved = saved_files(folder)
    if saved is not None:
        return [_open_file(file) for file in saved]
    shards = mds_shards(folder)
    if shards is not None:
        return list(shards)
    refuse_output(folder)
    found = without_outputs(list(folder.walk()), folder)
    files = sorted((file for file in found if _format_by_name(file)), key=lambda file: natural_key(file.path))
    if not files:
        nested = sorted(
            (file for file in found if file.name == INDEX_NAME), key=lambda file: natural_key(file.path)
        )
        shards = [shard for index in nested for shard in mds_shards(index.folder()) or []]
        if shards:
            return list(shards)
        raise SourceError(
            f"{folder.path} is a folder without data files (Parquet, Arrow, JSON Lines, .bin/.idx, MDS); "
            "name another, or name files of other suffixes by a pattern"
        )
    formats = Counter(_format_by_name(file) for file in files)
    if len(formats) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in formats.items())
        raise SourceError(f"{folder.path} holds files of several formats ({counts}); name some by a pattern")
    refuse_mixed_cache(folder, files)
    return [_open_file(file) for file in files]


def _format_by_name(file: Location) -> str | None:
    for name, suffixes in _DATA_SUFFIXES.items():
        if file.name.lower().endswith(suffixes):
            return name
    return None


def _open_file(location: Location) -> Part:
    head = location.read(0, 64)
    if head.startswith((b"PAR1", b"PARE")):
        return ParquetPart(location)
    if head.startswith((FILE_MAGIC, _STREAM_HEAD)):
        return ArrowPart(location)
    if head.startswith(_INDEX_HEAD):
        return IndexedPart(location)
    if location.name.endswith(".bin") and location.sibling(".idx").is_file():
        return IndexedPart(location.sibling(".idx"))
    _refuse_stand_ins(head, location)
    if location.name.lower().endswith(_JSON_SUFFIXES):
        return JsonLinesPart(location)
    if head.startswith(tuple(COMPRESSIONS)):
        try:
            return JsonLinesPart(location)
        except SourceError as error:  # a name that promises nothing else
            raise SourceError(f"{error}. Of compressed files, packer reads JSON Lines; {_CURE}") from error
    by_name = _format_by_name(location)
    if by_name == "arrow" and head:
        return ArrowPart(location)  # a stream from before Arrow 0.15 begins with a size
    if by_name is not None:
        raise SourceError(f"{location.path} is no {by_name} file; it is damaged or misnamed, fetch it again")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return JsonLinesPart(location)
    raise SourceError(
        f"{location.path} is of no format that packer reads (Parquet, Arrow IPC, JSON Lines, .bin/.idx, "
        f"MDS); {_CURE}"
    )


_CURE = (
    "convert it, measure it as it is with packer.analyze_dataset, or write its lengths into a file of these "
    "formats and name them with --length-column"
)


def _refuse_stand_ins(head: bytes, location: Location) -> None:
    """Refuse what stands where data should be, by its first bytes: the name says nothing of it."""
    packed = next((name for magic, name in _OTHER_COMPRESSIONS.items() if head.startswith(magic)), None)
    if packed is not None:
        raise SourceError(
            f"{location.path} is packed by {packed}, which packer does not read; unpack it, or pack it with "
            "gzip or zstd"
        )
    if head.startswith(_LFS_POINTER):
        raise SourceError(
            f"{location.path} is the pointer of Git LFS to the file, not the file itself; run `git lfs pull`"
        )
