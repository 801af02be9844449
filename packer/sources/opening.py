"""From what a user types to files: folders, globs, lists and URLs; natural order; the format of each."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from packer.errors import ConfigError, SourceError
from packer.sources.arrow import ArrowPart
from packer.sources.dataset_object import DatasetObject, DatasetObjectPart, is_dataset_object
from packer.sources.delimited import SUFFIXES as DELIMITED_SUFFIXES
from packer.sources.delimited import DelimitedPart
from packer.sources.huggingface import refuse_mixed_cache, saved_files
from packer.sources.indexed import IndexedPart
from packer.sources.ipc_messages import FILE_MAGIC
from packer.sources.jsonl import JsonLinesPart
from packer.sources.lance_table import lance_table
from packer.sources.location import Location, from_user, natural_key
from packer.sources.mds import INDEX_NAME, mds_shards
from packer.sources.outputs import is_output, refuse_output, without_outputs
from packer.sources.parquet import ParquetPart
from packer.sources.part import Part
from packer.sources.source import Source
from packer.sources.text_part import COMPRESSIONS
from packer.sources.webdataset import WebDatasetPart

Given: TypeAlias = str | os.PathLike[str] | DatasetObject
"""A path or URL, or a ``datasets.Dataset``."""

_DATA_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".ipc", ".feather"),
    "indexed": (".idx",),
    "jsonl": tuple(f"{name}{packed}" for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst")),
    "csv": DELIMITED_SUFFIXES,
    "webdataset": (".tar",),
}
_JSON_SUFFIXES = (*_DATA_SUFFIXES["jsonl"], ".json", ".json.gz", ".json.zst")
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}", re.ASCII)
_STREAM_HEAD = b"\xff\xff\xff\xff"
_INDEX_HEAD = b"MMIDIDX"
_REPACK = "unpack it, or pack it with gzip or zstd"
_TO_PARQUET = "write its rows to Parquet, or measure it with packer.analyze_dataset"
_NEVER_OPENED = f"a pickle, which is never opened because it can run any code; {_TO_PARQUET}"


class _Unread(NamedTuple):
    """What packer does not read, and what can be done instead."""

    what: str
    magic: tuple[bytes, ...] = ()
    suffixes: tuple[str, ...] = ()


_UNREAD = (
    _Unread(
        "a packed archive, in which no sample can be read at random; unpack it to a .tar with gunzip, "
        "zstd -d, bunzip2 or xz -d",
        suffixes=(".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"),
    ),
    _Unread(
        "the pointer of Git LFS to the file, not the file itself; run `git lfs pull`",
        (b"version https://git-lfs",),
    ),
    _Unread(f"an archive of NumPy arrays; {_TO_PARQUET}", suffixes=(".npz",)),
    _Unread(
        "an array of NumPy, rows of one length without names; write them as a list column of Parquet, or "
        "measure them with packer.analyze_dataset",
        (b"\x93NUMPY",),
    ),
    _Unread(f"an Excel sheet; save it as CSV (UTF-8), or {_TO_PARQUET}", suffixes=(".xlsx", ".xls")),
    _Unread(
        _NEVER_OPENED,
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        (".pkl", ".pickle", ".pt", ".pth"),
    ),
    *(
        _Unread(f"packed by {name}, which packer does not read; {_REPACK}", (magic,))
        for magic, name in (
            (b"BZh", "bzip2"),
            (b"\xfd7zXZ\0", "xz"),
            (b"PK\x03\x04", "zip"),
            (b"\x04\x22\x4d\x18", "lz4"),
            (b"7z\xbc\xaf\x27\x1c", "7-Zip"),
        )
    ),
    _Unread(f"of HDF5; {_TO_PARQUET}, with h5py", (b"\x89HDF\r\n\x1a\n",), (".h5", ".hdf5")),
    _Unread(f"of TFRecord; {_TO_PARQUET}", suffixes=(".tfrecord", ".tfrecords", ".tfrecord.gz")),
    _Unread(f"of ORC; {_TO_PARQUET}, with pyarrow.orc", suffixes=(".orc",)),
    _Unread(f"of Avro; {_TO_PARQUET}, with fastavro", (b"Obj\x01",), (".avro",)),
    _Unread(f"a SQLite database; {_TO_PARQUET}, a query's rows", (b"SQLite format 3\0",)),
    _Unread("of Feather version 1; write it again by pyarrow.feather.write_feather", (b"FEA1",)),
    _Unread(f"of safetensors, which has no rows; {_TO_PARQUET}", suffixes=(".safetensors",)),
)


def open_source(paths: Given | Sequence[Given]) -> Source:
    """Open a data set: files, folders, glob patterns or fsspec URLs, or ``datasets.Dataset``; one or a list.

    A folder or a pattern gives its files in natural order of their names (``shard-2`` before ``shard-10``); a
    list keeps the order it has. Formats are told by content, not by name. Reads metadata only.

    Raises:
        ConfigError: what was given is no path, but a data set, say.
        SourceError: nothing there, nothing to read, or a damaged file; the message names it.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) or is_dataset_object(paths) else _listed(paths)
    if not listed:
        raise SourceError("no source was named; name a file, a folder or a pattern")
    parts = [part for given in listed for part in _open_given(given)]
    if all(part.known_num_rows == 0 for part in parts):
        named = ", ".join(part.location.path for part in parts) or listed[0]
        raise SourceError(f"{named}: the data set is empty; name one that has rows")
    return Source(parts)


