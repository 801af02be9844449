"""Second pass: shard by shard, the runs are merged and written, a record batch for each row of the plan."""

import hashlib
import json
import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_arrow, to_numpy
from packer.errors import SourceError
from packer.jobs.executors import Report
from packer.plan import MicroBatch, Plan
from packer.shards.feed import Made, ShardColumns
from packer.shards.format import BATCH, shard_file
from packer.shards.picking import pick_rows
from packer.shards.scatter import PLACE
from packer.sources.ipc_messages import end_of_buffers

_FILE_HEAD = b"ARROW1\0\0"


class ShardUnit(NamedTuple):
    """The rows that one shard holds."""

    number: int
    first_row: int
    """Counted over the epochs written."""
    first_place: int
    """Samples and pieces before its first row."""
    num_pieces: tuple[int, ...]
    """Samples and pieces of each stretch of rows that is brought into order at once."""
    stretch_rows: tuple[int, ...]
    """Rows of each stretch."""
    num_bytes: int
    """About, uncompressed."""

    @property
    def num_rows(self) -> int:
        """Record batches of the shard."""
        return sum(self.stretch_rows)


class Written(NamedTuple):
    """What became of a shard, as the journal keeps it."""

    num_rows: int
    num_tokens: int
    num_bytes: int
    sha256: str
    batches: NDArray[Any]
    """(rows,) of type `BATCH`."""

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps(self[:-1]).encode() + b"\n" + self.batches.tobytes()

    @classmethod
    def unpack(cls, payload: memoryview) -> "Written":
        """Read a payload."""
        head, _, rest = bytes(payload).partition(b"\n")
        num_rows, num_tokens, num_bytes, sha256 = json.loads(head)
        return cls(num_rows, num_tokens, num_bytes, sha256, np.frombuffer(rest, BATCH))


@dataclass(frozen=True, kw_only=True)
class Gather:
    """The task: the rows of a shard to its file."""

    plan: Plan
    epochs: tuple[int, ...]
    columns: ShardColumns
    spill: Path
    target: Path
    compression: str

    def __call__(self, unit: ShardUnit, report: Report) -> bytes:
        """Write a shard; return the payload of a ``Written``."""
        path = self.target / shard_file(unit.number)
        partial = path.with_suffix(".partial")
        num_tokens = done = 0
        batches = np.zeros(unit.num_rows, BATCH)
        options = pa.ipc.IpcWriteOptions(
            compression=None if self.compression == "none" else self.compression, use_threads=False
        )
        with open(partial, "wb") as file:
            sink = _Sink(file)
            writer = pa.ipc.new_file(sink, self.columns.written, options=options)
            head = len(_FILE_HEAD) + len(self.columns.written.serialize())
            place = unit.first_place
            planned = self._planned(unit.first_row)
            for num_rows, num_pieces in zip(unit.stretch_rows, unit.num_pieces, strict=True):
                stretch = self._stretch(place, place + num_pieces)
                place += num_pieces
                at = 0
                for _ in range(num_rows):
                    row = next(planned)
                    batch = self._record_batch(row, stretch.slice(at, row.num_samples))
                    at += row.num_samples
                    offset = sink.size
                    writer.write_batch(batch)
                    message = sink.hand_over()
                    if not offset:  # Arrow writes magic and schema with the first record batch
                        offset, message = head, message[head:]
                    num_read = end_of_buffers(message, self.columns.num_buffers_read)
                    crc = zlib.crc32(memoryview(message)[:num_read])
                    batches[done] = (offset, len(message), num_read, crc, row.num_samples)
                    done, num_tokens = done + 1, num_tokens + row.num_tokens
                assert at == num_pieces, "a stretch is made of whole rows"
                report(done / unit.num_rows, place - unit.first_place, num_tokens)
            writer.close()
            sink.hand_over()
        partial.rename(path)
        return Written(place - unit.first_place, num_tokens, sink.size, sink.sha256, batches).pack()

    def _planned(self, first_row: int) -> Iterator[MicroBatch]:
        """Yield the rows of the plan from one on, epoch after epoch."""
        for number in self.epochs:
            epoch = self.plan.epoch(number)
            for row in range(first_row, epoch.num_microbatches):
                yield epoch.microbatch(row)
            first_row = max(0, first_row - epoch.num_microbatches)

    def _stretch(self, first: int, last: int) -> pa.RecordBatch:
        """Return what belongs to places ``[first, last)``, in their order."""
        parts = [part for run in self._runs if (part := run.between(first, last)).num_rows]
        places = [to_numpy(part.column(PLACE)) - first for part in parts]
        owners = np.repeat(np.arange(len(parts)), [len(found) for found in places])
        rows = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(found)) for found in places)])
        joined = np.concatenate([np.zeros(0, np.int64), *places])
        order = np.argsort(joined)
        if not np.array_equal(joined[order], np.arange(last - first)):
            raise SourceError(
                f"the data set gave {len(joined)} samples for {last - first} places of the plan; it changed "
                "while it was read: run again once nothing writes to it"
            )
        picked = pick_rows([part.drop_columns([PLACE]) for part in parts], owners[order], rows[order])
        for run in self._runs:
            run.let_go()
        return picked

    @cached_property
    def _runs(self) -> list["_Run"]:
        return [run for path in sorted(self.spill.glob("unit-*.arrow")) for run in _runs_of(path)]

    def _record_batch(self, row: MicroBatch, shuffled: pa.RecordBatch) -> pa.RecordBatch:
        starts = np.zeros(row.num_samples, np.int32) if row.starts is None else row.starts
        made = [_made(column, shuffled) for column in self.columns.made]
        num_read = len(self.columns.read)
        columns = [
            to_arrow(row.sample_ids.astype(np.int64)),
            to_arrow(starts),
            *shuffled.columns[:num_read],
            *made,
            *shuffled.columns[num_read:],
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.columns.written)


