"""Hold shards against their plan, row by row, and against the data set, sample by sample."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_numpy
from packer.errors import InvariantError, PlanError, ShardsError
from packer.metrics import Metrics
from packer.plan import MicroBatch, Plan, load_plan
from packer.samples import Dataset, LengthDefinition
from packer.samples.dataset import INPUT_IDS, LABELS
from packer.shards.feed import POSITION_IDS, Feed
from packer.shards.format import SAMPLE_ID, START
from packer.shards.materialize import open_planned, planned_metric
from packer.shards.picking import pick_rows
from packer.shards.places import rows_of, write_places
from packer.shards.reader import ShardReader
from packer.shards.scatter import Scatter
from packer.sources import Source
from packer.sources.location import Location, from_user
from packer.wording import counted

PathLike = str | os.PathLike[str]
Progress = Callable[[int, int], None]
"""Called with how much is checked, and how much there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedShards:
    """What was checked, and found in order."""

    num_shards: int
    num_microbatches: int
    num_pieces: int
    """Samples and pieces in them."""
    with_source: bool
    """Whether each was compared with the data set."""


def verify_shards(
    plan: Plan | PathLike,
    shards: PathLike,
    source: Dataset | Source | PathLike | Sequence[PathLike] | None = None,
    *,
    metrics: Metrics | PathLike | None = None,
    definition: LengthDefinition | None = None,
    tokenizer: str | None = None,
    progress: Progress | None = None,
) -> VerifiedShards:
    """Check the hashes of shards, every micro-batch against the plan, and every sample against the source.

    The source is read once, front to back; the shards are read at random.

    Args:
        plan: the plan they were made for.
        shards: their folder, here or in an object store.
        source: the data set; without it the content of samples is taken on trust.
        metrics: as for ``materialize``.
        definition: as for ``materialize``.
        tokenizer: as for ``materialize``.
        progress: told how far the check has come.

    Raises:
        ShardsError: the files are not those that were written, or are of another plan.
        InvariantError: the first sample that is not where the plan has it, or not what the source holds.
        SourceChangedError: the source is not the one that was planned.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    location = from_user(shards)
    if not location.is_remote:
        location = Location(os.path.abspath(location.path))
    reader = ShardReader(location)
    _check_plan(plan, reader)
    num_shards = len(reader.header.shards)
    total = num_shards + reader.header.num_rows
    for shard in range(num_shards):
        reader.check_file(shard)
        if progress is not None:
            progress(shard + 1, total)
    num_pieces = 0
    done = num_shards
    for number, num_rows in reader.header.epochs:
        epoch = plan.epoch(number)
        for row in range(num_rows):
            planned = epoch.microbatch(row)
            _check_row(reader, number, row, planned)
            num_pieces += planned.num_samples
            done += 1
            if progress is not None and row % 256 == 0:
                progress(done, total)
    if source is not None:
        dataset = open_planned(
            plan,
            source,
            metrics=metrics,
            definition=definition,
            tokenizer=tokenizer,
            fields=_further_fields(reader),
        )
        _check_samples(plan, reader, dataset, progress)
    return VerifiedShards(
        num_shards=num_shards,
        num_microbatches=reader.header.num_rows,
        num_pieces=num_pieces,
        with_source=source is not None,
    )


def _check_plan(plan: Plan, reader: ShardReader) -> None:
    header = reader.header
    if header.content_hash != plan.fingerprint:
        raise ShardsError(
            f"{reader.folder.path} holds the samples of plan {header.content_hash[:12]}…, and this is plan "
            f"{plan.fingerprint[:12]}…; give the plan that they were made for, or materialize this one"
        )
    for number, num_rows in header.epochs:
        if plan.epoch(number).num_microbatches != num_rows:
            raise PlanError(
                f"epoch {number} has {plan.epoch(number).num_microbatches} rows, the shards have {num_rows}; "
                "materialize again"
            )


def _check_row(reader: ShardReader, epoch: int, row: int, planned: MicroBatch) -> None:
    """Check which samples a record batch holds, their lengths, and what was made of their ids."""
    batch = reader.record_batch(epoch, row, whole=True)
    if batch.num_rows != planned.num_samples:
        raise InvariantError(
            f"row {row} of epoch {epoch} has {counted(batch.num_rows, 'sample')} in the shards and "
            f"{planned.num_samples} in the plan; materialize again"
        )
    starts = np.zeros(planned.num_samples, np.int32) if planned.starts is None else planned.starts
    for name, expected in ((SAMPLE_ID, planned.sample_ids), (START, starts)):
        found = to_numpy(batch.column(name))
        if not np.array_equal(found, expected):
            at = int(np.argmax(found != expected))
            raise InvariantError(
                f"row {row} of epoch {epoch}, place {at}: {name} is {found[at]} in the shards and "
                f"{expected[at]} in the plan; materialize again"
            )
    ids_column = reader.header.fields.get(INPUT_IDS)
    if isinstance(ids_column, str):
        lengths = np.diff(to_numpy(batch.column(ids_column).offsets))
        if not np.array_equal(lengths, planned.seqlens):
            at = int(np.argmax(lengths != planned.seqlens))
            raise InvariantError(
                f"row {row} of epoch {epoch}: sample {planned.sample_ids[at]} has {lengths[at]} tokens in "
                f"the shards and {planned.seqlens[at]} in the plan; materialize again"
            )
    for name in reader.schema.names[reader.header.num_columns_read :]:
        stem = name.removesuffix(POSITION_IDS).removesuffix(LABELS)
        if stem == name or f"{stem}{INPUT_IDS}" not in reader.schema.names:
            continue
        ids, made = batch.column(f"{stem}{INPUT_IDS}"), batch.column(name)
        expected_made = ids if name.endswith(LABELS) else _positions(ids)
        if reader.header.kind not in _SOURCE_KINDS and not made.equals(expected_made):
            raise InvariantError(
                f"row {row} of epoch {epoch}: {name} are not those of {stem}{INPUT_IDS}; materialize again"
            )


_SOURCE_KINDS = ("tokens", "length", "indexed")
"""Kinds of which every column is the source's."""


