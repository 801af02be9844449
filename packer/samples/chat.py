"""Chats to tokens through the chat template of a tokenizer, and which of the tokens the assistant wrote.

Needs transformers, which renders the template in a sandbox. A template that marks the assistant's turns with
``{% generation %}`` says itself what the assistant wrote. Of any other it is found by rendering the chat up
to each of its turns, where that is exact: where the beginning of the chat is rendered as in the whole.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import ConfigError, MissingExtraError
from packer.samples.conversations import Conversation, conversations, filled
from packer.samples.encoded import Encoded, Tokens, gathered
from packer.samples.ragged import RowError
from packer.samples.tokenizer import is_failure, load_transformers_tokenizer

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_GROUP_ROWS = 64
_CURE = (
    "put {% generation %} and {% endgeneration %} around what the assistant writes in the chat template, or "
    "choose --train-on all"
)
_PROBE = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


class ChatTokenizer:
    """A tokenizer with a chat template, with the hash of both."""

    def __init__(self, tokenizer: Any, reference: str) -> None:
        """Take a tokenizer of transformers.

        Args:
            tokenizer: has ``apply_chat_template``.
            reference: what the user called it, for messages.

        Raises:
            ConfigError: it has no chat template.
        """
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"tokenizer {reference} has no chat template; name the folder of a chat model's tokenizer"
            ) from error
        if not isinstance(template, str):
            raise ConfigError(f"the chat template of tokenizer {reference} is no text; save it again")
        tokenizer.model_max_length = sys.maxsize  # nothing is cut, so nothing is to be warned of
        self._tokenizer = tokenizer
        self._reference = reference
        self._added_tokens = tuple(getattr(tokenizer, "added_tokens_encoder", {}))
        self.has_marks = _GENERATION.search(template) is not None
        """Whether the template says which tokens the assistant wrote."""
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if hasattr(backend, "to_str") else json.dumps(tokenizer.get_vocab())
        self.sha256 = hashlib.sha256(f"{content}\n{template}".encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; every id is smaller."""
        return len(self._tokenizer)

    def check_masks(self) -> None:
        """Refuse a template of which the assistant's tokens cannot be told, before any row is read.

        Raises:
            ConfigError: it has no marks, and renders the beginning of a chat otherwise than the whole.
        """
        if self.has_marks:
            return
        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError(
                f"tokenizer {self._reference} does not say where in a text a token stands, so that the "
                "assistant's tokens cannot be found; save a fast tokenizer, or choose --train-on all"
            )
        try:
            self.tokens({0: _PROBE}, masks=True)
        except _InexactError as error:
            raise ConfigError(f"tokenizer {self._reference}: {error}") from error
        except RowError:  # a template that takes other chats than this one
            return

    def encode(
        self,
        chats: pa.Array,
        tools: pa.Array | None = None,
        arguments: pa.Array | None = None,
        *,
        masks: bool | None = None,
    ) -> Encoded:
        """Return the tokens of a column of chats; null and empty chats have none.

        Args:
            chats: (rows,) see `conversations`.
            tools: (rows,) what the template describes to the assistant.
            arguments: (rows,) further arguments of the template.
            masks: tell which tokens the assistant wrote; by default where the template marks them.

        Raises:
            RowError: a row is no chat, the template refuses it, or what the assistant wrote cannot be told.
        """
        masked = self.has_marks if masks is None else masks
        found = self.tokens(filled(conversations(chats, tools, arguments)), masks=masked)
        return gathered(found, len(chats), masked=masked)

    def tokens(
        self, chats: Mapping[int, Conversation], *, masks: bool = False, opens_turn: bool = False
    ) -> dict[int, Tokens]:
        """Return the tokens of every chat.

        Args:
            chats: by row, none without messages.
            masks: tell which tokens the assistant wrote.
            opens_turn: end with what opens the assistant's turn (``add_generation_prompt``).

        Raises:
            RowError: the template refuses a chat, or it cannot be told what the assistant wrote.
        """
        encoded: dict[int, Tokens] = {}
        rows = list(chats)
        for first in range(0, len(rows), _GROUP_ROWS):
            group = {row: chats[row] for row in rows[first : first + _GROUP_ROWS]}
            if masks and not self.has_marks:
                encoded |= self._encode_by_turns(group)
                continue
            for alike in _by_options(group):
                found = self._apply(
                    alike,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=masks,
                    add_generation_prompt=opens_turn,
                    truncation=False,
                    padding=False,
                )
                for at, row in enumerate(alike):
                    mask = np.array(found["assistant_masks"][at], np.bool_) if masks else None
                    encoded[row] = Tokens(_ids(found["input_ids"][at]), mask)
        return {row: encoded[row] for row in rows}

    def _encode_by_turns(self, chats: Mapping[int, Conversation]) -> dict[int, Tokens]:
        """Find the assistant's tokens by their place in the rendered text, as marks would."""
        texts, spans = {}, {}
        for row, chat in chats.items():
            texts[row] = self._render(row, chat)
            spans[row] = self._spans(row, chat, texts[row])
        try:
            found = self._tokenizer(
                list(texts.values()),
                add_special_tokens=False,
                return_offsets_mapping=True,
                truncation=False,
                padding=False,
            )
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ConfigError(
                f"tokenizer {self._reference} cannot encode a chat ({error}); it is damaged, save it again"
            ) from error
        encoded = {}
        for at, row in enumerate(texts):
            # (tokens, 2): where each begins and ends in the text
            places = np.array(found["offset_mapping"][at], np.int64).reshape(-1, 2)
            mask = np.zeros(len(places), np.bool_)
            for start, stop in spans[row]:
                mask |= (places[:, 1] > start) & (places[:, 0] < stop)
            encoded[row] = Tokens(_ids(found["input_ids"][at]), mask)
        return encoded

    def _spans(self, row: int, chat: Conversation, text: str) -> list[tuple[int, int]]:
        """Return where in the chat's text each turn of the assistant begins and ends."""
        spans = []
        for at, message in enumerate(chat.messages):
            if message.get("role") != "assistant":
                continue
            if at == 0:
                raise _InexactError(
                    row,
                    "the chat begins with the assistant, and without marks in the chat template it cannot be "
                    f"told where its turn begins; {_CURE}",
                )
            before = self._render(row, chat.upto(at), add_generation_prompt=True)
            turn = text if at + 1 == len(chat.messages) else self._render(row, chat.upto(at + 1))
            if not (text.startswith(turn) and turn.startswith(before)):
                raise _InexactError(
                    row,
                    "the chat template has no marks for what the assistant writes, and renders the beginning "
                    f"of a chat otherwise than in the whole, so that it cannot be found; {_CURE}",
                )
            spans.append((len(before), self._end_of_turn(turn, len(before))))
        return spans

    def _end_of_turn(self, turn: str, start: int) -> int:
        """Return where a turn ends: with its end token, without the white space between turns."""
        stripped = turn.rstrip()
        return len(stripped) if len(stripped) > start and stripped.endswith(self._added_tokens) else len(turn)

    def _render(self, row: int, chat: Conversation, **options: Any) -> str:
        text: str = self._apply({row: chat}, tokenize=False, **options)[0]
        return text

    def _apply(self, chats: Mapping[int, Conversation], **options: Any) -> Any:
        """Apply the template to chats with the same tools and arguments."""
        first = next(iter(chats.values()))
        try:
            return self._tokenizer.apply_chat_template(
                [chat.messages for chat in chats.values()],
                tools=first.tools,
                **(first.arguments | options),
            )
        except BaseException as error:  # templates raise what they like
            if not is_failure(error):
                raise
            for row, chat in chats.items():
                if len(chats) == 1:
                    raise RowError(
                        row, f"the chat template refuses it ({error}); correct the messages"
                    ) from error
                self._apply({row: chat}, **options)
            raise