def _made(column: Made, batch: pa.RecordBatch) -> pa.Array:
    ids = batch.column(column.of)
    if not column.is_position:
        return ids
    offsets = to_numpy(ids.offsets).astype(np.int64)
    positions = np.arange(offsets[0], offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    return pa.Array.from_buffers(
        ids.type,
        len(ids),
        [None, pa.py_buffer((offsets - offsets[0]).astype(np.int32))],
        children=[to_arrow(positions.astype(np.int32))],
    )


class _Run:
    """A run of the first pass, mapped; it lets go of the pages it has read, which count as memory."""

    def __init__(self, mapped: mmap.mmap, batch: pa.RecordBatch) -> None:
        self._mapped = mapped
        self._batch = batch
        self._places = to_numpy(batch.column(PLACE))

    def between(self, first: int, last: int) -> pa.RecordBatch:
        """Return what it holds of places ``[first, last)``."""
        low, high = np.searchsorted(self._places, [first, last]).tolist()
        return self._batch.slice(low, high - low)

    def let_go(self) -> None:
        """Drop the pages; the system keeps them as long as it has room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)


def _runs_of(path: Path) -> Iterator[_Run]:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = pa.ipc.open_file(pa.py_buffer(mapped))
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        if batch.num_rows:
            yield _Run(mapped, batch)


class _Sink:
    """The file object that Arrow writes to: hashes what is handed over, and knows its length."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._chunks: list[Any] = []
        self._digest = hashlib.sha256()
        self.size = 0
        """Bytes handed over."""
        self.closed = False

    @property
    def sha256(self) -> str:
        """Of what was handed over."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> None:
        self._chunks.append(data)

    def hand_over(self) -> bytes:
        """Write what came since the last time, and return it."""
        data = b"".join(self._chunks)
        self._chunks = []
        self._digest.update(data)
        self._file.write(data)
        self.size += len(data)
        return data

    def flush(self) -> None:
        """Nothing waits but what is handed over later."""

    def close(self) -> None:
        self.closed = True


def cut_shards(
    rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], *, shard_bytes: int, stretch_bytes: int
) -> list[ShardUnit]:
    """Cut the rows of a plan into shards, and shards into stretches that are brought into order at once.

    Args:
        rows: for some rows at a time, in order: (rows,) samples of each, and (rows,) bytes, about.
        shard_bytes: a shard ends before the row that would go beyond; a row is never cut.
        stretch_bytes: the same of a stretch.
    """
    num_pieces = np.concatenate([np.zeros(0, np.int64), *(pieces for pieces, _ in rows)])
    num_bytes = np.concatenate([np.zeros(0, np.int64), *(sizes for _, sizes in rows)])
    # (rows + 1,) bytes and pieces before each row
    before = np.concatenate([[0], np.cumsum(num_bytes)])
    pieces_before = np.concatenate([[0], np.cumsum(num_pieces)])
    units: list[ShardUnit] = []
    row = 0
    while row < len(num_bytes):
        edges = [row]
        last = _edge(before, row, shard_bytes)
        while edges[-1] < last:
            edges.append(min(_edge(before, edges[-1], stretch_bytes), last))
        stretches = np.array(edges)
        units.append(
            ShardUnit(
                number=len(units),
                first_row=row,
                first_place=int(pieces_before[row]),
                num_pieces=tuple(np.diff(pieces_before[stretches]).tolist()),
                stretch_rows=tuple(np.diff(stretches).tolist()),
                num_bytes=int(before[last] - before[row]),
            )
        )
        row = last
    return units


def _edge(before: NDArray[np.int64], row: int, num_bytes: int) -> int:
    """Return the row behind the last one that still goes with ``row``."""
    last = int(np.searchsorted(before, before[row] + num_bytes, side="right")) - 1
    return max(last, row + 1)
