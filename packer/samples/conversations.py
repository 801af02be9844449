"""Rows to conversations: chats in OpenAI's and ShareGPT's shape, as lists of structs or as JSON texts."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from packer.samples.ragged import RowError

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""Roles of ShareGPT files, whose messages have ``from`` and ``value``."""

Message = dict[str, Any]


class Conversation(NamedTuple):
    """What a chat template renders."""

    messages: list[Message]
    """Each with ``role`` and ``content``, and whatever else the template reads: tool calls, reasoning."""
    tools: list[Any] | None = None
    arguments: dict[str, Any] = {}  # noqa: RUF012 (a default that nobody changes)
    """Further arguments of the template, such as ``enable_thinking``."""

    def upto(self, stop: int) -> "Conversation":
        """Return the conversation's first ``stop`` messages."""
        return self._replace(messages=self.messages[:stop])

    def then(self, messages: list[Message]) -> "Conversation":
        """Return the conversation with further messages."""
        return self._replace(messages=self.messages + messages)

    @property
    def options(self) -> str:
        """What tells its tools and arguments from those of another."""
        return json.dumps([self.tools, self.arguments], default=str)


def conversations(
    chats: pa.Array, tools: pa.Array | None = None, arguments: pa.Array | None = None
) -> Iterator[Conversation]:
    """Yield the conversation of every row; without messages where the chat is null or empty.

    Args:
        chats: (rows,) lists of messages, or JSON texts of such.
        tools: (rows,) lists of the tools' schemas, or JSON texts.
        arguments: (rows,) objects, or JSON texts.

    Raises:
        RowError: a row is no chat, or its tools are no list.
    """
    columns = [column for column in (chats, tools, arguments) if column is not None]
    for column in columns:
        try:
            column.validate(full=True)  # pyarrow follows damaged offsets wherever they point
        except pa.ArrowInvalid as error:
            raise RowError(
                0, f"the messages from here on are damaged ({error}); fetch the file again, or correct it"
            ) from error
    for row in range(len(chats)):
        yield Conversation(
            _messages(_value(chats[row], row, "messages"), row),
            None if tools is None else _tools(_value(tools[row], row, "tools"), row),
            {} if arguments is None else _arguments(_value(arguments[row], row, "arguments"), row),
        )


def filled(chats: Iterable[Conversation]) -> dict[int, Conversation]:
    """Return the conversations that have messages, by row."""
    return {row: chat for row, chat in enumerate(chats) if chat.messages}


def looks_like_chats(value: Any) -> bool:
    """Whether a value, or the JSON in a text, is a list of messages."""
    try:
        value = _parsed(value)
    except ValueError:
        return False
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _value(scalar: pa.Scalar, row: int, what: str) -> Any:
    value = scalar.as_py()
    if not isinstance(value, str):
        return _without_nulls(value)
    try:
        return _parsed(value) if value or what == "messages" else None
    except (ValueError, RecursionError) as error:
        raise RowError(row, f"{what} that are a text must be JSON ({error}); correct it") from error


def _parsed(value: Any) -> Any:
    while isinstance(value, str):  # a JSON text may itself hold a JSON text
        value = json.loads(value)
    return value


def _without_nulls(value: Any) -> Any:
    """Leave out null keys: a struct has every key for every row, null where JSON would leave it out."""
    if isinstance(value, dict):
        return {
            key: _without_nulls(item)
            for key, item in value.items()
            if item is not None or key in ("content", "value")
        }
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _messages(chat: Any, row: int) -> list[Message]:
    if chat is None:
        return []
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise RowError(row, "messages must be a list of objects, each with a role and a content; correct it")
    return [_message(message) for message in chat]


def _message(message: Message) -> Message:
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "role" not in message and {"from", "value"} <= message.keys():
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value"), **message}
    return message


def _tools(tools: Any, row: int) -> list[Any] | None:
    if not tools:  # templates take an empty list for tools without any
        return None
    if not isinstance(tools, list):
        raise RowError(row, "tools must be a list of objects, each the schema of a tool; correct it")
    try:
        return [_parsed(tool) for tool in tools]
    except ValueError as error:
        raise RowError(row, f"a tool that is a text must be JSON ({error}); correct it") from error


def _arguments(arguments: Any, row: int) -> dict[str, Any]:
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RowError(row, "arguments of the chat template must be an object; correct it")
    return arguments
