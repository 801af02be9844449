"""What the length of a sample is: which column, counted how. The manifest stores it, readers apply it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.types as pat

from packer.errors import ColumnError, ConfigError
from packer.samples.chat import ChatTokenizer, open_chat_tokenizer
from packer.samples.features import is_feature_type
from packer.samples.ragged import is_list_type, is_text_type, is_token_list_type
from packer.samples.template import TextTemplate
from packer.samples.tokenizer import Counter, TextTokenizer, open_tokenizer
from packer.sources import Columns, OnError, Source, by_document, find_field, storage_type

Kind = Literal["tokens", "features", "length", "text", "messages", "indexed", "prompt", "template"]
TrainOn = Literal["assistant", "completion", "all"]
PromptForm = Literal["texts", "messages"]

SEQLEN = "seqlen"
LOSS_TOKENS = "loss_tokens"
INDEXED_COLUMN = "input_ids"

_STORED = ("tokens", "features", "length")
"""Kinds whose lengths the data hold, rather than a tokenizer's."""
_PARTS: dict[str, tuple[TrainOn, ...]] = {
    "messages": ("assistant", "all"),
    "prompt": ("completion", "all"),
    "template": ("completion", "all"),
    "text": ("all",),
}
"""What of a sample may train, by kind; the first is the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthDefinition:
    """How a row becomes a length, and token ids. Built by the class methods, one for each kind."""

    kind: Kind
    """``tokens``: elements of a list column of ids; ``features``: of numbers, or of frames of them;
    ``length``: an integer column; ``text``: tokens of a string column; ``messages``: tokens of a chat through
    its template; ``indexed``: sequences of ``.bin/.idx``; ``prompt``: tokens of a prompt and its completion;
    ``template``: of a text that columns are joined to."""
    columns: tuple[tuple[str, str], ...]
    """(metric, column) pairs; more than one only for what the data hold, and for ``prompt``, where each is a
    completion and the sample a pair of both. Of a template the first column of what trains."""
    tokenizer: str | None = None
    """``tokenizer.json``, a folder that holds one, or a name, as the user gave it."""
    tokenizer_sha256: str | None = None
    """Hash of the tokenizer; None accepts any."""
    special_tokens: bool = True
    """Of texts: count the tokens that the tokenizer adds (BOS, EOS, CLS ...)."""
    counter: Counter = "tokenizers"
    """``text``: the library that counts; ``gigatoken`` is held against ``tokenizers`` on part of the data."""
    on_error: OnError = "error"
    """What becomes of a row that cannot be read: it ends the run, has length 0, or its texts are mended."""
    labels_column: str | None = None
    """List column beside the tokens, −100 where nothing is predicted; gives the metric ``loss_tokens``."""
    shift: bool = True
    """The label of token i is predicted from token i − 1, so the first label of a sample never counts."""
    train_on: TrainOn | None = None
    """Which tokens of a text or chat the loss is on. None, of older manifests: the assistant's where the
    chat template marks them, else all."""
    eos: str | None = None
    """Of texts: the end token that is appended to what does not end in it; None for none."""
    prompt_column: str | None = None
    """``prompt``: the column before the completion."""
    form: PromptForm | None = None
    """``prompt``: whether prompt and completions are texts, or messages for the chat template."""
    text_template: str | None = None
    """``template``: the text, with columns in braces."""
    completion_template: str | None = None
    """``template``: a second text, behind the first, that trains."""
    tools_column: str | None = None
    """Of chats: the tools that their template describes."""
    arguments_column: str | None = None
    """Of chats: further arguments of their template."""
    documents: bool = False
    """``indexed``: a sample is a document of the index, not a sequence."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"length definition of unknown kind {self.kind!r}; one of {', '.join(get_args(Kind))}"
            )
        names = [metric for metric, _ in self.columns]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"metrics of a length definition must be named once each, not {names}")
        if len(names) > 1 and self.kind not in (*_STORED, "prompt"):
            raise ConfigError(f"a definition by {self.kind} takes one column, not {len(names)}")
        if (self.tokenizer is None) == self.is_tokenized:
            need = "needs a tokenizer" if self.tokenizer is None else "takes no tokenizer"
            raise ConfigError(f"a definition by {self.kind} {need}")
        self._check_parts()
        if self.labels_column is not None and self.kind not in _STORED:
            raise ConfigError(f"a labels column has no meaning for a definition by {self.kind}; leave it out")
        if self.documents and self.kind != "indexed":
            raise ConfigError(f"documents have no meaning for a definition by {self.kind}; leave them out")
        if self.counter not in get_args(Counter):
            raise ConfigError(f"counter {self.counter!r} is unknown; one of {', '.join(get_args(Counter))}")
        if self.on_error not in get_args(OnError):
            raise ConfigError(f"--on-error {self.on_error}: there are {', '.join(get_args(OnError))}")
        if LOSS_TOKENS in names and self.labels_column is not None:
            raise ConfigError(
                f"a metric cannot be named {LOSS_TOKENS} beside a labels column; choose another name"
            )

    def _check_parts(self) -> None:
        """Check what of a tokenized sample is what, and what of it trains."""
        is_prompt = self.kind == "prompt"
        if is_prompt != (self.prompt_column is not None) or is_prompt != (self.form in get_args(PromptForm)):
            raise ConfigError("a definition by prompt, and no other, names a prompt column and its form")
        if (self.kind == "template") != (self.text_template is not None):
            raise ConfigError("a definition by template, and no other, has a text template")
        if self.completion_template is not None and self.text_template is None:
            raise ConfigError("a completion template stands beside a text template; give both")
        taken = {SEQLEN, LOSS_TOKENS} if self.is_pair else {LOSS_TOKENS}
        if is_prompt and (named := taken & {metric for metric, _ in self.columns}):
            raise ConfigError(
                f"a completion cannot be named {named.pop()}, which is a metric of the whole sample; choose "
                "another name"
            )
        if (self.tools_column or self.arguments_column) and not self.is_chat:
            raise ConfigError("tools go with chats; a definition of texts has none, leave their column out")
        if self.eos is not None and (self.is_chat or not self.is_tokenized):
            raise ConfigError("an end token is appended to texts only; chat templates end a turn themselves")
        if self.train_on is None:
            return
        parts = _PARTS.get(self.kind, ())
        if self.train_on not in parts:
            choice = f"choose {' or '.join(parts)}" if parts else "leave it out"
            raise ConfigError(
                f"--train-on {self.train_on} has no meaning for a definition by {self.kind}; {choice}"
            )
        if self.train_on == "completion" and self.kind == "template" and self.completion_template is None:
            raise ConfigError(
                "--train-on completion needs --completion-template, which says what of the text it is; give "
                "it, or choose --train-on all"
            )

    @classmethod
    def by_tokens(
        cls, column: str | Mapping[str, str], *, labels_column: str | None = None, shift: bool = True
    ) -> "LengthDefinition":
        """Length = number of elements of a list column, or one metric for each of ``{metric: column}``."""
        return cls(kind="tokens", columns=_pairs(column), labels_column=labels_column, shift=shift)

    @classmethod
    def by_features(
        cls, column: str | Mapping[str, str], *, labels_column: str | None = None
    ) -> "LengthDefinition":
        """Length = number of elements of a list column of features: of numbers, or of frames of them.

        Labels, one a frame, are what that frame predicts: none is left out.
        """
        return cls(kind="features", columns=_pairs(column), labels_column=labels_column, shift=False)

    @classmethod
    def by_length(
        cls, column: str | Mapping[str, str], *, labels_column: str | None = None, shift: bool = True
    ) -> "LengthDefinition":
        """Length = value of an integer column."""
        return cls(kind="length", columns=_pairs(column), labels_column=labels_column, shift=shift)

    @classmethod
    def by_text(
        cls,
        column: str,
        *,
        tokenizer: str,
        special_tokens: bool = True,
        counter: Counter = "tokenizers",
        eos: bool = False,
    ) -> "LengthDefinition":
        """Length = number of tokens of a string column.

        Args:
            column: the texts.
            tokenizer: ``tokenizer.json``, a folder that holds one, or a name.
            special_tokens: count the tokens that the tokenizer adds.
            counter: the library that counts.
            eos: append the tokenizer's end token to what does not end in it.

        Raises:
            ConfigError: the tokenizer cannot be opened, or names no end token.
        """
        opened = open_tokenizer(tokenizer, special_tokens=special_tokens)
        return cls(
            kind="text",
            columns=_pairs(column),
            tokenizer=tokenizer,
            tokenizer_sha256=opened.sha256,
            special_tokens=special_tokens,
            counter=counter,
            train_on="all",
            eos=_end_token(opened, tokenizer, asked=eos),
        )

    @classmethod
    def by_template(
        cls,
        template: str,
        *,
        tokenizer: str,
        completion_template: str | None = None,
        train_on: TrainOn | None = None,
        special_tokens: bool = True,
        eos: bool | None = None,
    ) -> "LengthDefinition":
        r"""Length = number of tokens of a text that string columns are joined to.

        Args:
            template: such as ``"{instruction}\n{input}\n{response}"``; a line whose columns are all empty in
                a row is left out.
            tokenizer: ``tokenizer.json``, a folder that holds one, or a name.
            completion_template: a second text behind the first; by default it alone trains.
            train_on: ``completion``, or ``all``.
            special_tokens: count the tokens that the tokenizer adds.
            eos: append the tokenizer's end token; by default where it has one.

        Raises:
            ConfigError: a template that is none, or a tokenizer that cannot be opened or names no end token.
        """
        trained = TextTemplate(template if completion_template is None else completion_template)
        TextTemplate(template)
        opened = open_tokenizer(tokenizer, special_tokens=special_tokens)
        return cls(
            kind="template",
            columns=_pairs(trained.columns[0]),
            text_template=template,
            completion_template=completion_template,
            tokenizer=tokenizer,
            tokenizer_sha256=opened.sha256,
            special_tokens=special_tokens,
            train_on=train_on or ("all" if completion_template is None else "completion"),
            eos=_end_token(opened, tokenizer, asked=eos),
        )

    @classmethod
    def by_prompt(
        cls,
        prompt: str,
        completion: str | Mapping[str, str],
        *,
        tokenizer: str,
        form: PromptForm = "texts",
        train_on: TrainOn = "completion",
        special_tokens: bool = True,
        eos: bool | None = None,
        tools: str | None = None,
        arguments: str | None = None,
    ) -> "LengthDefinition":
        """Length = number of tokens of a prompt and its completion.

        The completion begins at the first token that the prompt alone does not have at its place.

        Args:
            prompt: column of what the model is given.
            completion: column of what it is to answer; ``{metric: column}`` for several answers to each
                prompt, such as ``{"chosen": "chosen", "rejected": "rejected"}``: a metric for each, and
                ``seqlen`` for their sum.
            tokenizer: ``tokenizer.json``, a folder that holds one, or a name.
            form: ``texts``, or ``messages`` for the chat template.
            train_on: ``completion``, or ``all``.
            special_tokens: of texts: count the tokens that the tokenizer adds.
            eos: of texts: append the tokenizer's end token to the completion; by default where it has one.
            tools: of messages: column of the tools that the template describes.
            arguments: of messages: column of further arguments of the template.

        Raises:
            ConfigError: a tokenizer that cannot be opened, or lacks an end token or chat template.
        """
        is_chat = form == "messages"
        opened: TextTokenizer | ChatTokenizer = (
            open_chat_tokenizer(tokenizer)
            if is_chat
            else open_tokenizer(tokenizer, special_tokens=special_tokens)
        )
        if isinstance(opened, ChatTokenizer) and eos:
            raise ConfigError(
                "--eos has no meaning for messages: the chat template ends a turn; leave it out"
            )
        return cls(
            kind="prompt",
            columns=_pairs(completion),
            prompt_column=prompt,
            form=form,
            tokenizer=tokenizer,
            tokenizer_sha256=opened.sha256,
            special_tokens=special_tokens,
            train_on=train_on,
            eos=None if isinstance(opened, ChatTokenizer) else _end_token(opened, tokenizer, asked=eos),
            tools_column=tools,
            arguments_column=arguments,
        )

    @classmethod
    def by_messages(
        cls,
        column: str,
        *,
        tokenizer: str,
        train_on: TrainOn = "assistant",
        tools: str | None = None,
        arguments: str | None = None,
    ) -> "LengthDefinition":
        """Length = number of tokens of a chat through the tokenizer's template.

        Args:
            column: lists of messages, in OpenAI's or ShareGPT's shape, or JSON texts of such.
            tokenizer: folder of a tokenizer with a chat template, or a name.
            train_on: ``assistant``, or ``all``.
            tools: column of the tools that the template describes.
            arguments: column of further arguments of the template.

        Raises:
            ConfigError: the tokenizer cannot be opened, has no chat template, or one of which the assistant's
                tokens cannot be told.
        """
        opened = open_chat_tokenizer(tokenizer)
        if train_on == "assistant":
            opened.check_masks()
        return cls(
            kind="messages",
            columns=_pairs(column),
            tokenizer=tokenizer,
            tokenizer_sha256=opened.sha256,
            train_on=train_on,
            tools_column=tools,
            arguments_column=arguments,
        )

    @classmethod
    def by_index(cls, *, documents: bool = False) -> "LengthDefinition":
        """Length = size of a sequence in a ``.bin/.idx`` pair, or of a document, all its sequences."""
        return cls(kind="indexed", columns=((SEQLEN, INDEXED_COLUMN),), documents=documents)

    @property
    def is_tokenized(self) -> bool:
        """Whether a tokenizer makes the tokens."""
        return self.kind in ("text", "messages", "prompt", "template")

    @property
    def is_chat(self) -> bool:
        """Whether a chat template makes the tokens."""
        return self.kind == "messages" or self.form == "messages"

    @property
    def counts_texts(self) -> bool:
        """Whether a sample is one text, all of which trains: its tokens can be counted without their ids."""
        return self.kind == "text" or (self.kind == "template" and self.completion_template is None)

    @property
    def is_pair(self) -> bool:
        """Whether a sample is several sequences: a prompt with each of its completions."""
        return self.kind == "prompt" and len(self.columns) > 1

    @property
    def trained_part(self) -> str:
        """What the loss is on: ``assistant``, ``completion``, ``labels`` or ``all``."""
        if self.labels_column is not None:
            return "labels"
        if self.kind == "messages" and self.train_on is None:
            return "assistant" if chat_tokenizer(self).has_marks else "all"
        return self.train_on or "all"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `measure` yields, the main one first."""
        names = tuple(metric for metric, _ in self.columns)
        if self.is_pair:
            return (SEQLEN, *names, LOSS_TOKENS)
        return names if self.trained_part == "all" else (*names, LOSS_TOKENS)

    @property
    def read_columns(self) -> Columns:
        """The columns to read, each with the type that JSON values are read as."""
        return {column: _TYPES[content] for column, content in self.contents.items()}

    @property
    def contents(self) -> dict[str, str]:
        """What each column to read has to hold: a key of what `check_definition` accepts."""
        if self.kind == "template":
            texts = [self.text_template, self.completion_template]
            return {
                column: "text" for text in texts if text is not None for column in TextTemplate(text).columns
            }
        content = ("messages" if self.is_chat else "text") if self.kind == "prompt" else self.kind
        wanted: dict[str, str] = {column: content for _, column in self.columns}
        if self.prompt_column is not None:
            wanted[self.prompt_column] = content
        if self.labels_column is not None:
            wanted[self.labels_column] = "tokens"
        return wanted | {
            column: "any" for column in (self.tools_column, self.arguments_column) if column is not None
        }

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
        if self.is_tokenized and not self.is_chat:
            content["special_tokens"] = self.special_tokens
        if self.kind == "text":
            content["counter"] = self.counter
        if self.labels_column is not None:
            content |= {"labels_column": self.labels_column, "shift": self.shift}
        if self.documents:
            content["documents"] = True
        optional = {name: getattr(self, name) for name in _OPTIONAL}
        return content | {name: value for name, value in optional.items() if value is not None}

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
            kinds = bool if name in ("special_tokens", "shift", "documents") else str | None
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


def samples_of(source: Source, definition: LengthDefinition) -> Source:
    """Return the source whose rows are the samples that a definition means.

    Raises:
        ConfigError: it means documents, and a file is no ``.bin/.idx`` pair.
    """
    return (by_document(source) if definition.documents else source).tolerating(definition.on_error)


def check_definition(source: Source, definition: LengthDefinition) -> None:
    """Check, before any row is read, every file's columns and their types, and the tokenizer.

    Raises:
        ColumnError: a missing column or one of a wrong type; names the file and lists its columns.
        ConfigError: the tokenizer is not there, or not the one whose hash the definition holds.
    """
    for part in source.parts:
        if part.known_num_rows == 0:
            continue  # an empty shard need not know the columns of the others
        for column, content in definition.contents.items():
            owner = part.location.path
            data_type = storage_type(find_field(part.schema, column, owner=owner).type)
            wanted, accepts = _ACCEPTED[content]
            if not (pat.is_null(data_type) or accepts(data_type)):
                raise ColumnError(f"{owner}: column {column!r} is of type {data_type}; name {wanted}")
    if definition.is_tokenized:
        tokenizer_of(definition)


def tokenizer_of(definition: LengthDefinition) -> TextTokenizer | ChatTokenizer:
    """Open the tokenizer of a definition that has one.

    Raises:
        ConfigError: it is not the one whose hash the definition holds.
    """
    return chat_tokenizer(definition) if definition.is_chat else text_tokenizer(definition)


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


def _end_token(tokenizer: TextTokenizer, reference: str, *, asked: bool | None) -> str | None:
    """Return the end token that is to be appended to texts: None where the tokenizer adds it itself.

    Raises:
        ConfigError: it is asked for, and nothing says which token it is.
    """
    if asked and tokenizer.end_token is None:
        raise ConfigError(
            f"--eos: nothing says which token of tokenizer {reference} ends a text; name the folder of a "
            "tokenizer whose tokenizer_config.json has an eos_token, or append it to the texts"
        )
    return None if asked is False or tokenizer.ends_texts else tokenizer.end_token


def _check_hash(definition: LengthDefinition, sha256: str) -> None:
    if definition.tokenizer_sha256 not in (None, sha256):
        raise ConfigError(
            f"tokenizer {definition.tokenizer} is not the one that the lengths were taken with (SHA-256 "
            f"{sha256[:12]}…, not {str(definition.tokenizer_sha256)[:12]}…); name that one, or analyze again"
        )


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


def _is_feature_column(data_type: pa.DataType) -> bool:
    return is_text_type(data_type) or is_feature_type(data_type)


_ACCEPTED: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "tokens": (
        "a list of integers; of other sequences name --features-column, or the lengths with --length-column",
        is_token_list_type,
    ),
    "features": ("a list of numbers, or of lists of numbers", _is_feature_column),
    "indexed": ("a .bin/.idx source", is_list_type),
    "length": (
        "an integer column (whole numbers that pandas made floats for its NaN are cast by astype('Int64'))",
        pat.is_integer,
    ),
    "text": ("a string column", is_text_type),
    "messages": ("a list of messages, each with a role and a content", _is_message_type),
    "any": ("any column", lambda _: True),
}
_TYPES: dict[str, pa.DataType | None] = {
    "tokens": pa.list_(pa.int64()),
    "length": pa.int64(),
    "text": pa.string(),
    "features": None,
    "indexed": None,
    "messages": None,
    "any": None,
}
_OPTIONAL = (
    "train_on",
    "eos",
    "prompt_column",
    "form",
    "text_template",
    "completion_template",
    "tools_column",
    "arguments_column",
)
