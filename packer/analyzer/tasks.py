"""The work on one unit: read it, measure it, and pack what is worth keeping into a payload."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.analyzer.keys import KeyColumn, hash_values
from packer.analyzer.merge import exact_sum
from packer.analyzer.sample_metrics import TOKEN_IDS, SampleMetric
from packer.arrays import to_arrow
from packer.errors import ColumnError, SourceError
from packer.jobs.executors import Report
from packer.jobs.payload import pack_arrays, unpack_arrays
from packer.samples import Encoded, LengthDefinition, encode, measure
from packer.samples.ragged import RowError
from packer.samples.tolerance import apply_to_readable
from packer.sources import Columns, Source, Unit, find_field, take_column

T = TypeVar("T")

LENGTHS = 0
"""Number of the stage that measures."""

VOCABULARY = 1
"""Number of the stage, before that one, that counts how often each token id occurs."""

# beside the metrics, whose names begin with a letter or a digit
_COUNTS = "@counts"
_SKIPPED = "@skipped"
_TOKEN_IDS = "@token_ids"
_KEY = "@key:"

_LARGEST_TOKEN_ID = (1 << 24) - 1


def _no_rows() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class UnitLengths:
    """The lengths of one unit, as the journal keeps them."""

    values: Mapping[str, NDArray[np.integer]]
    """Metric to (rows,) int32, or int64 where needed, the main one first; empty where there are no rows."""
    num_nulls: int
    num_empties: int
    token_ids: NDArray[np.integer] | None = None
    """(tokens,) the ids of all rows end to end, where they are to be written."""
    skipped: NDArray[np.integer] = field(default_factory=_no_rows)
    """(skipped rows,) rows that could not be read, ascending; neither null nor empty."""
    num_bytes: int = 0
    """What the columns that were read take in memory."""
    keys: Mapping[str, NDArray[np.integer]] = field(default_factory=dict)
    """Key to (16 · rows,) uint8, the hash of each row's value."""

    @property
    def num_rows(self) -> int:
        """Samples of the unit."""
        return self.totals[0]

    @property
    def totals(self) -> tuple[int, int]:
        """Rows and tokens, by the main metric."""
        main = next(iter(self.values.values()), np.empty(0, np.int64))
        return len(main), exact_sum(main)

    @staticmethod
    def pack(batches: Sequence["UnitLengths"]) -> bytes:
        """Return the payload of a unit, given the lengths of its batches."""
        counts = np.array(
            [[batch.num_nulls, batch.num_empties, batch.num_bytes] for batch in batches], np.int64
        )
        names = batches[0].values if batches else ()
        arrays = {name: _narrowed_lengths([batch.values[name] for batch in batches]) for name in names}
        arrays[_COUNTS] = [counts.reshape(-1, 3).sum(axis=0)]
        arrays[_SKIPPED] = [batch.skipped for batch in batches] or [_no_rows()]
        for name in batches[0].keys if batches else ():
            arrays[_KEY + name] = [batch.keys[name] for batch in batches]
        token_ids = [batch.token_ids for batch in batches if batch.token_ids is not None]
        return pack_arrays(arrays | {_TOKEN_IDS: token_ids} if token_ids else arrays)

    @classmethod
    def unpack(cls, payload: memoryview) -> "UnitLengths":
        """Read a payload; the arrays are views of it."""
        values = unpack_arrays(payload)
        num_nulls, num_empties, num_bytes = values.pop(_COUNTS).tolist()
        skipped = values.pop(_SKIPPED)
        keys = {name.removeprefix(_KEY): values.pop(name) for name in [*values] if name.startswith(_KEY)}
        return cls(values, num_nulls, num_empties, values.pop(_TOKEN_IDS, None), skipped, num_bytes, keys)


@dataclass(frozen=True, slots=True)
class MeasureUnit:
    """Measures a unit of a source."""

    source: Source
    definition: LengthDefinition
    metrics: tuple[SampleMetric, ...] = ()
    vocabulary: NDArray[np.int64] | None = None
    """(ids,) how often each token id occurs in the data set, for the metrics that need it."""
    token_dtype: np.dtype[np.integer] | None = None
    """Keep the token ids, in this type."""
    keys: tuple[KeyColumn, ...] = ()

    def __call__(self, unit: Unit, report: Report) -> bytes:
        """Return the payload of a ``UnitLengths``."""
        batches = []
        num_rows = num_tokens = 0
        schema = self.source.parts[unit.part].schema
        owner = self.source.parts[unit.part].location.path
        untyped = {
            key.column
            for key in self.keys
            if self._columns[key.column] is None
            and pa.types.is_null(find_field(schema, key.column, owner=owner).type)
        }
        measure_batch = partial(self._measure, untyped=untyped)
        for lengths, skipped in _over_batches(self, unit, self._columns, measure_batch):
            # A skipped row is a null here.
            counted = replace(lengths, num_nulls=lengths.num_nulls - len(skipped), skipped=skipped)
            batches.append(counted)
            num_rows, num_tokens = num_rows + counted.totals[0], num_tokens + counted.totals[1]
            report(self.source.share_read(unit, num_rows), num_rows, num_tokens)
        return UnitLengths.pack(batches)

    @property
    def _columns(self) -> Columns:
        wanted: dict[str, Any] = {key.column: None for key in self.keys}
        wanted |= {column: None for metric in self.metrics for column in metric.needs.columns}
        return wanted | dict(self.definition.read_columns)

    def _measure(self, batch: pa.RecordBatch, untyped: Collection[str]) -> UnitLengths:
        wants_ids = self.token_dtype is not None or any(metric.needs.token_ids for metric in self.metrics)
        encoded = encode(batch, self.definition) if wants_ids else None
        lengths, num_nulls, num_empties = measure(batch, self.definition, encoded)
        num_bytes = batch.nbytes
        keys = {
            key.name: hash_values(take_column(batch, key.column), is_json=key.column in untyped)
            for key in self.keys
        }
        if encoded is not None:
            batch = _with_token_ids(batch, encoded)
        further = {metric.name: metric(batch, self.vocabulary) for metric in self.metrics}
        kept = (
            None if encoded is None or self.token_dtype is None else _narrowed(encoded.ids, self.token_dtype)
        )
        return UnitLengths(lengths | further, num_nulls, num_empties, kept, num_bytes=num_bytes, keys=keys)


