"""From rows to lengths: a record batch in, an array a metric out. No token becomes a Python object."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_numpy
from packer.errors import ColumnError, SourceError
from packer.samples.definition import LOSS_TOKENS, SEQLEN, LengthDefinition, text_tokenizer
from packer.samples.encoded import Encoded
from packer.samples.features import count_frames
from packer.samples.ragged import RowError, ragged, refuse_null_elements, valid_rows
from packer.samples.texts import texts_of
from packer.samples.tokens import encode, num_nulls
from packer.sources import Source, Unit, take_column

IGNORED_LABEL = -100


class Measurement(NamedTuple):
    """Lengths of the rows of one batch, or unit."""

    lengths: dict[str, NDArray[np.integer]]
    """Metric to (rows,) lengths, int64, or int32 where the file counts in it; the main metric first."""
    num_null: int
    """Rows whose main column is null: their length is 0."""
    num_empty: int
    """Rows that are not null and have no token of their own: of length 0, or of special tokens alone."""


def measure_unit(source: Source, unit: Unit, definition: LengthDefinition) -> Iterator[Measurement]:
    """Read a unit and measure it batch by batch.

    Raises:
        SourceError: the unit cannot be read or a row has no length; names file, place and cure.
    """
    num_rows = 0
    for batch in source.read(unit, definition.read_columns):
        try:
            yield measure(batch, definition)
        except RowError as error:
            raise SourceError(f"{source.place(unit, num_rows + error.row)}: {error}") from error
        num_rows += batch.num_rows


def measure(
    batch: pa.RecordBatch, definition: LengthDefinition, encoded: Encoded | None = None
) -> Measurement:
    """Return the length of every row, for every metric of the definition.

    Args:
        batch: rows that hold at least ``definition.read_columns``.
        definition: what a length is.
        encoded: the batch's tokens, if they are there already: no text is then tokenized again.

    Raises:
        RowError: a row has no length: a negative one, or labels that do not fit its tokens.
    """
    if definition.is_tokenized:
        lengths = _tokenized(batch, definition, encoded)
    else:
        lengths = {}
        for metric, column in definition.columns:
            lengths[metric] = _stored(take_column(batch, column), column, definition)
    main = next(iter(lengths.values()))
    num_null = num_nulls(batch, definition)
    num_empty = count_empty(main, definition) - num_null
    if definition.labels_column is not None:
        labels = take_column(batch, definition.labels_column)
        lengths[LOSS_TOKENS] = _count_labels(labels, definition, main)
    return Measurement(lengths, num_null, num_empty)


def _stored(array: pa.Array, column: str, definition: LengthDefinition) -> NDArray[np.integer]:
    """Return the (rows,) lengths that a column holds, or those of its lists."""
    if definition.kind == "length":
        return _integers(array, column)
    if definition.kind == "features":
        return count_frames(array, column)
    rows = ragged(array, column=column)
    if definition.kind == "tokens":
        refuse_null_elements(rows, column)
    return rows.lengths


def _tokenized(
    batch: pa.RecordBatch, definition: LengthDefinition, encoded: Encoded | None
) -> dict[str, NDArray[np.integer]]:
    """Return (rows,) lengths by metric of what a tokenizer makes; of whole texts no ids are kept."""
    if encoded is None:
        if definition.counts_texts:
            return {SEQLEN: text_tokenizer(definition).count(texts_of(batch, definition))}
        encoded = encode(batch, definition)
    names = [metric for metric, _ in definition.columns]
    if definition.is_pair:
        lengths = {SEQLEN: encoded.row_lengths, **dict(zip(names, encoded.lengths.T, strict=True))}
    else:
        lengths = {names[0]: encoded.lengths}
    if encoded.mask is None:
        if definition.is_pair:  # each member has a first token of its own
            lengths[LOSS_TOKENS] = np.maximum(encoded.lengths - 1, 0).sum(axis=1)
        return lengths
    marked = count_marked(encoded.mask, encoded.lengths.ravel(), shift=definition.shift)
    # (rows · members,) -> (rows,)
    lengths[LOSS_TOKENS] = marked.reshape(encoded.lengths.shape).sum(axis=1) if definition.is_pair else marked
    return lengths


def count_empty(lengths: NDArray[np.integer], definition: LengthDefinition) -> int:
    """Return how many rows have no token of their own; of texts, special and end tokens are not."""
    least = 0
    if definition.counts_texts:
        least = text_tokenizer(definition).num_added + (definition.eos is not None)
    return int(np.count_nonzero(lengths <= least)) if len(lengths) and lengths.min() <= least else 0


def _integers(array: pa.Array, column: str) -> NDArray[np.int64]:
    if pat.is_null(array.type):
        return np.zeros(len(array), np.int64)
    if not pat.is_integer(array.type):
        raise ColumnError(
            f"column {column!r} is of type {array.type}, not an integer; name an integer column"
        )
    stored = to_numpy(array)
    if array.null_count:
        stored = np.where(valid_rows(array), stored, 0)
    if stored.dtype == np.uint64 and len(stored) and stored.max() > np.iinfo(np.int64).max:
        raise RowError(int(stored.argmax()), f"column {column!r} holds a length over 2^63; correct it")
    values: NDArray[np.int64] = stored.astype(np.int64)
    if len(values) and values.min() < 0:
        row = int(np.argmax(values < 0))
        raise RowError(
            row, f"column {column!r} holds the length {values[row]}; a length is 0 or more, correct it"
        )
    return values


def _count_labels(
    array: pa.Array, definition: LengthDefinition, seqlens: NDArray[np.integer]
) -> NDArray[np.int64]:
    """(rows,) labels that are not −100, the first of each row left out where labels are shifted."""
    column = str(definition.labels_column)
    rows = ragged(array, column=column)
    refuse_null_elements(rows, column)
    unequal = valid_rows(array) & (rows.lengths != seqlens)
    if unequal.any():
        row = int(np.argmax(unequal))
        raise RowError(
            row,
            f"column {column!r} holds {rows.lengths[row]} labels for {seqlens[row]} tokens; make them equal",
        )
    if not rows.lengths.any():
        return np.zeros(len(array), np.int64)
    if not pat.is_integer(rows.values.type):
        raise ColumnError(
            f"column {column!r} holds {rows.values.type} elements, not integers; name a labels column"
        )
    first = int(rows.starts[rows.lengths > 0].min())
    last = int((rows.starts + rows.lengths).max())
    values = rows.values.slice(first, last - first)
    marked = to_numpy(values) != IGNORED_LABEL
    starts = np.where(rows.lengths > 0, rows.starts - first, 0)
    return count_marked(marked, rows.lengths, starts, shift=definition.shift)


def count_marked(
    marked: NDArray[np.bool_],
    lengths: NDArray[np.integer],
    starts: NDArray[np.integer] | None = None,
    *,
    shift: bool,
) -> NDArray[np.int64]:
    """(rows,) marked positions of each row, its first one left out where labels are shifted.

    Args:
        marked: positions of all rows.
        lengths: (rows,)
        starts: (rows,) where each row begins; one after the other, if not given.
        shift: leave out the first position of each row.
    """
    # (positions + 1,) number of marks before each
    before = np.concatenate([[0], np.cumsum(marked, dtype=np.int64)])
    if starts is None:
        starts = np.cumsum(lengths) - lengths
    skipped = np.minimum(lengths, 1) if shift else 0
    counts: NDArray[np.int64] = before[starts + lengths] - before[starts + skipped]
    return counts
