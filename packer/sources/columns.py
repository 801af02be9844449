"""Columns by dotted path: finding one in a schema, and taking one out of a record batch."""

import difflib

import pyarrow as pa
import pyarrow.compute as pc

from packer.errors import ColumnError
from packer.wording import on_one_line

_SHOWN = 10


def find_field(schema: pa.Schema, column: str, *, owner: str) -> pa.Field:
    """Return the field at a dotted path; a top-level column of that very name comes first.

    Args:
        schema: the columns of a file.
        column: name, or path into structs such as ``sample.input_ids``.
        owner: the file, for the message.

    Raises:
        ColumnError: there is no such column (the message lists those there are), or two have this name.
    """
    is_text = column.isprintable() or column.encode(errors="ignore").decode() == column
    path = split_path(schema, column) if is_text else None  # JSON can name halves of characters
    if path is None:
        raise ColumnError(f"{owner} has no column {column!r}; {_listed(schema, column)}")
    if len(schema.get_all_field_indices(path[0])) > 1:
        raise ColumnError(f"{owner} has several columns named {path[0]!r}; rename all but one")
    field = schema.field(path[0])
    for name in path[1:]:
        field = field.type.field(name)
    return field


def split_path(schema: pa.Schema, column: str) -> list[str] | None:
    """Return the names that lead to a dotted column from the top level down, or None."""
    if schema.get_all_field_indices(column):
        return [column]
    for dot in (at for at, letter in enumerate(column) if letter == "."):
        head, rest = column[:dot], column[dot + 1 :]
        if schema.get_all_field_indices(head):
            below = schema.field(head).type if len(schema.get_all_field_indices(head)) == 1 else None
            tail = _split_in_struct(below, rest)
            if tail is not None:
                return [head, *tail]
    return None


def take_column(batch: pa.RecordBatch, column: str) -> pa.Array:
    """Return a column by dotted path; a null struct makes its fields null."""
    path = split_path(batch.schema, column)
    if path is None:
        raise ColumnError(f"no column {column!r}; {_listed(batch.schema, column)}")
    array = batch.column(path[0])
    if len(path) > 1:
        array = pc.struct_field(array, path[1:])
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def decoded_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema once every name in it is known to be UTF-8; those of a damaged file may not be.

    Raises:
        UnicodeDecodeError: a name is not.
    """
    fields = list(schema)
    while fields:
        field = fields.pop()
        _ = field.name
        if pa.types.is_nested(field.type):
            fields += [field.type.field(number) for number in range(field.type.num_fields)]
    return schema


def storage_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type below extension types."""
    while isinstance(data_type, pa.BaseExtensionType):
        data_type = data_type.storage_type
    return data_type


def _split_in_struct(data_type: pa.DataType | None, column: str) -> list[str] | None:
    if data_type is None or not pa.types.is_struct(data_type):
        return None
    return split_path(pa.schema(list(data_type)), column)


def _leaves(schema: pa.Schema, prefix: str = "") -> list[str]:
    names = []
    for field in schema:
        if pa.types.is_struct(field.type) and field.type.num_fields:
            names += _leaves(pa.schema(list(field.type)), f"{prefix}{field.name}.")
        else:
            names.append(f"{prefix}{field.name}")
    return names


def _listed(schema: pa.Schema, column: str) -> str:
    names = list(map(on_one_line, _leaves(schema)))
    if not names:
        return "it has no columns at all"
    close = difflib.get_close_matches(column, names, n=1)
    guess = f"did you mean {close[0]!r}? It" if close else "it"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{guess} has: {', '.join(names[:_SHOWN])}{more}"
