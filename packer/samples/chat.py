"""Chats to tokens through the chat template of a tokenizer, and which of the tokens the assistant wrote.

Needs transformers, which renders the template in a sandbox. A template that marks the assistant's turns with
``{% generation %}`` gives a mask; only the tokens under it are trained on.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import ConfigError, MissingExtraError
from packer.samples.ragged import RowError
from packer.samples.tokenizer import is_failure, load_transformers_tokenizer

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_GROUP_ROWS = 64
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""Roles of ShareGPT files, whose messages have ``from`` and ``value``."""


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
        self.has_mask = _GENERATION.search(template) is not None
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if hasattr(backend, "to_str") else json.dumps(tokenizer.get_vocab())
        self.sha256 = hashlib.sha256(f"{content}\n{template}".encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; every id is smaller."""
        return len(self._tokenizer)

    def encode(
        self, chats: pa.Array
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return the ids of all chats end to end, (rows,) how many each has, and which the assistant wrote.

        Null and empty chats have none. The last is None where the template has no mask.

        Raises:
            RowError: a row is no chat, or the template refuses it.
        """
        counts = np.zeros(len(chats), np.int64)
        ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
        mask: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
        for rows, conversations in _groups(chats):
            encoded = self._apply(rows, conversations)
            for at, row in enumerate(rows):
                try:
                    ids.append(np.array(encoded["input_ids"][at], np.int32))
                except OverflowError as error:
                    raise ConfigError(
                        f"the tokenizer gives an id that is none ({error}); it is damaged, save it again"
                    ) from error
                counts[row] = len(ids[-1])
                if self.has_mask:
                    mask.append(np.array(encoded["assistant_masks"][at], np.bool_))
        return np.concatenate(ids), counts, np.concatenate(mask) if self.has_mask else None

    def _apply(self, rows: list[int], conversations: list[Any]) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                conversations,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=self.has_mask,
                truncation=False,
                padding=False,
            )
        except BaseException as error:  # templates raise what they like
            if not is_failure(error):
                raise
            if len(rows) == 1:
                raise RowError(
                    rows[0], f"the chat template refuses it ({error}); correct the messages"
                ) from error
            for row, conversation in zip(rows, conversations, strict=True):
                self._apply([row], [conversation])
            raise


def _groups(chats: pa.Array) -> Iterator[tuple[list[int], list[Any]]]:
    try:
        chats.validate(full=True)  # pyarrow follows damaged offsets wherever they point
    except pa.ArrowInvalid as error:
        raise RowError(
            0, f"the messages from here on are damaged ({error}); fetch the file again, or correct it"
        ) from error
    for start in range(0, len(chats), _GROUP_ROWS):
        group = chats.slice(start, _GROUP_ROWS)
        found = {row: _messages(chat.as_py(), row) for row, chat in enumerate(group, start)}
        filled = {row: messages for row, messages in found.items() if messages}
        if filled:
            yield list(filled), list(filled.values())


def _messages(chat: Any, row: int) -> list[dict[str, Any]]:
    """Return a chat as a list of ``{"role": ..., "content": ...}``, read from JSON where it is a text."""
    try:
        while isinstance(chat, str):  # a JSON text may itself hold a JSON text
            chat = json.loads(chat)
    except ValueError as error:
        raise RowError(row, f"messages that are a text must be JSON ({error}); correct it") from error
    if chat is None:
        return []
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise RowError(row, "messages must be a list of objects, each with a role and a content; correct it")
    return [_message(message) for message in chat]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    # A struct has every key for every message, null where JSON would leave it out.
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "role" not in message and {"from", "value"} <= message.keys():
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value"), **message}
    return message


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
