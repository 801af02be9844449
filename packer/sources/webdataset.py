"""WebDataset: a tar archive whose members of one key are a sample; an index of its samples gives any of them.

A name is cut at the first dot behind its folders: before it stands the key, behind it the column. Members of
one key stand together. An index holds where samples begin, so that one is read at random by its bytes alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import SourceError
from packer.sources.cache import BatchCache
from packer.sources.columns import find_field, split_path
from packer.sources.delimited_rows import lists_of_json
from packer.sources.json_rows import LineError, parse_lines, parse_object
from packer.sources.jsonl import key_fields, merge_keys
from packer.sources.location import Location, edge_hash, reading
from packer.sources.npy import decode_npy, lists_of_arrays
from packer.sources.part import BATCH_BYTES, Columns, OnError, Part, Unit, cut_rows
from packer.sources.skipped import among_skipped
from packer.sources.tar_members import Member, tar_members

KEY_COLUMN = "__key__"

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_TEXTS = frozenset({"txt", "text", "transcript", KEY_COLUMN})
_INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_PICKLES = frozenset({"pyd", "pickle", "pkl", "pth", "pt"})
_JSON = frozenset({"json", "jsn"})
_INTEGER = re.compile(rb"[+-]?[0-9]+", re.ASCII)
_HEAD_SAMPLES = 32
_HEAD_BYTES = 16 << 20
_BATCH_SAMPLES = 4096
_READ_BYTES = 16 << 10
_WHOLE_SAMPLE_BYTES = 1 << 20  # up to here one read of a sample beats one of each member


class _Sample(NamedTuple):
    key: str
    start: int
    """Byte at which it begins."""
    members: dict[str, Member]
    """By column."""


class _Place(NamedTuple):
    """Where the values of a column are."""

    member: str
    path: tuple[str, ...] = ()
    """Keys in the member, which is JSON; none for the whole member."""


class WebDatasetPart(Part):
    """One archive. A column is named by its members' extension, or by a key of a JSON member.

    A key of JSON whose name is that of a member's extension, or of a key in another JSON member, is named by
    its path: ``json.text``.
    """

    format = "webdataset"

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._num_bytes = location.size()
        self._on_error: OnError = "error"
        self._is_empty = True
        self._read_head()  # finds a file that is no archive now, not in the middle of a run

    def _read_head(self) -> None:
        """Learn the columns from the first samples."""
        types: dict[str, pa.DataType] = {KEY_COLUMN: pa.string()}
        trees: dict[str, dict[str, Any]] = {}
        read_at = _Window(self._file, self.location)
        for number, sample in enumerate(self._samples(read_at, 0, self._num_bytes)):
            self._is_empty = False
            if number and (number >= _HEAD_SAMPLES or sample.start > _HEAD_BYTES):
                break
            for column, member in sample.members.items():
                types.setdefault(column, _type_of(column))
                if _kind(column) in _JSON:
                    try:
                        content = parse_object(read_at(member.start, member.size), number)
                    except LineError:
                        continue  # no object, or a damaged one: that is found when it is read
                    merge_keys(trees.setdefault(column, {}), content)
        types |= {column: pa.struct(key_fields(tree)) for column, tree in trees.items() if tree}
        keys = [(field, column) for column, tree in trees.items() for field in key_fields(tree)]
        names = [field.name for field, _ in keys]
        free = [
            (field, owner)
            for field, owner in keys
            if field.name not in types and names.count(field.name) == 1
        ]
        try:
            self._schema = pa.schema([*types.items(), *(field for field, _ in free)])
        except UnicodeEncodeError as error:
            raise SourceError(
                f"{self.location.path}: a member or key is named {error.object!r}, which is not UTF-8; "
                "rename it"
            ) from error
        self._owners = {field.name: owner for field, owner in free}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("location", "_num_bytes", "_on_error", "_is_empty", "_schema", "_owners")
        return {name: self.__dict__[name] for name in kept}

    def tolerating(self, on_error: OnError) -> "WebDatasetPart":
        """Return the archive as it is to be read."""
        if on_error == self._on_error:
            return self
        other = copy(self)
        other.__dict__ |= self.__dict__ | {"_on_error": on_error}  # with the index, which may be costly
        return other

    @property
    def schema(self) -> pa.Schema:
        """The columns of the first samples; null types where only reading tells."""
        return self._schema

    @property
    def num_rows(self) -> int:
        """Number of samples; reads all headers once, and keeps the index that comes of it."""
        return len(self._edges) - 1

    @property
    def known_num_rows(self) -> int | None:
        """None: only reading tells; or 0, which the beginning tells."""
        return 0 if self._is_empty else None

    def identity(self) -> dict[str, Any]:
        """Return size and hash of the first and last MiB."""
        return {"num_bytes": self._num_bytes, "sha256": edge_hash(self.location, self._num_bytes)}

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut between samples."""
        return [] if self._is_empty else cut_rows(part, self._edges, target_bytes)

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Read the members of the columns asked for, and pass over the others."""
        places = self._places(columns)
        read_at = _Window(self._file, self.location)
        row = unit.first_row or 0
        held: list[dict[str, bytes | None]] = []
        num_bytes = 0
        for sample in self._samples(read_at, unit.start, unit.stop):
            held.append(self._contents(sample, places, read_at))
            num_bytes += sum(len(content or b"") for content in held[-1].values())
            if num_bytes >= BATCH_BYTES or len(held) == _BATCH_SAMPLES:
                yield self._parse(held, columns, places, range(row, row + len(held)))
                row, held, num_bytes = row + len(held), [], 0
        if held:
            yield self._parse(held, columns, places, range(row, row + len(held)))

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Read single samples, each by its bytes in the archive."""
        places = self._places(columns)
        batches = []
        for row in rows.tolist():
            start, stop = self._edges[row : row + 2].tolist()
            read_at = _Window(self._file, self.location, stop - start)
            sample = next(self._samples(read_at, start, stop), None)
            if sample is None:
                raise SourceError(f"{self.location.path} changed while it was read; run again")
            batches.append(self._parse([self._contents(sample, places, read_at)], columns, places, [row]))
        return batches

    def close(self) -> None:
        """Close the archive; the index stays."""
        self.__dict__.pop("_file", None)

    @cached_property
    def _file(self) -> pa.NativeFile:
        return self.location.open_arrow()

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """(rows + 1,) byte at which each sample begins, and the one after the last."""
        edges = np.fromiter(
            (
                edge
                for sample in self._samples(_Window(self._file, self.location), 0, self._num_bytes)
                for edge in (sample.start, max(member.end for member in sample.members.values()))
            ),
            np.int64,
        )
        return np.append(edges[::2], edges[-1:])

    def _samples(self, read_at: "_Window", start: int, stop: int) -> Iterator[_Sample]:
        """Yield the samples that begin in ``[start, stop)``, where another does at ``stop``."""
        sample: _Sample | None = None
        members = tar_members(read_at, start, stop, num_bytes=self._num_bytes, owner=self.location.path)
        for member in members:
            split = _NAME.fullmatch(member.name)
            if split is None or _META.match(member.name):
                continue  # of no sample: what WebDataset passes over, too
            key, column = split[1], split[2].lower()
            if sample is None or key != sample.key:
                if sample is not None:
                    yield sample
                sample = _Sample(key, member.header, {})
            if column in sample.members:
                raise SourceError(
                    f"{self.location.path}: sample {key!r} has two members .{column}; rename or remove one"
                )
            sample.members[column] = member
        if sample is not None:
            yield sample

    def _places(self, columns: Columns) -> dict[str, _Place]:
        places = {}
        for column in columns:
            find_field(self.schema, column, owner=self.location.path)
            first, *path = split_path(self.schema, column) or [column]
            owner = self._owners.get(first)
            places[column] = _Place(first, tuple(path)) if owner is None else _Place(owner, (first, *path))
        return places

    def _contents(
        self, sample: _Sample, places: Mapping[str, _Place], read_at: "_Window"
    ) -> dict[str, bytes | None]:
        """Read the members that the columns are in; None for one that the sample lacks."""
        contents: dict[str, bytes | None] = {}
        for column in {place.member for place in places.values()}:
            member = sample.members.get(column)
            contents[column] = None if member is None else read_at(member.start, member.size)
        if KEY_COLUMN in contents:
            contents[KEY_COLUMN] = sample.key.encode(errors="surrogateescape")
        return contents

    def _parse(
        self,
        samples: Sequence[Mapping[str, bytes | None]],
        columns: Columns,
        places: Mapping[str, _Place],
        numbers: Sequence[int],
    ) -> pa.RecordBatch:
        try:
            return _batch(samples, columns, places, self._on_error)
        except LineError as error:
            if self._on_error != "skip":
                raise SourceError(f"{self.location.path}, row {numbers[error.row]}: {error}") from error
        refused = [row for row, sample in enumerate(samples) if not _is_row(sample, columns, places)]
        kept = [sample for row, sample in enumerate(samples) if row not in set(refused)]
        return among_skipped(_batch(kept, columns, places, "error"), refused)


