"""``shards.json`` and the files beside it: names, fields, and what tells them from others.

``shard-00000.arrow`` and its successors are Arrow IPC files, one record batch for each row of the plan.
``batches.bin`` says of every record batch where it lies and what its bytes must sum up to, `BATCH` after
`BATCH` in the order of the rows, so that a reader fetches and checks one without looking at any other.
"""

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from packer.errors import ShardsError
from packer.sources.location import Location

FORMAT = "packer-shards"
VERSION = 1

HEADER_FILE = "shards.json"
BATCHES_FILE = "batches.bin"
HEADER_HASH = "header_sha256"

SAMPLE_ID = "sample_id"
START = "start"
OWN_COLUMNS = (SAMPLE_ID, START)

BATCH = np.dtype(
    [("offset", "<i8"), ("num_bytes", "<i8"), ("num_read", "<i8"), ("crc32", "<u4"), ("num_rows", "<i4")]
)
"""Where a record batch lies in its shard: its message begins at ``offset`` and has ``num_bytes``. Training
reads the first ``num_read`` of them, whose CRC-32 is ``crc32``. ``num_rows`` is its samples or pieces."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

Fields = Mapping[str, "str | Mapping[str, str]"]
"""Column by field of a sample; of a pair, by member and field."""


def shard_file(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:05d}.arrow"


class ShardEntry(NamedTuple):
    """What the header says of one shard."""

    first_row: int
    """Row, counted over the epochs written, of its first record batch."""
    num_rows: int
    """Record batches: rows of the plan."""
    num_bytes: int
    sha256: str
    batches_sha256: str
    """Of its part of ``batches.bin``."""


class EpochEntry(NamedTuple):
    """An epoch that was written."""

    epoch: int
    num_rows: int
    """Its rows: micro-batches of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The content of ``shards.json``."""

    content_hash: str
    """Of the plan whose rows these are."""
    num_samples: int
    """Samples of the data set that was planned, written or not."""
    epochs: tuple[EpochEntry, ...]
    """In the order in which their rows follow each other."""
    fields: Fields
    """What a sample delivers, and the column that holds it."""
    kind: str
    """Kind of the length definition, as in the manifest."""
    trained_part: str
    """What the loss is on: ``all``, ``assistant``, ``completion`` or ``labels``."""
    columns: Mapping[str, str]
    """Every column with its type, for people."""
    num_columns_read: int
    """Training reads the first so many."""
    arrow_schema: bytes
    """The same columns as Arrow's own message; base64 in the file."""
    compression: str
    shards: tuple[ShardEntry, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all epochs written."""
        return sum(epoch.num_rows for epoch in self.epochs)

    def to_bytes(self) -> bytes:
        """Return the file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["arrow_schema"] = b64encode(self.arrow_schema).decode()
        content["epochs"] = [epoch._asdict() for epoch in self.epochs]
        content["shards"] = [
            {"file": shard_file(number), **shard._asdict()} for number, shard in enumerate(self.shards)
        ]
        content[HEADER_HASH] = _hash_of(content)
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def is_shards(location: Location) -> bool:
    """Whether a folder holds shards of ours, by the first bytes of its header."""
    marker = Location(f"{location.path.rstrip('/')}/{HEADER_FILE}")
    return marker.is_file() and f'"{FORMAT}"'.encode() in marker.read(0, 256)


def read_header(folder: Location) -> Header:
    """Read ``shards.json``.

    Raises:
        ShardsError: there is none, it is of another version, or it was changed after it was written.
    """
    path = f"{folder.path.rstrip('/')}/{HEADER_FILE}"
    file = Location(path)
    if not file.is_file():
        raise ShardsError(
            f"{folder.path} holds no {HEADER_FILE}, so it holds no shards; make them with `packer "
            f"materialize PLAN SOURCE --out {folder.path}`"
        )
    try:
        content = json.loads(file.read(0, file.size()))
    except (ValueError, RecursionError) as error:
        raise ShardsError(f"{path} is not JSON ({error}); {_CURE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ShardsError(f'{path} does not say format "{FORMAT}", so these are no shards of ours')
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise ShardsError(
            f"{path} has format version {content.get('version')!r}, this packer reads version {VERSION}; "
            "materialize again, or install the packer that wrote it"
        )
    if content.get(HEADER_HASH) != _hash_of(content):
        raise ShardsError(f"{path} was changed after it was written ({HEADER_HASH} differs); {_CURE}")
    try:
        return _header_of(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShardsError(f"{path} is not as packer writes it ({error}); {_CURE}") from None


_CURE = "restore it, or materialize again"


def _hash_of(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != HEADER_HASH}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _header_of(content: Mapping[str, Any]) -> Header:
    header = Header(
        content_hash=content["content_hash"],
        num_samples=int(content["num_samples"]),
        epochs=tuple(EpochEntry(int(epoch["epoch"]), int(epoch["num_rows"])) for epoch in content["epochs"]),
        fields=dict(content["fields"]),
        kind=content["kind"],
        trained_part=content["trained_part"],
        columns=dict(content["columns"]),
        num_columns_read=int(content["num_columns_read"]),
        arrow_schema=b64decode(content["arrow_schema"], validate=True),
        compression=content["compression"],
        shards=tuple(
            ShardEntry(*(shard[name] for name in ShardEntry._fields)) for shard in content["shards"]
        ),
    )
    row = 0
    for shard in header.shards:
        if shard.first_row != row or shard.num_rows < 1 or shard.num_bytes < 1:
            raise ValueError("its shards do not follow each other")
        if not (_SHA256.fullmatch(shard.sha256) and _SHA256.fullmatch(shard.batches_sha256)):
            raise ValueError("a hash is none")
        row += shard.num_rows
    if row != header.num_rows:
        raise ValueError(f"its shards have {row} rows, its epochs {header.num_rows}")
    return header


def tokens_type(element: pa.DataType) -> pa.DataType:
    """Return the type of a column that has one number for each token."""
    return pa.list_(pa.field("item", element))
