"""Keys: exact integer codes for the values of a column, so that a plan can keep equal ones apart.

Every unit hashes its values to 127 bits (integers are kept as they are), so that equal values are equal over
all files and workers, whatever type holds them. The hashes of all samples are spread over buckets on disk,
and the distinct values of one bucket after the other are numbered. Memory holds those of one bucket of up to
512, and nothing that grows with how often a value occurs.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.analyzer.options import check_metric_names
from packer.arrays import to_numpy, validity
from packer.errors import ColumnError, ConfigError, SourceError
from packer.metrics import KeySummary
from packer.samples.ragged import RowError
from packer.sources import Source, storage_type

HASH_BYTES = 16
_NONE, _INTEGER, _LARGE_INTEGER, _TEXT = 0, 1, 2, 0x80
"""First byte of a hash: no key, int64, uint64 over it; texts and binaries have the bit 0x80."""

_ROWS_OF_BUCKET = 1 << 22
_MOST_BUCKETS = 512
_AT_ONCE = 1 << 20
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, so that neighbouring integers part
_RECORD = np.dtype([("sample", "<i8"), ("hash", f"S{HASH_BYTES}")])

Pieces = Callable[[], Iterable[NDArray[np.integer]]]
"""Gives the hashes of all samples in order, (16·n,) uint8 in pieces; may be called again."""


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column whose values are keys."""

    name: str
    """Of the metric."""
    column: str
    """Dotted path."""


def resolve_keys(
    columns: str | Sequence[str] | Mapping[str, str], source: Source, taken: Iterable[str]
) -> tuple[KeyColumn, ...]:
    """Return the columns to be coded, each under its own name or the one it is given.

    Raises:
        ConfigError: a name that is taken.
        ColumnError: no such column, or one whose values are no keys.
    """
    if isinstance(columns, str):
        columns = [columns]
    named = dict(columns) if isinstance(columns, Mapping) else {column: column for column in columns}
    check_metric_names(named)
    taken = set(taken)
    for name, column in named.items():
        if name in taken:
            raise ConfigError(
                f"--key-column {column}: there is a metric {name!r} already; name it otherwise, as "
                f"KEY={column}"
            )
        data_type = storage_type(source.field(column).type)
        if pat.is_dictionary(data_type):
            data_type = data_type.value_type
        if not (pat.is_null(data_type) or pat.is_integer(data_type) or _is_text(data_type)):
            raise ColumnError(
                f"--key-column {column} holds {data_type}, and keys are texts, integers or binaries; name "
                "such a column"
            )
    return tuple(KeyColumn(name, column) for name, column in named.items())


def hash_values(values: pa.Array, *, is_json: bool = False) -> NDArray[np.uint8]:
    """Return (16·n,) the hash of each value; 16 zeros for a null.

    Texts and binaries of the same bytes are equal, and so are integers of any width.

    Args:
        values: integers, texts, binaries, or a dictionary of them.
        is_json: the values are JSON text, each of a value of its own type.

    Raises:
        RowError: JSON of another kind.
    """
    if pat.is_dictionary(values.type):
        # a null has no place in the dictionary
        places = np.where(validity(values.indices), to_numpy(values.indices), len(values.dictionary))
        entries = _rows_of(hash_values(values.dictionary))
        hashes = np.append(entries, np.zeros((1, HASH_BYTES), np.uint8), axis=0)
        return hashes[places].reshape(-1)
    out = np.zeros((len(values), HASH_BYTES), np.uint8)
    if pat.is_null(values.type):
        return out.reshape(-1)
    if is_json:
        for row, text in enumerate(values.to_pylist()):
            if text is not None:
                out[row] = _hash_json(json.loads(text), row)
        return out.reshape(-1)
    is_there = validity(values)
    if pat.is_integer(values.type):
        numbers = to_numpy(values)
        is_large = numbers > np.iinfo(np.int64).max
        out[:, 8:] = numbers.astype(np.uint64).astype(">u8").view(np.uint8).reshape(-1, 8)
        out[:, 0] = np.where(is_large, _LARGE_INTEGER, _INTEGER)
        out[~is_there] = _NONE
        return out.reshape(-1)
    known: dict[Any, NDArray[np.uint8]] = {}
    for row, value in enumerate(values.to_pylist()):
        if value is not None:
            if value not in known:
                known[value] = _hash_bytes(value.encode() if isinstance(value, str) else value)
            out[row] = known[value]
    return out.reshape(-1)


def _is_text(data_type: pa.DataType) -> bool:
    return bool(
        pat.is_string(data_type)
        or pat.is_large_string(data_type)
        or pat.is_string_view(data_type)
        or pat.is_binary(data_type)
        or pat.is_large_binary(data_type)
        or pat.is_binary_view(data_type)
        or pat.is_fixed_size_binary(data_type)
    )


def _hash_json(value: Any, row: int) -> NDArray[np.uint8]:
    if isinstance(value, str):
        return _hash_bytes(value.encode(errors="surrogatepass"))
    if type(value) is not int or not -(2**63) <= value < 2**64:
        raise RowError(
            row, f"the key {json.dumps(value)[:60]} is no text and no integer of 64 bits; correct the line"
        )
    kind = _LARGE_INTEGER if value >= 2**63 else _INTEGER
    return np.frombuffer(bytes([kind]) + bytes(7) + (value % 2**64).to_bytes(8, "big"), np.uint8)