class _Window:
    """Reads of an archive that are near each other, some KiB at once."""

    def __init__(self, file: pa.NativeFile, location: Location, sample_bytes: int | None = None) -> None:
        """Begin with nothing read.

        Args:
            file: the archive.
            location: of the file, for messages.
            sample_bytes: size of the one sample that is read; a small one is read at once.
        """
        is_small = sample_bytes is not None and sample_bytes <= _WHOLE_SAMPLE_BYTES
        self._least = sample_bytes if sample_bytes is not None and is_small else _READ_BYTES
        self._file, self._location = file, location
        self._start, self._held = 0, b""

    def __call__(self, at: int, size: int) -> bytes:
        if not self._start <= at <= at + size <= self._start + len(self._held):
            with reading(self._location, f"byte {at}"):
                self._held = self._file.read_at(max(size, self._least), at)
            self._start = at
        return self._held[at - self._start : at - self._start + size]


def _batch(
    samples: Sequence[Mapping[str, bytes | None]],
    columns: Columns,
    places: Mapping[str, _Place],
    on_error: OnError,
) -> pa.RecordBatch:
    """Parse the members of samples.

    Raises:
        LineError: one is not what its column is to hold.
    """
    arrays: dict[str, pa.Array] = {}
    for owner in {place.member for place in places.values() if place.path}:
        within = {
            column: list(place.path)
            for column, place in places.items()
            if place.path and place.member == owner
        }
        lines = [b"{}" if (content := sample[owner]) is None else content for sample in samples]
        parsed = parse_lines(
            lines,
            within,
            {column: columns[column] for column in within},
            "replace" if on_error == "replace" else "error",
        )
        arrays |= {column: parsed.column(column) for column in within}
    for column, place in places.items():
        if not place.path:
            contents = [sample[place.member] for sample in samples]
            arrays[column] = _whole(contents, column, _kind(place.member), columns[column])
    return pa.RecordBatch.from_arrays([arrays[column] for column in columns], names=list(columns))


