"""JSON lines to record batches: pyarrow's parser, and a slow exact one that decides where pyarrow refuses."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from packer.errors import SourceError
from packer.sources.part import OnError
from packer.sources.skipped import mark_skipped

_WHITESPACE = b" \t\r"
_MAX_SHOWN = 60
_FAST_BYTES = 16 << 10  # below, it takes longer to start pyarrow's parser than to parse


class LineError(SourceError):
    """A line that is no row; `row` counts the rows before it in the block."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


def parse_lines(
    lines: Sequence[bytes],
    paths: Mapping[str, Sequence[str]],
    types: Mapping[str, pa.DataType | None],
    on_error: OnError = "error",
) -> pa.RecordBatch:
    """Parse lines, none of them blank, into one batch with one flat column for each of ``paths``.

    A key that a line lacks is null. Of a key that stands twice in a line the last value counts.

    Args:
        lines: one JSON object each.
        paths: for each column the keys that lead to it.
        types: for each column its Arrow type; None for values of any shape, delivered as JSON text.
        on_error: what becomes of a line that is no row; `skipped_rows` tells which were skipped.

    Raises:
        LineError: a line is no JSON object, or a value is not of its column's type.
    """
    try:
        return _parse(lines, paths, types, replace=on_error == "replace")
    except LineError:
        if on_error != "skip":
            raise
    wrong = [row for row, line in enumerate(lines) if not _is_row(line, paths, types)]
    readable = list(lines)
    for row in wrong:
        readable[row] = b"{}"
    return mark_skipped(_parse(readable, paths, types), wrong)


def _is_row(line: bytes, paths: Mapping[str, Sequence[str]], types: Mapping[str, pa.DataType | None]) -> bool:
    try:
        _parse_slow([line], paths, types)
    except LineError:
        return False
    return True


def _parse(
    lines: Sequence[bytes],
    paths: Mapping[str, Sequence[str]],
    types: Mapping[str, pa.DataType | None],
    *,
    replace: bool = False,
) -> pa.RecordBatch:
    typed = all(data_type is not None for data_type in types.values())
    if typed and sum(map(len, lines)) >= _FAST_BYTES:
        batch = _parse_fast(lines, paths, types)
        if batch is not None:
            return batch
    return _parse_slow(lines, paths, types, replace=replace)


def parse_object(line: bytes, row: int) -> dict[str, Any]:
    """Parse one line into a dictionary.

    Raises:
        LineError: it is no JSON object.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(
            row, f"no JSON object on one line ({_reason(error, line)}); correct the line"
        ) from error
    if not isinstance(content, dict):
        raise LineError(
            row, f"a JSON {_kind(content)} where JSON Lines have one object a line; convert the file"
        )
    return content


def whole_file_problem(first_line: bytes) -> str | None:
    """Return what to say of a file by its first line, if that begins a JSON text of many lines; else None."""
    first_line = first_line.strip()
    is_array = first_line.startswith(b"[")
    if not (is_array or first_line.endswith((b"{", b"[", b","))):
        return None
    found = "an array" if is_array else "an object over several lines"
    taken = "'.[]'" if is_array else "."
    return f"{found} where JSON Lines have an object a line; convert it: jq -c {taken} FILE > FILE.jsonl"


def _parse_fast(
    lines: Sequence[bytes], paths: Mapping[str, Sequence[str]], types: Mapping[str, pa.DataType | None]
) -> pa.RecordBatch | None:
    """Return pyarrow's result; None where it refuses, or names keys in a way that a schema cannot say."""
    block = b"\n".join(lines)
    tree: dict[str, Any] = {}
    for column, path in paths.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                return None
        if path[-1] in node:
            return None
        node[path[-1]] = types[column]
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(_fields(tree)), unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != len(lines):
            return None
        arrays = []
        for path in paths.values():
            array = table.column(path[0]).combine_chunks()
            arrays.append(pc.struct_field(array, list(path[1:])) if len(path) > 1 else array)
        batch = pa.RecordBatch.from_arrays(arrays, names=list(paths))
        batch.validate(full=True)  # pyarrow lets strings pass that are not UTF-8
    except (pa.ArrowException, OverflowError):
        return None
    return batch


