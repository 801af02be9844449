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
from packer.shards.format import OWN_COLUMNS, Fields, tokens_type
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
        own = [pa.field("sample_id", pa.int64(), False), pa.field("start", pa.int32(), False)]
        made = [pa.field(column.name, _IDS) for column in self.made]
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
        lists = [*self.read.types, *(_IDS for _ in self.made)]
        return sum(kind.value_type.bit_width // 8 for kind in lists)


class FeedUnit(NamedTuple):
    """Consecutive samples, read as one piece of work."""

    number: int
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
    """Where the samples come from: a data set, and which of its columns are written."""

    dataset: Dataset
    metric: str
    """The metric that the plan calls the length of a sample."""
    keep_columns: tuple[str, ...] | None
    """Columns of the source to write beside the tokens; None: what is usual for its kind."""

    @property
    def definition(self) -> LengthDefinition:
        """What the length of a sample is."""
        return self.dataset.definition

    @property
    def source(self) -> Source:
        """The rows."""
        return self.dataset.source

    def units(self) -> list[FeedUnit]:
        """Cut the data set into units of work; the cut depends on the files alone."""
        units = self.source.units(list(self.read_columns), target_bytes=UNIT_BYTES)
        return [FeedUnit(number, unit, self.source.first_row_of(unit)) for number, unit in enumerate(units)]

    @cached_property
    def columns(self) -> ShardColumns:
        """The columns of a shard.

        Raises:
            ColumnError: a column has a name that is ours, or no type that can be told.
        """
        read, fields = self._delivered()
        made: list[Made] = []
        if self.definition.is_tokenized:
            for name in [name for name in read if name.rsplit(".", 1)[-1] == INPUT_IDS]:
                stem = name.removesuffix(INPUT_IDS)
                if stem + LABELS not in read:
                    made.append(Made(stem + LABELS, name, is_position=False))
                made.append(Made(stem + POSITION_IDS, name, is_position=True))
        kept = {name: self._kept_type(name) for name in self._kept(read)}
        self._refuse_names([*read, *kept], [column.name for column in made])
        return ShardColumns(
            fields=fields,
            read=pa.schema(list(read.items())),
            made=tuple(made),
            kept=pa.schema(list(kept.items())),
            counts_tokens=not self.definition.is_pair and len(self.definition.columns) == 1,
        )

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
            columns = [self._column(batch, field, skipped) for field in self.columns.shuffled]
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
            tokens = self._token_columns(encoded)
            columns = [
                tokens[field.name] if field.name in tokens else self._column(batch, field, ())
                for field in self.columns.shuffled
            ]
        return Rows(pa.RecordBatch.from_arrays(columns, schema=self.columns.shuffled), rows, lengths)

    def _delivered(self) -> tuple[dict[str, pa.DataType], Fields]:
        """Return the columns that training reads with their types, and what a sample makes of them."""
        definition = self.definition
        is_masked = definition.is_tokenized and definition.trained_part != "all"
        names = [INPUT_IDS, LABELS] if is_masked else [INPUT_IDS]
        if definition.is_pair:
            members = {
                metric: {name: f"{metric}.{name}" for name in names} for metric, _ in definition.columns
            }
            return {column: _IDS for member in members.values() for column in member.values()}, members
        own: dict[str, pa.DataType] = dict.fromkeys(names, _IDS) if definition.is_tokenized else {}
        further = self.dataset.fields
        types = {column: self._list_type(column) for column in further.values()}
        return own | types, {**{name: name for name in own}, **further}

    def _list_type(self, column: str) -> pa.DataType:
        """Return the type of a list column that holds the values of every file."""
        types = [kind for kind in self._types(column) if not pat.is_null(kind)]
        elements = {kind.value_type for kind in types if not pat.is_null(kind.value_type)}
        if not elements:
            return tokens_type(pa.int64())
        if len(elements) == 1:
            return tokens_type(elements.pop())
        widest = np.result_type(*(np.dtype(element.to_pandas_dtype()) for element in elements))
        return tokens_type(pa.from_numpy_dtype(widest))

    def _types(self, column: str) -> list[pa.DataType]:
        return [
            storage_type(find_field(part.schema, column, owner=part.location.path).type)
            for part in self.source.parts
            if part.known_num_rows != 0
        ]

    def _kept(self, read: Mapping[str, Any]) -> list[str]:
        """Return the further columns of the source that are written."""
        schema = next(part.schema for part in self.source.parts if part.known_num_rows != 0)
        if self.keep_columns is not None and "all" not in self.keep_columns:
            return [name for name in dict.fromkeys(self.keep_columns) if name != "none" and name not in read]
        is_usual = not self.definition.is_tokenized and not any(
            part.format == "jsonl" for part in self.source.parts
        )
        if self.keep_columns is None and not is_usual:
            return []
        # A struct whose list is a column of its own would be written twice.
        tops = {name.split(".", 1)[0] for name in read if name not in schema.names}
        return [name for name in schema.names if name not in read and name not in tops]

    def _kept_type(self, column: str) -> pa.DataType:
        kinds = [_decoded(kind) for kind in self._types(column) if not pat.is_null(kind)]
        if not kinds:
            kinds = [_decoded(kind) for kind in self._types_read(column) if not pat.is_null(kind)]
        return kinds[0] if kinds else pa.null()

    def _types_read(self, column: str) -> list[pa.DataType]:
        """Return the type that the first rows have, of a format that does not say."""
        unit = self.source.units([column], target_bytes=1)[0]
        batch = next(iter(self.source.read(unit, {column: None})), None)
        return [] if batch is None else [storage_type(take_column(batch, column).type)]

    def _refuse_names(self, names: Sequence[str], made: Sequence[str]) -> None:
        taken = {*OWN_COLUMNS, *made}
        own = sorted(taken.intersection(names)) or sorted({name for name in names if names.count(name) > 1})
        if own:
            raise ColumnError(
                f"the source has a column {own[0]!r}, which the shards have themselves; rename it, or choose "
                "the columns that are written with --keep-columns"
            )

    def _column(self, batch: pa.RecordBatch, field: pa.Field, skipped: Sequence[int]) -> pa.Array:
        array = take_column(batch, field.name)
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