@dataclass(frozen=True, slots=True)
class CountVocabulary:
    """Counts how often each token id occurs in a unit."""

    source: Source
    definition: LengthDefinition

    def __call__(self, unit: Unit, report: Report) -> bytes:
        """Return a payload of the ids that occur and their counts; `add_vocabulary` reads it."""
        totals = np.zeros(0, dtype=np.int64)
        num_rows = 0
        encode_batch = partial(encode, definition=self.definition)
        for encoded, _ in _over_batches(self, unit, self.definition.read_columns, encode_batch):
            self._check_ids(encoded, unit, num_rows)
            counts = np.bincount(encoded.ids.astype(np.int64, copy=False))
            if len(counts) > len(totals):
                totals, counts = counts, totals
            totals[: len(counts)] += counts
            num_rows += len(encoded.lengths)
            report(self.source.share_read(unit, num_rows), num_rows, int(totals.sum()))
        ids = np.flatnonzero(totals)
        return pack_arrays({"ids": [ids], "counts": [totals[ids]], "rows": [np.array([num_rows])]})

    def _check_ids(self, encoded: Encoded, unit: Unit, first_row: int) -> None:
        """Refuse ids that are none; such a row can be read, so it is never skipped."""
        ids = encoded.ids
        if ids.dtype.kind not in "iu":
            raise ColumnError(f"column {self.definition.columns[0][1]!r} holds {ids.dtype}, no token ids")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= _LARGEST_TOKEN_ID:
            at = int(np.argmax((ids < 0) | (ids > _LARGEST_TOKEN_ID)))
            row = int(np.searchsorted(np.cumsum(encoded.row_lengths), at, side="right"))
            raise SourceError(
                f"{self.source.place(unit, first_row + row)}: token id {ids[at]} is not within 0 to "
                f"{_LARGEST_TOKEN_ID}, so there is no vocabulary"
            )


def add_vocabulary(payloads: Iterable[memoryview]) -> NDArray[np.int64]:
    """(ids,) how often each token id occurs in all units of `CountVocabulary`."""
    total = np.zeros(0, dtype=np.int64)
    for payload in payloads:
        unit = unpack_arrays(payload)
        needed = int(unit["ids"][-1]) + 1 if len(unit["ids"]) else 0
        total = np.pad(total, (0, max(0, needed - len(total))))
        total[unit["ids"]] += unit["counts"]
    return total


def vocabulary_totals(payload: memoryview) -> tuple[int, int]:
    """Rows and tokens of a payload of `CountVocabulary`."""
    unit = unpack_arrays(payload)
    return int(unit["rows"][0]), int(unit["counts"].sum())


def _over_batches(
    task: MeasureUnit | CountVocabulary, unit: Unit, columns: Columns, work: Callable[[pa.RecordBatch], T]
) -> Iterator[tuple[T, NDArray[np.int64]]]:
    """Yield what ``work`` makes of each batch of a unit, and which rows of the unit were skipped.

    An error of a row gets the row's place.
    """
    num_rows = 0
    for batch in task.source.read(unit, columns):
        try:
            made, skipped = apply_to_readable(work, batch, task.definition.on_error)
        except RowError as error:
            raise SourceError(f"{task.source.place(unit, num_rows + error.row)}: {error}") from error
        yield made, num_rows + np.array(skipped, np.int64)
        num_rows += batch.num_rows


def _with_token_ids(batch: pa.RecordBatch, encoded: Encoded) -> pa.RecordBatch:
    """Add the token ids as a column; a column of that name gives way."""
    offsets = to_arrow(np.concatenate([[0], np.cumsum(encoded.row_lengths)]))
    column = pa.LargeListArray.from_arrays(offsets, to_arrow(encoded.ids))
    if TOKEN_IDS in batch.schema.names:
        batch = batch.drop_columns(TOKEN_IDS)
    return batch.append_column(TOKEN_IDS, column)


def _narrowed_lengths(pieces: list[NDArray[np.integer]]) -> list[NDArray[np.integer]]:
    """Return int32 where no value is negative or larger: half of what a unit sends and keeps."""
    largest = np.iinfo(np.int32).max
    fits = all(piece.dtype == np.int32 or 0 <= np.bitwise_or.reduce(piece) <= largest for piece in pieces)
    return [piece.astype(np.int32 if fits else np.int64, copy=False) for piece in pieces]


def _narrowed(ids: NDArray[np.integer], dtype: np.dtype[np.integer]) -> NDArray[np.integer]:
    if len(ids) and int(ids.max()) > np.iinfo(dtype).max:
        raise SourceError(
            f"the tokenizer gives id {ids.max()}, which {dtype} cannot hold; its vocabulary is wrong"
        )
    return ids.astype(dtype)
