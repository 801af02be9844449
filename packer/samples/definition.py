"""What the length of a sample is: which column, counted how. The manifest stores it, readers apply it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.types as pat

from packer.errors import ColumnError, ConfigError
from packer.samples.chat import ChatTokenizer, open_chat_tokenizer
from packer.samples.ragged import is_list_type, is_token_list_type
from packer.samples.tokenizer import Counter, TextTokenizer, open_tokenizer
from packer.sources import Columns, OnError, Source, find_field, storage_type

Kind = Literal["tokens", "length", "text", "messages", "indexed"]

SEQLEN = "seqlen"
LOSS_TOKENS = "loss_tokens"
INDEXED_COLUMN = "input_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthDefinition:
    """How a row becomes a length, and token ids. Built by the class methods, one for each kind."""

    kind: Kind
    """``tokens``: elements of a list column; ``length``: an integer column; ``text``: tokens of a string
    column; ``messages``: tokens of a chat through its template; ``indexed``: sequences of ``.bin/.idx``."""
    columns: tuple[tuple[str, str], ...]
    """(metric, column) pairs; more than one only for ``tokens`` and ``length``."""
    tokenizer: str | None = None
    """``tokenizer.json``, a folder that holds one, or a name, as the user gave it."""
    tokenizer_sha256: str | None = None
    """Hash of the tokenizer; None accepts any."""
    special_tokens: bool = True
    """``text``: count the tokens that the tokenizer adds (BOS, EOS, CLS ...)."""
    counter: Counter = "tokenizers"
    """``text``: the library that counts; ``gigatoken`` is held against ``tokenizers`` on part of the data."""
    on_error: OnError = "error"
    """What becomes of a row that cannot be read: it ends the run, has length 0, or its texts are mended."""
    labels_column: str | None = None
    """List column beside the tokens, −100 where nothing is predicted; gives the metric ``loss_tokens``."""
    shift: bool = True
    """The label of token i is predicted from token i − 1, so the first label of a sample never counts."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"length definition of unknown kind {self.kind!r}; one of {', '.join(get_args(Kind))}"
            )
        names = [metric for metric, _ in self.columns]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"metrics of a length definition must be named once each, not {names}")
        if len(names) > 1 and self.kind not in ("tokens", "length"):
            raise ConfigError(f"a definition by {self.kind} takes one column, not {len(names)}")
        if (self.tokenizer is None) == (self.kind in ("text", "messages")):
            need = "needs a tokenizer" if self.tokenizer is None else "takes no tokenizer"
            raise ConfigError(f"a definition by {self.kind} {need}")
        if self.labels_column is not None and self.kind not in ("tokens", "length"):
            raise ConfigError(f"a labels column has no meaning for a definition by {self.kind}; leave it out")
        if self.counter not in get_args(Counter):
            raise ConfigError(f"counter {self.counter!r} is unknown; one of {', '.join(get_args(Counter))}")
        if self.on_error not in get_args(OnError):
            raise ConfigError(f"--on-error {self.on_error}: there are {', '.join(get_args(OnError))}")
        if LOSS_TOKENS in names and self.labels_column is not None:
            raise ConfigError(
                f"a metric cannot be named {LOSS_TOKENS} beside a labels column; choose another name"
            )

    @classmethod
    def by_tokens(
        cls, column: str | Mapping[str, str], *, labels_column: str | None = None, shift: bool = True
    ) -> "LengthDefinition":
        """Length = number of elements of a list column, or one metric for each of ``{metric: column}``."""
        return cls(kind="tokens", columns=_pairs(column), labels_column=labels_column, shift=shift)

    @classmethod
    def by_length(
        cls, column: str | Mapping[str, str], *, labels_column: str | None = None, shift: bool = True
    ) -> "LengthDefinition":
        """Length = value of an integer column."""
        return cls(kind="length", columns=_pairs(column), labels_column=labels_column, shift=shift)

    @classmethod
    def by_text(
        cls, column: str, *, tokenizer: str, special_tokens: bool = True, counter: Counter = "tokenizers"
    ) -> "LengthDefinition":
        """Length = number of tokens of a string column.

        Raises:
            ConfigError: the tokenizer cannot be opened.
        """
        return cls(
            kind="text",
            columns=_pairs(column),
            tokenizer=tokenizer,
            tokenizer_sha256=open_tokenizer(tokenizer, special_tokens=special_tokens).sha256,
            special_tokens=special_tokens,
            counter=counter,
        )

    @classmethod
    def by_messages(cls, column: str, *, tokenizer: str) -> "LengthDefinition":
        """Length = number of tokens of a chat through the tokenizer's template.

        Raises:
            ConfigError: the tokenizer cannot be opened, or has no chat template.
        """
        sha256 = open_chat_tokenizer(tokenizer).sha256
        return cls(kind="messages", columns=_pairs(column), tokenizer=tokenizer, tokenizer_sha256=sha256)

    @classmethod
    def by_index(cls) -> "LengthDefinition":
        """Length = size of a sequence in a ``.bin/.idx`` pair."""
        return cls(kind="indexed", columns=((SEQLEN, INDEXED_COLUMN),))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `measure` yields, the main one first.

        ``messages`` yields ``loss_tokens`` where the template has an assistant mask; it is not named here.
        """
        names = tuple(metric for metric, _ in self.columns)
        return (*names, LOSS_TOKENS) if self.labels_column is not None else names

    @property
    def read_columns(self) -> Columns:
        """The columns to read, each with the type that JSON values are read as."""
        types: dict[str, pa.DataType | None] = {
            "tokens": pa.list_(pa.int64()),
            "indexed": None,
            "length": pa.int64(),
            "text": pa.string(),
            "messages": None,
        }
        wanted = {column: types[self.kind] for _, column in self.columns}
        if self.labels_column is not None:
            wanted[self.labels_column] = types["tokens"]
        return wanted

    def with_tokenizer(self, tokenizer: str | None = None, sha256: str | None = None) -> "LengthDefinition":
        """Return a copy with another place or hash of the tokenizer."""
        return replace(
            self, tokenizer=tokenizer or self.tokenizer, tokenizer_sha256=sha256 or self.tokenizer_sha256
        )

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's form; keys that have no meaning for the kind are left out."""
        content: dict[str, Any] = {"kind": self.kind, "columns": dict(self.columns)}
        if self.on_error != "error":
            content["on_error"] = self.on_error
        if self.tokenizer is not None:
            content["tokenizer"] = self.tokenizer
            content["tokenizer_sha256"] = self.tokenizer_sha256
        if self.kind == "text":
            content["special_tokens"] = self.special_tokens
            content["counter"] = self.counter
        if self.labels_column is not None:
            content |= {"labels_column": self.labels_column, "shift": self.shift}
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "LengthDefinition":
        """Read the manifest's form.

        Raises:
            ConfigError: an unknown key, or a value that has no meaning.
        """
        fields = dict(content)
        columns = fields.pop("columns", None)
        if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns.values()):
            raise ConfigError(f"a length definition maps metrics to columns, not {columns!r}")
        for name, value in fields.items():
            kinds = bool if name in ("special_tokens", "shift") else str | None
            if not isinstance(value, kinds):
                raise ConfigError(f"{name} of a length definition cannot be {value!r}; analyze again")
        try:
            return cls(columns=tuple(columns.items()), **fields)
        except TypeError as error:
            raise ConfigError(f"length definition of another version of packer: {error}") from error