def _positions(ids: pa.ListArray) -> pa.ListArray:
    return pa.array([range(length) for length in np.diff(to_numpy(ids.offsets)).tolist()], ids.type)


def _further_fields(reader: ShardReader) -> dict[str, str]:
    """Return the fields that had to be named when the shards were made."""
    fields = reader.header.fields
    if reader.header.kind == "length":
        return {name: column for name, column in fields.items() if isinstance(column, str) and name != LABELS}
    return {}


def _check_samples(plan: Plan, reader: ShardReader, dataset: Dataset, progress: Progress | None) -> None:
    """Read the data set as it was read for the shards, and look every sample up in them."""
    header = reader.header
    kept = reader.schema.names[header.num_columns_read :]
    made = () if header.kind in _SOURCE_KINDS else _made_names(reader)
    feed = Feed(
        dataset=dataset,
        metric=planned_metric(plan, dataset.definition),
        keep_columns=("none", *(name for name in kept if name not in made)),
    )
    columns = feed.columns
    if columns.written.names != reader.schema.names or columns.fields != header.fields:
        raise ShardsError(
            f"{reader.folder.path} has the columns {', '.join(reader.schema.names)} for the fields "
            f"{', '.join(header.fields)}, and the source gives {', '.join(columns.written.names)} for "
            f"{', '.join(columns.fields)}; name the source, and what its samples are, as it was materialized"
        )
    epochs = [epoch.epoch for epoch in header.epochs]
    # (rows + 1,) samples and pieces before each row
    before = np.concatenate([[0], *(table.num_samples for table in rows_of(plan, epochs))]).cumsum()
    with tempfile.TemporaryDirectory(prefix="packer-") as scratch:
        places = Path(scratch) / "places"
        write_places(plan, epochs, places)
        scatter = Scatter(
            feed=feed, places=places, spill=places, num_epochs=len(epochs), cuts=_cuts(plan, epochs)
        )
        units = feed.units()
        for number, unit in enumerate(units):
            for run in scatter.runs(unit, lambda *_: None):
                _check_run(plan, reader, run, before)
            feed.source.close()
            if progress is not None:
                progress(number + 1, len(units))


def _made_names(reader: ShardReader) -> set[str]:
    stems = [name.removesuffix(INPUT_IDS) for name in reader.schema.names if name.endswith(INPUT_IDS)]
    return {stem + name for stem in stems for name in (LABELS, POSITION_IDS)}


def _cuts(plan: Plan, epochs: Sequence[int]) -> bool:
    return any(table.starts is not None for table in rows_of(plan, epochs))


def _check_run(plan: Plan, reader: ShardReader, run: pa.RecordBatch, before: NDArray[np.int64]) -> None:
    """Compare samples with what stands in their places."""
    places = to_numpy(run.column(0))
    rows = np.searchsorted(before, places, side="right") - 1
    touched, owners = np.unique(rows, return_inverse=True)
    expected = run.drop_columns([run.schema.names[0]])
    batches = []
    for row in touched.tolist():
        epoch, at = reader.place_of_row(row)
        batches.append(reader.record_batch(epoch, at, whole=True).select(expected.schema.names))
    found = pick_rows(batches, owners, places - before[rows])
    if found.equals(expected):
        return
    for name in expected.schema.names:
        if not found.column(name).equals(expected.column(name)):
            pairs = zip(found.column(name), expected.column(name), strict=True)
            wrong = next(at for at, (one, other) in enumerate(pairs) if one != other)
            epoch, at = reader.place_of_row(int(rows[wrong]))
            planned = plan.epoch(epoch).microbatch(at)
            sample_id = planned.sample_ids[int(places[wrong] - before[rows[wrong]])]
            raise InvariantError(
                f"sample {sample_id} in row {at} of epoch {epoch} has other {name} in the shards than in the "
                "source; materialize again"
            )