def _is_row(sample: Mapping[str, bytes | None], columns: Columns, places: Mapping[str, _Place]) -> bool:
    try:
        _batch([sample], columns, places, "error")
    except LineError:
        return False
    return True


def _whole(
    contents: Sequence[bytes | None], column: str, kind: str, data_type: pa.DataType | None
) -> pa.Array:
    """Return whole members as a column: of the type asked for, else of the one that their extension says."""
    if kind == "npy":
        return lists_of_arrays(_arrays(contents, column))
    if data_type is None:
        data_type = _type_of(kind)
        if pa.types.is_null(data_type):
            data_type = pa.string() if kind in _JSON else pa.binary()
    if pa.types.is_binary(data_type):
        return pa.array(contents, pa.binary())
    if pa.types.is_integer(data_type):
        return pa.array([_integer(content, row, column) for row, content in enumerate(contents)], data_type)
    texts = pa.array([_text(content, row, column) for row, content in enumerate(contents)], pa.large_string())
    return lists_of_json(texts, column, data_type) if pa.types.is_list(data_type) else texts


def _arrays(contents: Sequence[bytes | None], column: str) -> list[NDArray[Any] | None]:
    """Return arrays that differ in their first axis only."""
    arrays: list[NDArray[Any] | None] = []
    expected: tuple[int, ...] | None = None
    for row, content in enumerate(contents):
        try:
            arrays.append(None if content is None else decode_npy(content))
        except ValueError as error:
            raise LineError(row, f"column {column!r}: {error}; correct the member") from error
        if (array := arrays[-1]) is None:
            continue
        if expected not in (None, array.shape[1:]):
            raise LineError(
                row,
                f"column {column!r} has the shape {array.shape}, and those before it {expected} behind the "
                "first axis; make them equal",
            )
        expected = array.shape[1:]
    return arrays


def _integer(content: bytes | None, row: int, column: str) -> int | None:
    if content is None:
        return None
    digits = content.strip()
    if not _INTEGER.fullmatch(digits) or not -(1 << 63) <= int(digits) < 1 << 63:
        raise LineError(
            row,
            f"column {column!r} holds {content[:20]!r} where an integer was expected; correct the member or "
            "name another column",
        )
    return int(digits)


def _text(content: bytes | None, row: int, column: str) -> str | None:
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise LineError(
            row, f"column {column!r} is no UTF-8 text ({error.reason}); name another column, or convert it"
        ) from error


def _kind(column: str) -> str:
    """Return the last part of an extension: ``json`` of ``meta.json``."""
    return column.rpartition(".")[2]


def _type_of(column: str) -> pa.DataType:
    """Return the type that an extension says; null where only reading tells."""
    kind = _kind(column)
    if kind in _TEXTS:
        return pa.string()
    if kind in _INTEGERS:
        return pa.int64()
    return pa.binary() if kind in _PICKLES else pa.null()