def _hash_bytes(value: bytes) -> NDArray[np.uint8]:
    digest = np.frombuffer(blake2b(value, digest_size=HASH_BYTES).digest(), np.uint8).copy()
    digest[0] |= _TEXT
    return digest


def _rows_of(hashes: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return (n, 16) views where they can be."""
    return hashes.astype(np.uint8, copy=False).reshape(-1, HASH_BYTES)


@contextmanager
def numbered(
    folder: Path, pieces: Pieces, num_samples: int, origin: str
) -> Iterator[tuple[list[NDArray[np.int64]], KeySummary]]:
    """Number the distinct values of a key, from 0; a sample without one has −1.

    The numbers depend on the values alone, not on how the work was cut.

    Args:
        folder: where temporary files may lie: 24 bytes a sample, and 8 of the codes.
        pieces: the hashes.
        num_samples: how many there are.
        origin: the column, for the summary.

    Yields:
        The code of every sample in order, in pieces, mapped while the context is open; and what is to be
        known of them.
    """
    num_buckets = int(np.clip(-(-num_samples // _ROWS_OF_BUCKET), 1, _MOST_BUCKETS))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".keys-") as scratch:
        paths = [Path(scratch, str(bucket)) for bucket in range(num_buckets)]
        num_keyed = _spread(pieces, paths)
        codes = np.memmap(Path(scratch, "codes"), np.int64, "w+", shape=num_samples)
        for start in range(0, num_samples, _AT_ONCE):
            codes[start : start + _AT_ONCE] = -1
        num_values = max_count = 0
        for path in paths:
            found, most = _number_bucket(path, codes, num_values)
            num_values, max_count = num_values + found, max(max_count, most)
            path.unlink()
        summary = KeySummary(
            origin=origin, num_values=num_values, max_count=max_count, num_nulls=num_samples - num_keyed
        )
        yield [codes[start : start + _AT_ONCE] for start in range(0, num_samples, _AT_ONCE)], summary


def _spread(pieces: Pieces, paths: Sequence[Path]) -> int:
    """Write (sample, hash) of every sample that has a key to the bucket of its hash; return how many have."""
    num_keyed = first = 0
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for piece in pieces():
            hashes = _rows_of(piece)
            keyed = np.flatnonzero(hashes[:, 0] != _NONE)
            records = np.empty(len(keyed), _RECORD)
            records["sample"] = first + keyed
            chosen = np.ascontiguousarray(hashes[keyed])
            records["hash"] = chosen.view(f"S{HASH_BYTES}").reshape(-1)
            mixed = chosen.view(">u8")[:, 1].astype(np.uint64) * _SPREAD
            bucket = (mixed >> np.uint64(32)) % np.uint64(len(paths))
            order = np.argsort(bucket, kind="stable")
            cuts = np.searchsorted(bucket[order], np.arange(len(paths) + 1, dtype=np.uint64))
            for number, file in enumerate(files):
                if cuts[number] < cuts[number + 1]:
                    file.write(records[order[cuts[number] : cuts[number + 1]]].tobytes())
            num_keyed += len(keyed)
            first += len(hashes)
    return num_keyed


def _number_bucket(path: Path, codes: NDArray[np.int64], first: int) -> tuple[int, int]:
    """Write the codes of a bucket's samples, from ``first`` on.

    Returns:
        How many distinct values it has, and how often the most frequent one occurs.
    """

    def records() -> Iterator[NDArray[Any]]:
        with path.open("rb") as file:
            while len(chunk := np.fromfile(file, _RECORD, _AT_ONCE)):
                yield chunk

    distinct = np.empty(0, _RECORD["hash"])
    for chunk in records():
        distinct = np.unique(np.concatenate([distinct, chunk["hash"]]))
    counts = np.zeros(len(distinct), np.int64)
    for chunk in records():
        numbers = np.searchsorted(distinct, chunk["hash"])
        codes[chunk["sample"]] = first + numbers
        counts += np.bincount(numbers, minlength=len(distinct))
    return len(distinct), int(counts.max(initial=0))


KeyFunction = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of samples, returns as many keys: texts, integers, bytes, or None."""


def hash_objects(values: Sequence[Any], num_samples: int, place: str) -> NDArray[np.uint8]:
    """Return (16·n,) the hashes of keys that a function returned.

    Raises:
        SourceError: not as many as there are samples, or others than texts, integers and bytes.
    """
    try:
        array = pa.array(list(values))
        if len(array) != num_samples:
            raise SourceError(f"{place} returned {len(array)} keys for {num_samples} samples")
        if not (pat.is_null(array.type) or pat.is_integer(array.type) or _is_text(array.type)):
            raise pa.ArrowInvalid(f"keys of type {array.type}")
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise SourceError(
            f"{place} returned no keys ({error}); it has to return one text, integer or bytes a sample"
        ) from error
    return hash_values(array)