def _pairs(column: str | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return ((SEQLEN, column),) if isinstance(column, str) else tuple(column.items())


def default_definition(source: Source) -> LengthDefinition | None:
    """Return the definition of a source that needs none, a ``.bin/.idx`` one; None for every other."""
    if all(part.format == "indexed" for part in source.parts):
        return LengthDefinition.by_index()
    return None


def check_definition(source: Source, definition: LengthDefinition) -> None:
    """Check, before any row is read, every file's columns and their types, and the tokenizer.

    Raises:
        ColumnError: a missing column or one of a wrong type; names the file and lists its columns.
        ConfigError: the tokenizer is not there, or not the one whose hash the definition holds.
    """
    for part in source.parts:
        if part.known_num_rows == 0:
            continue  # an empty shard need not know the columns of the others
        for column in definition.read_columns:
            owner = part.location.path
            data_type = storage_type(find_field(part.schema, column, owner=owner).type)
            wanted, accepts = _ACCEPTED["tokens" if column == definition.labels_column else definition.kind]
            if not (pat.is_null(data_type) or accepts(data_type)):
                raise ColumnError(f"{owner}: column {column!r} is of type {data_type}; name {wanted}")
    if definition.kind == "text":
        text_tokenizer(definition)
    if definition.kind == "messages":
        chat_tokenizer(definition)


def text_tokenizer(definition: LengthDefinition) -> TextTokenizer:
    """Open the tokenizer of a text definition; it is kept for the life of the process.

    Raises:
        ConfigError: it is not the one whose hash the definition holds.
    """
    tokenizer = open_tokenizer(
        str(definition.tokenizer), special_tokens=definition.special_tokens, counter=definition.counter
    )
    _check_hash(definition, tokenizer.sha256)
    return tokenizer


def chat_tokenizer(definition: LengthDefinition) -> ChatTokenizer:
    """Open the tokenizer of a messages definition; it is kept for the life of the process.

    Raises:
        ConfigError: it, or its template, is not the one whose hash the definition holds.
    """
    tokenizer = open_chat_tokenizer(str(definition.tokenizer))
    _check_hash(definition, tokenizer.sha256)
    return tokenizer


def _check_hash(definition: LengthDefinition, sha256: str) -> None:
    if definition.tokenizer_sha256 not in (None, sha256):
        raise ConfigError(
            f"tokenizer {definition.tokenizer} is not the one that the lengths were taken with (SHA-256 "
            f"{sha256[:12]}…, not {str(definition.tokenizer_sha256)[:12]}…); name that one, or analyze again"
        )


def is_text_type(data_type: pa.DataType) -> bool:
    """Whether a column of this type holds strings, dictionary-encoded or not."""
    if pat.is_dictionary(data_type):
        data_type = data_type.value_type
    return bool(pat.is_string(data_type) or pat.is_large_string(data_type) or pat.is_string_view(data_type))


def check_text(array: pa.Array, column: str) -> pa.Array:
    """Return the array if it holds strings.

    Raises:
        ColumnError: it does not.
    """
    if not (pat.is_null(array.type) or is_text_type(array.type)):
        raise ColumnError(f"column {column!r} is of type {array.type}, not a string; name a string column")
    return array


def _is_message_type(data_type: pa.DataType) -> bool:
    return is_text_type(data_type) or (is_list_type(data_type) and pat.is_struct(data_type.value_type))


_ACCEPTED: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "tokens": (
        "a list of integers; of other sequences measure the lengths, with --length-column or "
        "packer.analyze_dataset",
        is_token_list_type,
    ),
    "indexed": ("a .bin/.idx source", is_list_type),
    "length": (
        "an integer column (whole numbers that pandas made floats for its NaN are cast by astype('Int64'))",
        pat.is_integer,
    ),
    "text": ("a string column", is_text_type),
    "messages": ("a list of messages, each with a role and a content", _is_message_type),
}
