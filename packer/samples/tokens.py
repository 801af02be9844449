"""From rows to token ids: for every row exactly as many as `measure` counts."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_arrow, to_numpy
from packer.errors import ColumnError, ConfigError
from packer.samples.conversations import conversations, filled
from packer.samples.definition import LengthDefinition, chat_tokenizer, text_tokenizer
from packer.samples.encoded import Encoded, gathered, with_completions
from packer.samples.features import is_feature_type
from packer.samples.ragged import (
    NULL_ELEMENT,
    Ragged,
    RowError,
    is_list_type,
    ragged,
    refuse_null_elements,
    valid_rows,
)
from packer.samples.template import TextTemplate
from packer.samples.texts import prompts_and_wholes, texts_of
from packer.sources import Source, find_field, storage_type, take_column


def encode(batch: pa.RecordBatch, definition: LengthDefinition) -> Encoded:
    """Return the token ids of every row, by the main metric of a definition.

    Raises:
        ConfigError: a definition by length alone names no tokens.
        RowError: a row has no token ids, such as a list with a null in it.
    """
    column = definition.columns[0][1]
    if definition.kind in ("length", "features"):
        raise ConfigError(
            f"column {column!r} holds {definition.kind}, not tokens; name the column of the tokens, too"
        )
    if definition.is_chat:
        return _encode_chats(batch, definition)
    if definition.is_tokenized:
        return _encode_texts(batch, definition)
    rows = ragged(take_column(batch, column), column=column)
    return Encoded(gather(rows, column), rows.lengths)


def num_nulls(batch: pa.RecordBatch, definition: LengthDefinition) -> int:
    """Return how many rows are null, and so of length 0.

    Of a prompt's parts none may be null; of a template's columns, in the part that trains, not all.
    """
    if definition.kind == "template":
        columns = TextTemplate(definition.completion_template or str(definition.text_template)).columns
        return int(np.count_nonzero(np.logical_and.reduce(_nulls(batch, columns))))
    if definition.kind == "prompt":
        columns = (str(definition.prompt_column), *(column for _, column in definition.columns))
        return int(np.count_nonzero(np.logical_or.reduce(_nulls(batch, columns))))
    return int(take_column(batch, definition.columns[0][1]).null_count)


def _nulls(batch: pa.RecordBatch, columns: Iterable[str]) -> list[NDArray[np.bool_]]:
    return [~valid_rows(take_column(batch, column)) for column in columns]


def _encode_texts(batch: pa.RecordBatch, definition: LengthDefinition) -> Encoded:
    tokenizer = text_tokenizer(definition)
    if definition.counts_texts:
        return Encoded(*tokenizer.encode(texts_of(batch, definition)))
    prompts, wholes = prompts_and_wholes(batch, definition)
    return with_completions(
        None if definition.train_on == "all" else Encoded(*tokenizer.encode(prompts)),
        [Encoded(*tokenizer.encode(whole)) for whole in wholes],
    )


def _encode_chats(batch: pa.RecordBatch, definition: LengthDefinition) -> Encoded:
    tokenizer, num_rows = chat_tokenizer(definition), batch.num_rows
    beside = [
        None if column is None else take_column(batch, column)
        for column in (definition.tools_column, definition.arguments_column)
    ]
    if definition.kind == "messages":
        masks = None if definition.train_on is None else definition.train_on == "assistant"
        return tokenizer.encode(take_column(batch, definition.columns[0][1]), *beside, masks=masks)
    prompts = filled(conversations(take_column(batch, str(definition.prompt_column)), *beside))
    answers = [filled(conversations(take_column(batch, column))) for _, column in definition.columns]
    prompts = {row: chat for row, chat in prompts.items() if all(row in answer for answer in answers)}
    wholes = [
        tokenizer.tokens({row: chat.then(answer[row].messages) for row, chat in prompts.items()})
        for answer in answers
    ]
    return with_completions(
        None
        if definition.train_on == "all"
        else gathered(tokenizer.tokens(prompts, opens_turn=True), num_rows, masked=False),
        [gathered(whole, num_rows, masked=False) for whole in wholes],
    )


def gather(rows: Ragged, column: str) -> NDArray[Any]:
    """Copy the elements of all rows end to end.

    Raises:
        ColumnError: the elements are no numbers.
        RowError: an element is null.
    """
    if not rows.lengths.any():
        return np.zeros(0, np.int64)
    check_elements(rows.values.type, column)
    refuse_null_elements(rows, column)
    filled = np.flatnonzero(rows.lengths)
    starts, lengths = rows.starts[filled], rows.lengths[filled]
    before = np.concatenate([[0], np.cumsum(lengths)])
    if (starts == starts[0] + before[:-1]).all():  # end to end already
        values = rows.values.slice(int(starts[0]), int(before[-1]))
    else:
        values = rows.values.take(to_arrow(np.repeat(starts - before[:-1], lengths) + np.arange(before[-1])))
    return np.array(to_numpy(values))


def values_of_row(row: pa.Scalar, column: str, start: int, stop: int | None) -> NDArray[Any]:
    """Copy elements ``[start, stop)`` of one row, as `gather` does of many; no others are touched.

    Raises:
        RowError: one of them is null.
    """
    if not row.is_valid:
        return np.zeros(0, np.int64)
    first, last, _ = slice(start, stop).indices(len(row.values))
    values = row.values.slice(first, max(last - first, 0))
    if values.null_count:
        raise RowError(0, f"column {column!r} {NULL_ELEMENT}")
    if not len(values):
        return np.zeros(0, np.int64)
    return np.array(to_numpy(values))


def check_list_of_numbers(source: Source, column: str) -> None:
    """Check, from metadata alone, that a column can be delivered as arrays: lists of numbers, nested or not.

    Raises:
        ColumnError: a file has no such column, or one that is no list of numbers; names the file.
    """
    for part in source.parts:
        if part.known_num_rows == 0:
            continue
        data_type = storage_type(find_field(part.schema, column, owner=part.location.path).type)
        if pat.is_null(data_type):
            continue
        if not is_list_type(data_type):
            raise ColumnError(
                f"{part.location.path}: column {column!r} is of type {data_type}; name a list of integers"
            )
        if is_feature_type(data_type):
            continue
        try:
            check_elements(data_type.value_type, column)
        except ColumnError as error:
            raise ColumnError(f"{part.location.path}: {error}") from error


def check_elements(data_type: pa.DataType, column: str) -> None:
    """Check that the elements of a list column are numbers; of others there are lengths, but no arrays.

    Raises:
        ColumnError: they are not.
    """
    numeric = pat.is_integer(data_type) or pat.is_floating(data_type) or pat.is_boolean(data_type)
    if not (numeric or pat.is_null(data_type)):
        raise ColumnError(
            f"column {column!r} holds {data_type} elements, no token ids; name a list of integers"
        )