def _fields(tree: Mapping[str, Any]) -> list[pa.Field]:
    return [
        pa.field(key, pa.struct(_fields(node)) if isinstance(node, dict) else node)
        for key, node in tree.items()
    ]


def _parse_slow(
    lines: Sequence[bytes],
    paths: Mapping[str, Sequence[str]],
    types: Mapping[str, pa.DataType | None],
    *,
    replace: bool = False,
) -> pa.RecordBatch:
    values: dict[str, list[Any]] = {column: [] for column in paths}
    for row, line in enumerate(lines):
        content = parse_object(line, row)
        for column, path in paths.items():
            value = _lookup(content, path, row)
            values[column].append(with_replaced_surrogates(value) if replace else value)
    arrays = [_convert(column, values[column], types[column]) for column in paths]
    return pa.RecordBatch.from_arrays(arrays, names=list(paths))


def _lookup(content: Any, path: Sequence[str], row: int) -> Any:
    for key in path:
        if content is None:
            return None
        if not isinstance(content, dict):
            raise LineError(row, f"key {key!r} is looked for in a JSON {_kind(content)}; correct the line")
        content = content.get(key)
    return content


def _convert(column: str, values: list[Any], data_type: pa.DataType | None) -> pa.Array:
    if data_type is None:
        return pa.array([None if value is None else json.dumps(value) for value in values], pa.large_string())
    try:
        return _array(values, data_type)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        for row, value in enumerate(values):
            try:
                _array([value], data_type)
            except UnicodeError:
                raise LineError(
                    row,
                    f"column {column!r} holds half of a surrogate pair, which is no character "
                    f"({_shown(value)}); correct the line, or read on with --on-error skip or replace",
                ) from error
            except (pa.ArrowException, OverflowError):
                asked = _ASKED.get(data_type, str(data_type))
                raise LineError(
                    row,
                    f"column {column!r} holds {_shown(value)} where {asked} was expected; correct the line "
                    "or name another column",
                ) from error
        raise SourceError(f"column {column!r} cannot be read as {data_type}: {error}") from error


def with_replaced_surrogates(value: Any) -> Any:
    """Return what JSON says with U+FFFD for every half of a character; Python has joined the whole ones."""
    if isinstance(value, str):
        return _UNPAIRED.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [with_replaced_surrogates(element) for element in value]
    if isinstance(value, dict):
        return {
            with_replaced_surrogates(key): with_replaced_surrogates(below) for key, below in value.items()
        }
    return value


_UNPAIRED = re.compile("[\ud800-\udfff]")


def _array(values: list[Any], data_type: pa.DataType) -> pa.Array:
    """Return an Arrow array; a fraction is no integer, while pyarrow would cut it off."""
    array = pa.array(values, data_type)
    if data_type in _OF_INTEGERS:
        for value in values:
            elements = value if isinstance(value, list) else [value]
            if float in set(map(type, elements)) and not all(map(_is_whole, elements)):
                raise pa.ArrowInvalid("a number with a fraction")
    return array


def _is_whole(value: Any) -> bool:
    return not isinstance(value, float) or value.is_integer()


_OF_INTEGERS = (pa.int64(), pa.list_(pa.int64()))
_ASKED = {pa.list_(pa.int64()): "a list of integers", pa.int64(): "an integer", pa.string(): "a text"}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return f"{_kind(value)} {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + ' ...'}"


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _reason(error: Exception, line: bytes) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if b"\0" in line:
        return "NUL bytes, as a crash or a hole in a copy leaves them; cut them off or fetch it again"
    if b"\r" in line.strip(_WHITESPACE):
        return "bare carriage returns; convert the line ends"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}"
    return str(error)
