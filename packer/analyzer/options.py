"""From what a caller asks for to a length definition: exactly one of several ways to say what a length is."""

import os
import re
from collections.abc import Mapping

from packer.errors import ConfigError
from packer.samples import LengthDefinition, default_definition
from packer.samples.tokenizer import Counter
from packer.sources import Source

ColumnChoice = str | Mapping[str, str] | None
"""A column, or ``{metric: column}`` for one metric each, or none."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def define_length(
    source: Source,
    *,
    tokens_column: ColumnChoice,
    length_column: ColumnChoice,
    text_column: str | None,
    messages_column: str | None,
    tokenizer: str | os.PathLike[str] | None,
    special_tokens: bool,
    counter: Counter,
    labels_column: str | None,
    shift: bool,
) -> LengthDefinition:
    """Return the one length definition that the arguments give; see ``analyze`` for what they mean.

    Raises:
        ConfigError: none or several definitions, or an option that does not belong to the one.
    """
    given = {
        "--tokens-column": tokens_column,
        "--length-column": length_column,
        "--text-column": text_column,
        "--messages-column": messages_column,
    }
    chosen = [option for option, column in given.items() if column]
    if not chosen:
        definition = default_definition(source)
        if definition is None:
            raise ConfigError(f"nothing says what the length of a sample is; give one of {', '.join(given)}")
        if labels_column or tokenizer:
            unused = "--labels-column" if labels_column else "--tokenizer"
            raise ConfigError(f"{unused} has no meaning for a .bin/.idx source; leave it out")
        return definition
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each say what a length is; give one of them")
    by_text = bool(text_column or messages_column)
    if by_text and tokenizer is None:
        raise ConfigError(f"{chosen[0]} needs --tokenizer: a tokenizer.json, or a folder that holds one")
    if not by_text and tokenizer is not None:
        raise ConfigError(f"--tokenizer has no meaning with {chosen[0]}; leave it out")
    if not text_column and counter != "tokenizers":
        raise ConfigError(f"--counter {counter} counts texts; it has no meaning without --text-column")
    if by_text and labels_column:
        raise ConfigError(f"--labels-column has no meaning with {chosen[0]}: labels go with token ids")
    for column in (tokens_column, length_column):
        if isinstance(column, Mapping):
            check_metric_names(column)
    if tokens_column:
        return LengthDefinition.by_tokens(tokens_column, labels_column=labels_column, shift=shift)
    if length_column:
        return LengthDefinition.by_length(length_column, labels_column=labels_column, shift=shift)
    if text_column:
        return LengthDefinition.by_text(
            text_column, tokenizer=os.fspath(tokenizer or ""), special_tokens=special_tokens, counter=counter
        )
    return LengthDefinition.by_messages(str(messages_column), tokenizer=os.fspath(tokenizer or ""))


def check_metric_names(names: Mapping[str, object]) -> None:
    """Refuse names that cannot be the name of a folder and of files in it."""
    for name in names:
        if not _METRIC_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a metric; use letters and digits, and after the first '_', '-', '.'"
            )
