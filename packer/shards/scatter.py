"""First pass: the data set is read once, in its own order; what is read is noted with its places."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_arrow
from packer.errors import LengthMismatchError, SourceError
from packer.jobs.executors import Report
from packer.samples.ragged import RowError
from packer.shards.feed import Feed, FeedUnit, Rows
from packer.shards.picking import Cut, pick_rows
from packer.shards.places import PlaceFinder, Places

PLACE = "place"

_RUN_BYTES = 64 << 20
"""What is held before it is sorted and written. The runs decide nothing but the memory."""
_RUN_ROWS = 1 << 18


def spill_file(folder: Path, number: int) -> Path:
    """Return the file of what a unit gave: record batches, each sorted by place."""
    return folder / f"unit-{number:06d}.arrow"


def with_place(columns: pa.Schema) -> pa.Schema:
    """Return the schema of a run."""
    return pa.schema([pa.field(PLACE, pa.int64(), False), *columns])


class Spilled(NamedTuple):
    """What became of a unit, as the journal keeps it."""

    num_rows: int
    num_tokens: int
    num_bytes: int
    """Of the file."""
    kept_bytes: int
    """Of columns whose size the plan does not tell."""

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps(self).encode()

    @classmethod
    def unpack(cls, payload: memoryview) -> "Spilled":
        """Read a payload."""
        return cls(*json.loads(bytes(payload)))


class Placed(NamedTuple):
    """Samples and pieces of one batch, with where they go."""

    rows: Rows
    at: NDArray[np.int64]
    """(n,) which row of ``rows.batch``."""
    places: Places
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """The task: a unit of the data set to a file of runs, sorted by place."""

    feed: Feed
    places: Path
    spill: Path
    num_epochs: int
    cuts: bool
    """The plan cuts samples."""

    def __call__(self, unit: FeedUnit, report: Report) -> bytes:
        """Write what a unit holds of the plan; return the payload of a ``Spilled``."""
        path = spill_file(self.spill, unit.number)
        partial = path.with_suffix(".partial")
        num_rows = num_tokens = kept_bytes = 0
        schema = with_place(self.feed.columns.shuffled)
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for run in self.runs(unit, report):
                writer.write_batch(run)
                num_rows += run.num_rows
                sizes = [column.nbytes for column in run.columns[1:]]
                num_exact = len(self.feed.columns.read) if self.feed.columns.counts_tokens else 0
                kept_bytes += sum(sizes[num_exact:])
                if self.feed.columns.counts_tokens:
                    num_tokens += len(run.column(1).values)
        self.feed.source.close()  # the pages of a mapped file count as memory of this process
        partial.rename(path)
        return Spilled(num_rows, num_tokens, path.stat().st_size, kept_bytes).pack()

    def runs(self, unit: FeedUnit, report: Report) -> Iterator[pa.RecordBatch]:
        """Yield what a unit holds of the plan, some ten megabytes at a time, each sorted by ``place``."""
        held: list[Placed] = []
        num_bytes = num_rows = done = num_tokens = 0
        for first_id, batch in self.feed.read(unit):
            found = self._finder.between(first_id, first_id + batch.num_rows)
            done += batch.num_rows
            if len(found.place):
                placed = self._placed(unit, first_id, batch, found)
                held.append(placed)
                num_bytes, num_rows = num_bytes + placed.num_bytes, num_rows + len(placed.at)
                num_tokens += int(found.seqlen.sum())
            if num_bytes >= _RUN_BYTES or num_rows >= _RUN_ROWS:
                yield from self._sorted(held)
                held, num_bytes, num_rows = [], 0, 0
            report(self.feed.source.share_read(unit.unit, done), done, num_tokens)
        yield from self._sorted(held)

    @cached_property
    def _finder(self) -> PlaceFinder:
        return PlaceFinder(self.places, num_epochs=self.num_epochs)

    def _placed(self, unit: FeedUnit, first_id: int, batch: pa.RecordBatch, found: Places) -> Placed:
        """Turn the rows that the plan wants into what is written, and hold them against it."""
        wanted = found.sample_id - first_id
        try:
            rows = self.feed.rows(batch, np.unique(wanted))
        except RowError as error:
            row = first_id + error.row
            raise SourceError(f"{self.feed.source.place_of_row(row)}: {error}") from error
        index = np.searchsorted(rows.rows, wanted)
        lengths = rows.num_tokens[index]
        is_wrong = lengths < found.start + found.seqlen if self.cuts else lengths != found.seqlen
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            asked = f"{found.seqlen[at]:,}" + (f" from token {found.start[at]:,} on" if self.cuts else "")
            raise LengthMismatchError(
                f"sample {found.sample_id[at]} has {lengths[at]:,} tokens and the plan was made for {asked}; "
                "the likely cause is another data set, another order of its files, or another tokenizer than "
                "was analyzed: analyze and plan again"
            )
        share = len(index) / max(rows.batch.num_rows, 1)
        return Placed(rows, index, found, int(max(1.0, share) * rows.batch.nbytes))

    def _sorted(self, held: Sequence[Placed]) -> Iterator[pa.RecordBatch]:
        """Yield what is held as batches sorted by place, none much larger than a run."""
        if not held:
            return
        batches = [placed.rows.batch for placed in held]
        places = Places.joined([placed.places for placed in held])
        owners = np.repeat(np.arange(len(held)), [len(placed.at) for placed in held])
        index = np.concatenate([placed.at for placed in held])
        tokens = np.concatenate([placed.rows.num_tokens[placed.at] for placed in held])
        order = np.argsort(places.place)
        num_runs = max(
            sum(placed.num_bytes for placed in held) // (2 * _RUN_BYTES), len(order) // (2 * _RUN_ROWS)
        )
        for part in np.array_split(order, num_runs + 1):
            chosen = places.at(part)
            cut = Cut(chosen.start.astype(np.int64), chosen.seqlen.astype(np.int64), tokens[part])
            picked = pick_rows(batches, owners[part], index[part], cut=cut if self.cuts else None)
            yield pa.RecordBatch.from_arrays(
                [to_arrow(chosen.place), *picked.columns], schema=with_place(picked.schema)
            )