class _InexactError(RowError):
    """It cannot be told which tokens of a chat the assistant wrote."""


def _by_options(chats: Mapping[int, Conversation]) -> list[dict[int, Conversation]]:
    """Group chats that can be rendered in one call."""
    groups: dict[str, dict[int, Conversation]] = {}
    for row, chat in chats.items():
        groups.setdefault(chat.options, {})[row] = chat
    return list(groups.values())


def _ids(ids: list[int]) -> NDArray[np.int32]:
    try:
        return np.array(ids, np.int32)
    except OverflowError as error:
        raise ConfigError(
            f"the tokenizer gives an id that is none ({error}); it is damaged, save it again"
        ) from error


@lru_cache(maxsize=4)
def open_chat_tokenizer(reference: str) -> ChatTokenizer:
    """Open a tokenizer with its chat template: a folder, its ``tokenizer.json``, or a name known offline.

    Raises:
        ConfigError: there is none, or it has no chat template.
        MissingExtraError: transformers, or jinja2, which renders the template, is not installed.
    """
    for name in ("transformers", "jinja2"):
        if find_spec(name) is None:
            raise MissingExtraError(
                f"chats are tokenized through their template, which needs {name}; install "
                "'microbatch-packer[chat]'"
            )
    folder = os.path.dirname(reference) or "." if os.path.isfile(reference) else reference
    return ChatTokenizer(load_transformers_tokenizer(folder), reference)
