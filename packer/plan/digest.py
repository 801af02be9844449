"""Hashes of a plan: of a record batch's values, of all values together, and of the header.

The leaves of the tree are hashes of values, not of file bytes, so that the content hash does not depend on
the version of pyarrow. A reader checks a leaf when it first touches a record batch, a large one when it comes
back to it, which is as soon as a second row is asked for: a damaged or exchanged file stops the run.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_numpy, validity

HEADER_HASH = "header_sha256"


def validate(batch: pa.RecordBatch) -> None:
    """Check that the buffers of a record batch hold what its shape says, before anything looks into them.

    Raises:
        ArrowInvalid: they do not.
    """
    batch.validate()
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            column.dictionary.validate(full=True)


def batch_digest(batch: pa.RecordBatch) -> str:
    """Return the SHA-256 of a record batch's values, column by column, in little-endian bytes.

    A list column gives the lengths of its lists (int32), then its elements; a nullable column one byte a row
    (1: there is a value), then the values with 0 for null; a dictionary column its dictionary as JSON, then
    its indices; a boolean one byte a row.
    """
    digest = hashlib.sha256(f"{batch.num_rows}".encode())
    for field, column in zip(batch.schema, batch.columns, strict=True):
        digest.update(f"\n{field.name} {_type_name(field.type)}\n".encode())
        if pa.types.is_list(field.type):
            offsets = to_numpy(column.offsets)
            digest.update(_bytes_of(np.diff(offsets)))
            digest.update(_bytes_of(to_numpy(column.values)[offsets[0] : offsets[-1]]))
            continue
        if pa.types.is_dictionary(field.type):
            digest.update(json.dumps(column.dictionary.to_pylist()).encode())
            column = column.indices
        values = to_numpy(column)
        if field.nullable:
            is_valid = validity(column)
            digest.update(_bytes_of(is_valid))
            values = np.where(is_valid, values, 0)
        digest.update(_bytes_of(values))
    return digest.hexdigest()


def content_hash(leaves: Mapping[str, Iterable[str]]) -> str:
    """Return the hash over all values of a plan.

    Args:
        leaves: table name → the digests of its record batches, in order.
    """
    digest = hashlib.sha256()
    for name, digests in leaves.items():
        digest.update(f"{name}\n".encode())
        for leaf in digests:
            digest.update(bytes.fromhex(leaf))
    return digest.hexdigest()


def header_hash(header: Mapping[str, Any]) -> str:
    """Return the hash of a header without its own hash, over one canonical spelling of its JSON."""
    rest = {key: value for key, value in header.items() if key != HEADER_HASH}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _type_name(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list<{kind.value_type}>"
    return "dictionary" if pa.types.is_dictionary(kind) else str(kind)


def _bytes_of(values: NDArray[Any]) -> memoryview:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).view(np.uint8).data