def _listed(paths: Any) -> list[Given]:
    is_list = isinstance(paths, Sequence | Set | Iterator)  # a data set is iterable, too, and may be long
    listed = list(paths) if is_list else []
    are_odd = (p for p in listed if not (isinstance(p, str | os.PathLike) or is_dataset_object(p)))
    odd = next(are_odd, None) if is_list else paths
    if odd is not None:
        raise ConfigError(
            f"a {type(odd).__name__} is no path; name files, folders, patterns or URLs, or measure a data "
            "set in memory with packer.analyze_dataset(dataset, seqlens_fn, out=...)"
        )
    return listed


def _open_given(given: Given) -> list[Part]:
    if not isinstance(given, str | os.PathLike):
        return [DatasetObjectPart(given)]
    location = from_user(given)
    numbered = _numbered(location.path)
    if numbered is None or location.is_file():
        return _open_path(location)
    return [part for path in numbered for part in _open_path(Location(path))]


def _numbered(path: str) -> list[str] | None:
    """Return the paths that ``shard-{000..099}.tar`` stands for, as WebDataset writes it; None for others."""
    found = _RANGE.search(path)
    if found is None:
        return None
    first, last = int(found[1]), int(found[2])
    width = len(found[1]) if found[1].startswith("0") else 0
    named = [
        f"{path[: found.start()]}{number:0{width}}{path[found.end() :]}" for number in range(first, last + 1)
    ]
    return [each for name in named for each in _numbered(name) or [name]]


def _open_path(location: Location) -> list[Part]:
    if location.is_file():
        return [_open_file(location)]
    if (table := lance_table(location)) is not None:
        return [table]
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
            f"{folder.path} is a folder without data files ({_READ}); "
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
    head = location.read(0, 512)
    if head.startswith((b"PAR1", b"PARE")):
        return ParquetPart(location)
    if head.startswith((FILE_MAGIC, _STREAM_HEAD)):
        return ArrowPart(location)
    if head.startswith(_INDEX_HEAD):
        return IndexedPart(location)
    if location.name.endswith(".bin") and location.sibling(".idx").is_file():
        return IndexedPart(location.sibling(".idx"))
    if head[257:262] == b"ustar" or location.name.lower().endswith(".tar"):
        return WebDatasetPart(location)
    _refuse_unread(head, location)
    if location.name.lower().endswith(_JSON_SUFFIXES):
        return JsonLinesPart(location)
    if location.name.lower().endswith(DELIMITED_SUFFIXES):
        return DelimitedPart(location)
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
    raise SourceError(f"{location.path} is of no format that packer reads ({_READ}); {_CURE}")


_READ = "Parquet, Arrow, JSON Lines, CSV, TSV, WebDataset, Lance, .bin/.idx, MDS"
_CURE = (
    "convert it, measure it as it is with packer.analyze_dataset, or write its lengths into a file of these "
    "formats and name them with --length-column"
)


def _refuse_unread(head: bytes, location: Location) -> None:
    """Refuse what is known, and not read: by its first bytes, or by its name where it has none of its own."""
    name = location.name.lower()
    for unread in _UNREAD:
        if (unread.magic and head.startswith(unread.magic)) or name.endswith(unread.suffixes):
            raise SourceError(f"{location.path} is {unread.what}")
