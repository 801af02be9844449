"""The texts of a row: a column's, or columns joined by a template, with the end token behind them."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from packer.arrays import to_arrow
from packer.samples.definition import LengthDefinition, check_text
from packer.samples.ragged import RowError, valid_rows
from packer.samples.template import TextTemplate
from packer.samples.tokenizer import is_unicode
from packer.sources import take_column


def texts_of(batch: pa.RecordBatch, definition: LengthDefinition) -> pa.Array:
    """(rows,) the text of every row, null where it has none.

    Raises:
        RowError: a text that is to be joined is not UTF-8.
    """
    if definition.text_template is None:
        column = definition.columns[0][1]
        return _ended(check_text(take_column(batch, column), column), definition.eos)
    return _ended(_rendered(batch, definition.text_template), definition.eos)


def prompts_and_wholes(
    batch: pa.RecordBatch, definition: LengthDefinition
) -> tuple[pa.Array, list[pa.Array]]:
    """(rows,) the prompt of every row, and the prompt with each completion; null where one of them is.

    Raises:
        RowError: a text that is to be joined is not UTF-8.
    """
    if definition.completion_template is not None:
        prompts = pc.fill_null(_rendered(batch, str(definition.text_template)), "")
        completions = [_rendered(batch, definition.completion_template)]
    else:
        prompts = _strings(batch, str(definition.prompt_column))
        completions = [_strings(batch, column) for _, column in definition.columns]
    wholes = [_joined(prompts, _ended(completion, definition.eos)) for completion in completions]
    whole_rows = to_arrow(np.logical_and.reduce([valid_rows(whole) for whole in wholes]))
    # an array: with a scalar, pyarrow before 24 takes the texts of a slice from another place
    nothing = pa.nulls(len(prompts), pa.large_string())
    return (
        pc.if_else(whole_rows, prompts, nothing),
        [pc.if_else(whole_rows, whole, nothing) for whole in wholes],
    )


def _ended(texts: pa.Array, eos: str | None) -> pa.Array:
    """Append the end token to the texts that do not end in it."""
    if eos is None:
        return texts
    texts = _plain(texts)
    return pc.if_else(pc.ends_with(texts, eos), texts, _joined(texts, pa.scalar(eos, pa.large_string())))


def _joined(texts: pa.Array, ends: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(texts, ends, pa.scalar("", pa.large_string()))


def _rendered(batch: pa.RecordBatch, template: str) -> pa.Array:
    """Join columns to texts; null where all of them are."""
    parsed = TextTemplate(template)
    arrays = {column: _strings(batch, column) for column in parsed.columns}
    has_text = np.logical_or.reduce([valid_rows(array) for array in arrays.values()])
    values = {column: _decoded(array, column) for column, array in arrays.items()}
    return pa.array(
        [parsed.render(values, row) if has_text[row] else None for row in range(batch.num_rows)],
        pa.large_string(),
    )


def _strings(batch: pa.RecordBatch, column: str) -> pa.Array:
    return _plain(check_text(take_column(batch, column), column))


def _plain(texts: pa.Array) -> pa.Array:
    """Return the texts without dictionary, in the type that holds any amount of them."""
    if pat.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    return texts.cast(pa.large_string())


def _decoded(texts: pa.Array, column: str) -> list[str | None]:
    try:
        values: list[str | None] = texts.to_pylist()
    except UnicodeDecodeError as error:
        bad = next(row for row in range(len(texts)) if not is_unicode(texts[row]))
        raise RowError(bad, f"column {column!r} holds a text that is not UTF-8; correct it") from error
    return values
