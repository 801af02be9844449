"""What goes into the shards: the columns, and rows of a data set turned into them, unit by unit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_arrow, to_numpy
from packer.errors import ColumnError, ConfigError, SourceError
from packer.samples import Dataset, Encoded, LengthDefinition, encode, measure
from packer.samples.dataset import INPUT_IDS, LABELS
from packer.samples.measure import IGNORED_LABEL
from packer.samples.ragged import RowError, is_list_type
from packer.samples.tolerance import apply_to_readable
from packer.shards.format import OWN_COLUMNS, SAMPLE_ID, START, Fields, tokens_type
from packer.shards.picking import is_list_of_numbers, plain_lists
from packer.sources import Source, Unit, find_field, storage_type, take_column

POSITION_IDS = "position_ids"
UNIT_BYTES = 64 << 20

_IDS = tokens_type(pa.int32())


class Made(NamedTuple):
    """A column that is not shuffled, but made of another one when it is written."""

    name: str
    of: str
    """The column of the token ids."""
    is_position: bool
    """It counts the tokens of a row from 0; else it holds the ids themselves, as labels."""


@dataclass(frozen=True, kw_only=True)
class ShardColumns:
    """The columns of a shard, those that training reads first."""

    fields: Fields
    """What a sample delivers, and the column that holds it."""
    read: pa.Schema
    """What training reads, beside ``sample_id`` and ``start``."""
    made: tuple[Made, ...]
    kept: pa.Schema
    """Further columns of the source."""
    counts_tokens: bool
    """Each column of ``read`` has one number for each token of the plan."""

    @cached_property
    def shuffled(self) -> pa.Schema:
        """What is read from the source and brought into the plan's order."""
        return pa.schema([*self.read, *self.kept])

    @cached_property
    def written(self) -> pa.Schema:
        """The schema of a shard."""
        own = [pa.field(SAMPLE_ID, pa.int64(), False), pa.field(START, pa.int32(), False)]
        made = [
            pa.field(column.name, _IDS if column.is_position else self.read.field(column.of).type)
            for column in self.made
        ]
        return pa.schema([*own, *self.read, *made, *self.kept])

    @property
    def num_buffers_read(self) -> int:
        """Arrow buffers of what training reads."""
        return sum(4 if pat.is_list(kind) else 2 for kind in self.written.types[: 2 + len(self.read)])

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, where that is known before anything is read; 0 where it is not."""
        if not self.counts_tokens:
            return 0
        lists = self.written.types[2 : 2 + len(self.read) + len(self.made)]
        return sum(kind.value_type.bit_width // 8 for kind in lists)


class FeedUnit(NamedTuple):
    """Consecutive samples, read as one piece of work."""

    number: int
    feed: int
    """Which of the data sets."""
    unit: Unit
    first_id: int
    """Sample id of its first row."""


class Rows(NamedTuple):
    """Rows of a data set as they are shuffled."""

    batch: pa.RecordBatch
    """Of the schema ``ShardColumns.shuffled``."""
    rows: NDArray[np.int64]
    """(n,) which rows of what was read, ascending."""
    num_tokens: NDArray[np.int64]
    """(n,) tokens, as the plan counts them."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One data set that samples come from, and what of it becomes which column."""

    dataset: Dataset
    label: str
    """What messages call it; empty, where there is one only."""
    first_id: int
    """Sample id of its first row."""
    metric: str
    """The metric that the plan calls the length of a sample."""
    columns: ShardColumns
    taken: Mapping[str, str]
    """Column of the source by column of the shards, of those that are not made by a tokenizer."""

    @property
    def definition(self) -> LengthDefinition:
        """What the length of a sample is."""
        return self.dataset.definition

    @property
    def source(self) -> Source:
        """The rows."""
        return self.dataset.source

    def units(self, number: int, first_number: int) -> list[FeedUnit]:
        """Cut the data set into units of work; the cut depends on the files alone.

        Args:
            number: which of the data sets it is.
            first_number: of its first unit.
        """
        units = self.source.units(list(self.read_columns), target_bytes=UNIT_BYTES)
        return [
            FeedUnit(first_number + at, number, unit, self.first_id + self.source.first_row_of(unit))
            for at, unit in enumerate(units)
        ]

    def place_of(self, sample_id: int) -> str:
        """Say which file, and where in it, a sample is."""
        label = f"{self.label}: " if self.label else ""
        return f"{label}{self.source.place_of_row(sample_id - self.first_id)}"

    @cached_property
    def read_columns(self) -> dict[str, pa.DataType | None]:
        """The columns to read from the source, each with the type to read JSON as."""
        listed = pa.list_(pa.int64())
        wanted: dict[str, pa.DataType | None] = dict.fromkeys(self.dataset.fields.values(), listed)
        wanted |= self.definition.read_columns
        return wanted | dict(zip(self.columns.kept.names, self.columns.kept.types, strict=True))

    def read(self, unit: FeedUnit) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the record batches of a unit, each with the sample id of its first row."""
        first_id = unit.first_id
        for batch in self.source.read(unit.unit, self.read_columns):
            yield first_id, batch
            first_id += batch.num_rows

    def rows(self, batch: pa.RecordBatch, wanted: NDArray[np.int64]) -> Rows:
        """Turn rows of a batch into what is written.

        Args:
            batch: as read.
            wanted: (n,) rows of it, ascending; others may come along where that costs nothing.

        Raises:
            RowError: a row that cannot be read; counts from the start of ``batch``.
        """
        definition = self.definition
        if not definition.is_tokenized:
            measured, skipped = apply_to_readable(
                partial(measure, definition=definition), batch, definition.on_error
            )
            lengths = np.asarray(measured.lengths[self.metric], np.int64)
            rows = np.arange(batch.num_rows)
            columns = self._columns({}, batch, skipped)
            self._check_aligned(columns, lengths)
        else:
            if len(wanted) < batch.num_rows:
                batch = batch.take(to_arrow(wanted))
            try:
                encoded, _ = apply_to_readable(
                    partial(encode, definition=definition), batch, definition.on_error
                )
            except RowError as error:
                raise RowError(int(wanted[error.row]), str(error)) from error
            rows, lengths = wanted, self._planned_lengths(encoded)
            columns = self._columns(self._token_columns(encoded), batch, ())
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self.columns.shuffled), rows, lengths)

    def _columns(
        self, tokens: Mapping[str, pa.Array], batch: pa.RecordBatch, skipped: Sequence[int]
    ) -> list[pa.Array]:
        """Return the columns that are shuffled, given those that a tokenizer made."""
        found = {name: array.cast(self.columns.read.field(name).type) for name, array in tokens.items()}
        columns = []
        for field in self.columns.shuffled:
            if field.name in self.taken:
                found[field.name] = self._column(batch, field, skipped)
            elif field.name not in found:  # another data set has labels: here they are the ids
                found[field.name] = found[field.name.removesuffix(LABELS) + INPUT_IDS].cast(field.type)
            columns.append(found[field.name])
        return columns

    def _column(self, batch: pa.RecordBatch, field: pa.Field, skipped: Sequence[int]) -> pa.Array:
        array = take_column(batch, self.taken[field.name])
        if pat.is_dictionary(array.type):
            array = array.dictionary_decode()
        if skipped:
            marks = np.zeros(len(array), np.bool_)
            marks[list(skipped)] = True
            array = array.take(pa.array(np.arange(len(array)), mask=marks))
        if is_list_of_numbers(field.type) and is_list_type(array.type) and not pat.is_list(array.type):
            array = plain_lists(array, field.name)
        if array.type.equals(field.type):
            return array
        try:
            return array.cast(field.type)
        except pa.ArrowException as error:
            raise SourceError(
                f"column {field.name!r} is of type {array.type} here and of {field.type} in the first file, "
                f"and cannot be turned into that ({error}); write it alike, or leave it out (--keep-columns)"
            ) from error

    def _check_aligned(self, columns: Sequence[pa.Array], lengths: NDArray[np.int64]) -> None:
        """Check that what training reads has one number for each token."""
        if not self.columns.counts_tokens:
            return
        for field, column in zip(self.columns.read, columns, strict=False):
            found = np.diff(to_numpy(column.offsets)).astype(np.int64)
            if column.null_count:
                found[~to_numpy(column.is_valid())] = 0
            if (wrong := np.flatnonzero(found != lengths)).size:
                row = int(wrong[0])
                raise RowError(
                    row,
                    f"column {field.name!r} holds {found[row]} elements beside {lengths[row]} tokens; make "
                    "them equal",
                )

    def _planned_lengths(self, encoded: Encoded) -> NDArray[np.int64]:
        """Return (rows,) the lengths that the plan counts."""
        names = [metric for metric, _ in self.definition.columns]
        if self.definition.is_pair and self.metric in names:
            return np.asarray(encoded.lengths[:, names.index(self.metric)], np.int64)
        return np.asarray(encoded.row_lengths, np.int64)

    def _token_columns(self, encoded: Encoded) -> dict[str, pa.Array]:
        """Return the columns of ids and labels that a tokenizer made."""
        ids = encoded.ids.astype(np.int32, copy=False)
        labels = None if encoded.mask is None else np.where(encoded.mask, ids, np.int32(IGNORED_LABEL))
        if not self.definition.is_pair:
            offsets = _offsets(encoded.lengths)
            columns = {INPUT_IDS: _lists(ids, offsets)}
            return columns if labels is None else columns | {LABELS: _lists(labels, offsets)}
        columns = {}
        # (rows · members,) -> where each member of each row begins
        starts = _offsets(encoded.lengths.ravel())[:-1].reshape(encoded.lengths.shape)
        for member, (metric, _) in enumerate(self.definition.columns):
            lengths = encoded.lengths[:, member].astype(np.int64)
            offsets = _offsets(lengths)
            index = np.repeat(starts[:, member] - offsets[:-1], lengths) + np.arange(offsets[-1])
            columns[f"{metric}.{INPUT_IDS}"] = _lists(ids[index], offsets)
            if labels is not None:
                columns[f"{metric}.{LABELS}"] = _lists(labels[index], offsets)
        return columns


def make_feeds(
    datasets: Sequence[tuple[str, int, str, Dataset]], keep_columns: Sequence[str] | None
) -> tuple[Feed, ...]:
    """Say what of each data set becomes which column of the shards.

    The columns of one data set keep their names. Several have the fields in common that a sample delivers.

    Args:
        datasets: what messages call it, the sample id of its first row, the metric that the plan counts, and
            the data set; in the order of the sample ids.
        keep_columns: columns of the sources to write beside the tokens; None: what is usual.

    Raises:
        ColumnError: a column is missing, has a name that is ours, or no type that can be told.
        ConfigError: data sets that deliver other fields.
    """
    several = len(datasets) > 1
    found = [_Content(dataset, several=several) for *_, dataset in datasets]
    first = found[0]
    has_labels = any(LABELS in fields for content in found for fields in content.all_fields)
    for (label, *_), content in zip(datasets, found, strict=True):
        if has_labels:
            content.add_labels()
        if content.fields != first.fields:
            raise ConfigError(
                f"source {label} delivers {', '.join(content.fields)}, and source {datasets[0][0]} "
                f"{', '.join(first.fields)}; samples of one plan have the same fields: name them with fields="
            )
    read = {name: _widest([content.types[name] for content in found]) for name in first.types}
    made: list[Made] = []
    if any(content.definition.is_tokenized for content in found):
        for name in [name for name in read if name.rsplit(".", 1)[-1] == INPUT_IDS]:
            stem = name.removesuffix(INPUT_IDS)
            if stem + LABELS not in read:
                made.append(Made(stem + LABELS, name, is_position=False))
            made.append(Made(stem + POSITION_IDS, name, is_position=True))
    if keep_columns is None and several:
        keep_columns = ["none"]
    kept = first.kept(read, keep_columns)
    types = {
        name: next(filter(None, (content.kept_type(name) for content in found)), pa.null()) for name in kept
    }
    _refuse_names([*read, *kept], [column.name for column in made])
    columns = ShardColumns(
        fields=first.fields,
        read=pa.schema(list(read.items())),
        made=tuple(made),
        kept=pa.schema(list(types.items())),
        counts_tokens=not any(c.definition.is_pair or len(c.definition.columns) > 1 for c in found),
    )
    return tuple(
        Feed(
            dataset=dataset,
            label=label,
            first_id=first_id,
            metric=metric,
            columns=columns,
            taken=content.taken | {name: name for name in kept},
        )
        for (label, first_id, metric, dataset), content in zip(datasets, found, strict=True)
    )


class _Content:
    """What one data set delivers: columns of the shards, their types, and where they are in the source."""

    def __init__(self, dataset: Dataset, *, several: bool) -> None:
        self.definition = definition = dataset.definition
        self._source = dataset.source
        self.types: dict[str, pa.DataType] = {}
        """By column of the shards."""
        self.taken: dict[str, str] = {}
        """Column of the source, by column of the shards."""
        self.fields: dict[str, Any] = {}
        """Column of the shards, by field; of pairs by member and field."""
        is_masked = definition.is_tokenized and definition.trained_part != "all"
        names = [INPUT_IDS, LABELS] if is_masked else [INPUT_IDS]
        if definition.is_pair:
            for member, _ in definition.columns:
                self.fields[member] = {name: f"{member}.{name}" for name in names}
                self.types |= dict.fromkeys(self.fields[member].values(), _IDS)
            return
        if definition.is_tokenized:
            self.fields |= {name: name for name in names}
            self.types |= dict.fromkeys(names, _IDS)
        for field, column in dataset.fields.items():
            self.fields[field] = name = field if several else column
            self.taken[name] = column
            self.types[name] = self._list_type(column)

    @property
    def all_fields(self) -> list[Mapping[str, Any]]:
        """Fields of the sample, or of each of its members."""
        return list(self.fields.values()) if self.definition.is_pair else [self.fields]

    def add_labels(self) -> None:
        """Deliver the ids as labels, where there are none."""
        if self.definition.is_pair:
            for member, fields in self.fields.items():
                fields.setdefault(LABELS, f"{member}.{LABELS}")
                self.types.setdefault(f"{member}.{LABELS}", _IDS)
        elif LABELS not in self.fields and INPUT_IDS in self.fields:
            self.fields[LABELS] = LABELS
            self.types[LABELS] = self.types[self.fields[INPUT_IDS]]

    def kept(self, read: Mapping[str, Any], keep_columns: Sequence[str] | None) -> list[str]:
        """Return the further columns of the source that are written."""
        parts = [part for part in self._source.parts if part.known_num_rows != 0]
        if keep_columns is not None and "all" not in keep_columns:
            return [name for name in dict.fromkeys(keep_columns) if name != "none" and name not in read]
        is_usual = not self.definition.is_tokenized and all(part.format != "jsonl" for part in parts)
        if keep_columns is None and not is_usual:
            return []
        names = parts[0].schema.names
        # A struct whose list is a column of its own would be written twice.
        tops = {name.split(".", 1)[0] for name in self.taken.values() if name not in names}
        return [name for name in names if name not in read and name not in tops]

    def kept_type(self, column: str) -> pa.DataType | None:
        """Return the type that a further column is written as; None where no row has a value."""
        kinds = [_decoded(kind) for kind in self._types(column) if not pat.is_null(kind)]
        if not kinds:
            # Of a format that does not say it: what the first rows have.
            unit = self._source.units([column], target_bytes=1)[0]
            batch = next(iter(self._source.read(unit, {column: None})), None)
            found = [] if batch is None else [storage_type(take_column(batch, column).type)]
            kinds = [_decoded(kind) for kind in found if not pat.is_null(kind)]
        return kinds[0] if kinds else None

    def _list_type(self, column: str) -> pa.DataType:
        kinds = [kind for kind in self._types(column) if not pat.is_null(kind)]
        return _widest([tokens_type(kind.value_type) for kind in kinds if not pat.is_null(kind.value_type)])

    def _types(self, column: str) -> list[pa.DataType]:
        return [
            storage_type(find_field(part.schema, column, owner=part.location.path).type)
            for part in self._source.parts
            if part.known_num_rows != 0
        ]


def _widest(lists: Sequence[pa.DataType]) -> pa.DataType:
    """Return the type of lists that holds the values of all of them."""
    elements = {kind.value_type for kind in lists}
    if len(elements) < 2:
        return tokens_type(elements.pop() if elements else pa.int64())
    widest = np.result_type(*(np.dtype(element.to_pandas_dtype()) for element in elements))
    return tokens_type(pa.from_numpy_dtype(widest))


def _refuse_names(names: Sequence[str], made: Sequence[str]) -> None:
    taken = {*OWN_COLUMNS, *made}
    own = sorted(taken.intersection(names)) or sorted({name for name in names if names.count(name) > 1})
    if own:
        raise ColumnError(
            f"the source has a column {own[0]!r}, which the shards have themselves; rename it, or choose the "
            "columns that are written with --keep-columns"
        )


def _decoded(kind: pa.DataType) -> pa.DataType:
    """Return the type that values of a column have once dictionaries and kinds of lists are undone."""
    kind = storage_type(kind)
    if pat.is_dictionary(kind):
        return kind.value_type
    if is_list_type(kind) and is_list_of_numbers(pa.list_(kind.value_type)):
        return tokens_type(kind.value_type)
    return kind


def _offsets(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _lists(values: NDArray[np.int32], offsets: NDArray[np.int64]) -> pa.ListArray:
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ConfigError("more tokens are made of one batch of texts than Arrow lists hold; split the rows")
    return pa.Array.from_buffers(
        _IDS, len(offsets) - 1, [None, pa.py_buffer(offsets.astype(np.int32))], children=[to_arrow(values)]
    )
