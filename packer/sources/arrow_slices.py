"""Single rows of a remote Arrow record batch: only the bytes of their values are fetched.

A row of a list column is two offsets and what lies between them. So a row is read in rounds: first the
offsets, then what they lead to. The rows of a micro-batch go through their rounds together, each one fetch.
"""

from collections.abc import Callable, Generator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from packer.sources.columns import storage_type
from packer.sources.ipc_messages import BatchLayout
from packer.sources.remote import Range

Rounds = Generator[list[Range], list[bytes], pa.Array]
"""Yields what has to be fetched next, is sent it, and returns the array of one row."""


def can_slice(schema: pa.Schema, fields: Sequence[int]) -> bool:
    """Whether rows of these columns can be read without the rest of their batches."""
    before = range(max(fields, default=-1) + 1)
    return all(_is_countable(schema.field(field).type) for field in before) and all(
        _is_sliceable(schema.field(field).type) for field in fields
    )


def _is_sliceable(data_type: pa.DataType) -> bool:
    data_type = storage_type(data_type)
    if pat.is_list(data_type) or pat.is_large_list(data_type):
        return _is_sliceable(data_type.value_type)
    if pat.is_struct(data_type):
        return all(_is_sliceable(field.type) for field in data_type)
    return _is_bytes(data_type) or _is_fixed(data_type)


def _is_countable(data_type: pa.DataType) -> bool:
    """Whether the type alone says how many buffers a column has."""
    data_type = storage_type(data_type)
    odd = (pat.is_union, pat.is_run_end_encoded, pat.is_string_view, pat.is_binary_view)
    return not any(is_odd(data_type) for is_odd in odd) and all(
        _is_countable(data_type.field(number).type) for number in range(data_type.num_fields)
    )


def read_rows(
    places: Sequence[tuple[BatchLayout, int]],
    schema: pa.Schema,
    fields: Sequence[int],
    fetch: Callable[[Sequence[Range]], list[bytes]],
) -> list[pa.RecordBatch]:
    """Return one single-row batch for each place.

    Args:
        places: layout of a record batch that is not compressed, and a row within it.
        schema: of the file.
        fields: the top-level fields to read, which `can_slice` takes.
        fetch: reads ranges of the file.

    Raises:
        ValueError: the batch is damaged.
    """
    rows = [
        _row_of_column(layout, schema, field, row) for layout, row in places for field in fields
    ]  # (places * fields,)
    arrays: list[pa.Array | None] = [None] * len(rows)
    wanted = {number: next(rounds) for number, rounds in enumerate(rows)}
    while wanted:
        pieces = iter(fetch([bounds for ranges in wanted.values() for bounds in ranges]))
        following = {}
        for number, ranges in wanted.items():
            try:
                following[number] = rows[number].send([next(pieces) for _ in ranges])
            except StopIteration as ended:
                arrays[number] = ended.value
        wanted = following
    chosen = pa.schema([schema.field(field) for field in fields])
    step = len(fields)
    return [
        pa.RecordBatch.from_arrays(arrays[at : at + step], schema=chosen)
        for at in range(0, step * len(places), step)
    ]


def _row_of_column(layout: BatchLayout, schema: pa.Schema, field: int, row: int) -> Rounds:
    node, buffer = 0, 0
    for before in range(field):
        nodes, buffers = _counts(schema.field(before).type)
        node, buffer = node + nodes, buffer + buffers
    array, _, _ = yield from _values(layout, schema.field(field).type, node, buffer, row, row + 1)
    return array


def _values(
    layout: BatchLayout, data_type: pa.DataType, node: int, buffer: int, start: int, stop: int
) -> Generator[list[Range], list[bytes], tuple[pa.Array, int, int]]:
    """Read ``[start, stop)`` of a column; return it, and the first node and buffer of the next one."""
    if start == stop:
        nodes, buffers = _counts(data_type)
        return pa.array([], data_type), node + nodes, buffer + buffers
    if isinstance(data_type, pa.BaseExtensionType):
        array, node, buffer = yield from _values(layout, data_type.storage_type, node, buffer, start, stop)
        return pa.ExtensionArray.from_storage(data_type, array), node, buffer
    length, num_nulls = layout.nodes[node].tolist()
    if not 0 <= start <= stop <= length:
        raise ValueError(f"rows {start} to {stop} of a column of {length}")
    size = stop - start
    # Nothing is stored of a column without nulls.
    bits = layout.within(buffer, start // 8, -(-stop // 8)) if num_nulls and size else (0, 0)
    if _is_fixed(data_type):
        width = data_type.bit_width // 8
        bounds = layout.within(buffer + 1, start * width, stop * width)
        marks, values = yield [bits, bounds]
        array = pa.Array.from_buffers(data_type, size, [_marks(marks, start, stop), pa.py_buffer(values)])
        return array, node + 1, buffer + 2
    if pat.is_struct(data_type):
        (marks,) = yield [bits]
        node, buffer, children = node + 1, buffer + 1, []
        for field in data_type:
            child, node, buffer = yield from _values(layout, field.type, node, buffer, start, stop)
            children.append(child)
        array = pa.Array.from_buffers(data_type, size, [_marks(marks, start, stop)], children=children)
        return array, node, buffer
    dtype = np.dtype(np.int64 if _has_large_offsets(data_type) else np.int32)
    bounds = layout.within(buffer + 1, start * dtype.itemsize, (stop + 1) * dtype.itemsize)
    marks, stored = yield [bits, bounds]
    offsets = np.frombuffer(stored, dtype)
    if offsets[0] < 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"row {start} begins after it ends")
    held = [_marks(marks, start, stop), pa.py_buffer(offsets - offsets[0])]
    first, last = int(offsets[0]), int(offsets[-1])
    if _is_bytes(data_type):
        (text,) = yield [layout.within(buffer + 2, first, last)]
        return pa.Array.from_buffers(data_type, size, [*held, pa.py_buffer(text)]), node + 1, buffer + 3
    child, node, buffer = yield from _values(layout, data_type.value_type, node + 1, buffer + 2, first, last)
    return pa.Array.from_buffers(data_type, size, held, children=[child]), node, buffer


def _marks(stored: bytes, start: int, stop: int) -> pa.Buffer | None:
    """Return the bits of ``[start, stop)``, the first of them in front; None where nothing is stored."""
    if not stored:
        return None
    bits = np.unpackbits(np.frombuffer(stored, np.uint8), bitorder="little")[start % 8 :][: stop - start]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _counts(data_type: pa.DataType) -> tuple[int, int]:
    """Return how many nodes and buffers a column of a type has in a record batch."""
    data_type = storage_type(data_type)
    if pat.is_null(data_type):
        return 1, 0
    own = 2
    if pat.is_struct(data_type) or pat.is_fixed_size_list(data_type):
        own = 1
    elif pat.is_list_view(data_type) or pat.is_large_list_view(data_type) or _is_bytes(data_type):
        own = 3
    below = [_counts(data_type.field(number).type) for number in range(data_type.num_fields)]
    return 1 + sum(nodes for nodes, _ in below), own + sum(buffers for _, buffers in below)


def _is_bytes(data_type: pa.DataType) -> bool:
    return any(
        of(data_type) for of in (pat.is_string, pat.is_large_string, pat.is_binary, pat.is_large_binary)
    )


def _is_fixed(data_type: pa.DataType) -> bool:
    return bool(pat.is_integer(data_type) or pat.is_floating(data_type))


def _has_large_offsets(data_type: pa.DataType) -> bool:
    kinds = (pat.is_large_list, pat.is_large_string, pat.is_large_binary)
    return any(is_large(data_type) for is_large in kinds)
