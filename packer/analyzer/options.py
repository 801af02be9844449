"""From what a caller asks for to a length definition: exactly one of several ways to say what a length is."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from packer.errors import ColumnError, ConfigError
from packer.samples import LengthDefinition, default_definition
from packer.samples.conversations import looks_like_chats
from packer.samples.definition import PromptForm, TrainOn
from packer.samples.ragged import is_list_type
from packer.samples.tokenizer import Counter
from packer.sources import Source, find_field, storage_type, take_column

ColumnChoice = str | Mapping[str, str] | None
"""A column, or ``{metric: column}`` for one metric each, or none."""

TOOLS = "tools"
"""The column beside chats that their tools are looked for in."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""The column beside chats that further arguments of their template are looked for in, as TRL does."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_DEFINITIONS = (
    "tokens_column",
    "features_column",
    "length_column",
    "text_column",
    "messages_column",
    "prompt_column",
    "text_template",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthOptions:
    """What a caller says about the length of a sample; see ``analyze``."""

    tokens_column: ColumnChoice = None
    features_column: ColumnChoice = None
    length_column: ColumnChoice = None
    text_column: str | None = None
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: ColumnChoice = None
    text_template: str | None = None
    completion_template: str | None = None
    tokenizer: str | os.PathLike[str] | None = None
    special_tokens: bool = True
    counter: Counter = "tokenizers"
    train_on: TrainOn | None = None
    eos: bool | None = None
    tools_column: str | None = None
    labels_column: str | None = None
    shift: bool = True
    documents: bool = False

    @property
    def given(self) -> list[str]:
        """Names of the options that say what a length is: exactly one, where they are right."""
        return [name for name in _DEFINITIONS if getattr(self, name)]


def define_length(source: Source, options: LengthOptions) -> LengthDefinition:
    """Return the one length definition that the options give.

    Raises:
        ConfigError: none or several definitions, or an option that does not belong to the one.
    """
    given = options.given
    if not given:
        return _without_definition(source, options)
    if len(given) > 1:
        both = " and ".join(map(_spelt, given))
        raise ConfigError(f"{both} each say what a length is; give one of them")
    chosen = given[0]
    _check_belonging(chosen, options)
    for column in (
        options.tokens_column,
        options.features_column,
        options.length_column,
        options.completion_column,
    ):
        if isinstance(column, Mapping):
            check_metric_names(column)
    if options.tokens_column:
        return LengthDefinition.by_tokens(
            options.tokens_column, labels_column=options.labels_column, shift=options.shift
        )
    if options.features_column:
        return LengthDefinition.by_features(options.features_column, labels_column=options.labels_column)
    if options.length_column:
        return LengthDefinition.by_length(
            options.length_column, labels_column=options.labels_column, shift=options.shift
        )
    tokenizer = os.fspath(options.tokenizer or "")
    if options.text_column:
        if options.train_on not in (None, "all"):
            raise ConfigError(
                f"--train-on {options.train_on} needs to know what of a text that is; give --prompt-column "
                "and --completion-column, --text-template and --completion-template, or --messages-column"
            )
        return LengthDefinition.by_text(
            options.text_column,
            tokenizer=tokenizer,
            special_tokens=options.special_tokens,
            counter=options.counter,
            eos=bool(options.eos),
        )
    if options.text_template:
        return LengthDefinition.by_template(
            options.text_template,
            completion_template=options.completion_template,
            tokenizer=tokenizer,
            train_on=options.train_on,
            special_tokens=options.special_tokens,
            eos=options.eos,
        )
    if options.messages_column:
        return LengthDefinition.by_messages(
            options.messages_column,
            tokenizer=tokenizer,
            train_on=options.train_on or "assistant",
            **_beside(source, options.messages_column, options),
        )
    prompt = str(options.prompt_column)
    form = _form(source, prompt)
    if form == "texts" and options.tools_column:
        raise ConfigError("--tools-column has no meaning for prompts that are texts; leave it out")
    assert options.completion_column is not None
    return LengthDefinition.by_prompt(
        prompt,
        options.completion_column,
        tokenizer=tokenizer,
        form=form,
        train_on=options.train_on or "completion",
        special_tokens=options.special_tokens,
        eos=options.eos,
        **(_beside(source, prompt, options) if form == "messages" else {}),
    )


def _without_definition(source: Source, options: LengthOptions) -> LengthDefinition:
    """Return the definition of a source that needs none."""
    if options.completion_column:
        raise ConfigError("--completion-column is what follows --prompt-column; give both")
    if options.completion_template:
        raise ConfigError("--completion-template is what follows --text-template; give both")
    definition = default_definition(source)
    if definition is None:
        listed = ", ".join(map(_spelt, _DEFINITIONS))
        raise ConfigError(f"nothing says what the length of a sample is; give one of {listed}")
    definition = replace(definition, documents=options.documents)
    for name in ("labels_column", "tokenizer", "train_on", "eos", "tools_column"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{_spelt(name)} has no meaning for a .bin/.idx source; leave it out")
    return definition


_BELONGS: dict[str, tuple[str, ...]] = {
    "tokenizer": ("text_column", "messages_column", "prompt_column", "text_template"),
    "train_on": ("text_column", "messages_column", "prompt_column", "text_template"),
    "eos": ("text_column", "prompt_column", "text_template"),
    "completion_column": ("prompt_column",),
    "completion_template": ("text_template",),
    "tools_column": ("messages_column", "prompt_column"),
    "labels_column": ("tokens_column", "features_column", "length_column"),
}
"""What goes with which definitions."""


def _check_belonging(chosen: str, options: LengthOptions) -> None:
    """Refuse options that do not go with the definition, and ask for those without which it is none."""
    spelt = _spelt(chosen)
    if chosen in _BELONGS["tokenizer"] and options.tokenizer is None:
        raise ConfigError(f"{spelt} needs --tokenizer: a tokenizer.json, or a folder that holds one")
    if chosen == "prompt_column" and not options.completion_column:
        raise ConfigError("--prompt-column needs --completion-column: what is to be learnt")
    if chosen != "text_column" and options.counter != "tokenizers":
        raise ConfigError(
            f"--counter {options.counter} counts texts; it has no meaning without --text-column"
        )
    if options.labels_column and chosen not in _BELONGS["labels_column"]:
        raise ConfigError(f"--labels-column has no meaning with {spelt}: labels go with token ids")
    if options.documents:
        raise ConfigError(
            f"--documents are those of .bin/.idx; they have no meaning with {spelt}, leave it out"
        )
    for name, definitions in _BELONGS.items():
        if getattr(options, name) is not None and chosen not in definitions:
            raise ConfigError(f"{_spelt(name)} has no meaning with {spelt}; leave it out")


def _spelt(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _beside(source: Source, chats: str, options: LengthOptions) -> dict[str, str | None]:
    """Return the columns of tools and template arguments: those named, or of the usual names."""
    parent = chats.rpartition(".")[0]

    def usual(name: str) -> str | None:
        column = f"{parent}.{name}" if parent else name
        return column if any(_has_column(part.schema, column) for part in source.parts) else None

    return {
        "tools": options.tools_column or usual(TOOLS),
        "arguments": usual(TEMPLATE_ARGUMENTS),
    }


def _has_column(schema: pa.Schema, column: str) -> bool:
    try:
        find_field(schema, column, owner="")
    except ColumnError:
        return False
    return True


def _form(source: Source, column: str) -> PromptForm:
    """Tell texts from messages: by the column's type, or where JSON has none by its first value."""
    for part in source.parts:
        data_type = storage_type(find_field(part.schema, column, owner=part.location.path).type)
        if is_list_type(data_type):
            return "messages"
    for unit in source.units([column], target_bytes=1 << 20):
        for batch in source.read(unit, {column: None}):
            for value in take_column(batch, column):
                if value.is_valid:
                    return "messages" if looks_like_chats(value.as_py()) else "texts"
    return "texts"


def check_metric_names(names: Mapping[str, object]) -> None:
    """Refuse names that cannot be the name of a folder and of files in it."""
    for name in names:
        if not _METRIC_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a metric; use letters and digits, and after the first '_', '-', '.'"
            )
