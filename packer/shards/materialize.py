"""``materialize``: the samples of a plan, copied into the order in which it reads them.

An external shuffle. Places tells where each sample goes; the first pass reads the data set once, in its own
order, and writes runs sorted by place; the second merges the runs, shard by shard.
"""

import hashlib
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from packer._version import __version__
from packer.errors import (
    ConfigError,
    PackerError,
    PlanError,
    SourceChangedError,
    SourceError,
    TargetWriteError,
    WorkerLostError,
)
from packer.jobs.executors import Executor, choose_executor
from packer.jobs.journal import Journal
from packer.jobs.progress import Listener
from packer.jobs.stages import Stage
from packer.metrics import Metrics, open_metrics
from packer.plan import Plan, load_plan, main_metric
from packer.samples import Dataset, LengthDefinition
from packer.samples import open_dataset as open_samples
from packer.samples.planned import check_planned, planned_definition
from packer.shards.feed import Feed, FeedUnit
from packer.shards.format import (
    BATCHES_FILE,
    HEADER_FILE,
    EpochEntry,
    Header,
    ShardEntry,
    shard_file,
)
from packer.shards.gather import Gather, ShardUnit, Written, cut_shards
from packer.shards.places import BYTES_PER_PLACE, rows_of, write_places
from packer.shards.scatter import Scatter, Spilled, spill_file
from packer.shards.target import Target, opened_target
from packer.sources import Source
from packer.wording import counted, in_bytes

PathLike = str | os.PathLike[str]

SHARD_BYTES = 1 << 30
COMPRESSIONS = ("none", "zstd")

_JOURNAL = ".journal"
_READING, _WRITING, _COPYING = 0, 1, 2
"""Stages in the journal."""
_STRETCH_BYTES = 64 << 20
"""What a worker brings into order at once. Arrow pads buffers with what lies behind them, so that the bytes
of a shard depend on it: it must not follow the number of workers."""
_BATCH_BYTES = 1 << 10
"""Header, padding and footer entry of a record batch, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Materialized:
    """What was written."""

    path: str
    header: Header
    num_pieces: int
    """Samples and pieces, fillers and repeats among them."""
    num_tokens: int
    num_bytes: int
    seconds: float
    num_units_reused: int
    """Units of work that an earlier, interrupted run had done."""


def materialize(
    plan: Plan | PathLike,
    source: Dataset | Source | PathLike | Sequence[PathLike],
    *,
    out: PathLike,
    metrics: Metrics | PathLike | None = None,
    definition: LengthDefinition | None = None,
    tokenizer: str | None = None,
    fields: Sequence[str] | Mapping[str, str] = (),
    keep_columns: Sequence[str] | None = None,
    epoch: int | None = None,
    compression: str = "none",
    shard_size: int = SHARD_BYTES,
    workers: int | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    scratch: PathLike | None = None,
    overwrite: bool = False,
    progress: Listener | None = None,
) -> Materialized:
    """Write the samples of a plan in the order in which it reads them, a record batch for each micro-batch.

    The data set is read once, front to back. A run that was interrupted goes on where it was when started
    again. Some 1 GB of memory is used at any size; on the disk there is room for the shards twice.

    Args:
        plan: a plan, or its directory.
        source: the data set that was planned, as ``open_dataset`` takes it, or what that gave.
        out: the directory to make, or a URL of an object store.
        metrics: the metrics that the plan was made from, for what it does not say itself.
        definition: what the length of a sample is, where neither plan nor metrics say it.
        tokenizer: where the tokenizer is on this machine.
        fields: as for ``open_dataset``: further list columns with one number for each token.
        keep_columns: columns of the source to write beside the tokens; ``["all"]``, ``["none"]``. Default:
            all of a source of token lists, none of texts, chats and JSON Lines.
        epoch: write this one only; default: all.
        compression: ``none``, or ``zstd`` for each buffer of a record batch.
        shard_size: bytes of a file, before compression; a micro-batch is never cut.
        workers: processes (1), or CPUs of Ray (all); any number gives the same bytes.
        executor: ``local`` or ``ray``; Ray's nodes have to see the source and ``out``.
        ray_address: of a Ray cluster; by default Ray is started here.
        scratch: folder of this machine where shards for an object store are made; default: the system's.
        overwrite: replace shards that are there.
        progress: called after every unit of work, and now and then within one that takes long.

    Raises:
        ConfigError: options that have no meaning, or a plan that does not say what its samples are.
        SourceChangedError: the source is not the one that was planned.
        LengthMismatchError: a sample has another length than planned.
        TargetExistsError, TargetBusyError, TargetWriteError: see ``published_directory``; also a disk without
            room for the shards, before anything is read.
    """
    start = monotonic()
    run = choose_executor(workers, executor, ray_address)
    if compression not in COMPRESSIONS:
        raise ConfigError(f"--compression {compression}: there are {' and '.join(COMPRESSIONS)}")
    if shard_size < 1:
        raise ConfigError(f"--shard-size {shard_size}: give a number of bytes from 1")
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    epochs = _epochs_of(plan, epoch)
    dataset = open_planned(
        plan, source, metrics=metrics, definition=definition, tokenizer=tokenizer, fields=fields
    )
    feed = Feed(
        dataset=dataset,
        metric=planned_metric(plan, dataset.definition),
        keep_columns=None if keep_columns is None else tuple(keep_columns),
    )
    _ = feed.columns  # what is wrong with them is said before anything is made
    _check_apart(out, feed.source)
    identity = feed.source.identity()
    with opened_target(out, overwrite=overwrite, scratch=scratch) as target, _leaving_nothing(target.folder):
        shuffle = _Shuffle(
            plan=plan,
            epochs=epochs,
            feed=feed,
            target=target,
            compression=compression,
            shard_bytes=shard_size,
        )
        with shuffle.journal(identity) as journal:
            try:
                num_reused = shuffle.read(journal, run, progress)
            except SourceError:
                _check_same(feed.source, identity)
                raise
            _check_same(feed.source, identity)
            num_reused += shuffle.write(journal, run, progress)
            header, written = shuffle.finish(journal)
    return Materialized(
        path=os.fspath(out),
        header=header,
        num_pieces=sum(shard.num_rows for shard in written),
        num_tokens=sum(shard.num_tokens for shard in written),
        num_bytes=sum(shard.num_bytes for shard in written),
        seconds=monotonic() - start,
        num_units_reused=num_reused,
    )


def open_planned(
    plan: Plan,
    source: Dataset | Source | PathLike | Sequence[PathLike],
    *,
    metrics: Metrics | PathLike | None = None,
    definition: LengthDefinition | None = None,
    tokenizer: str | None = None,
    fields: Sequence[str] | Mapping[str, str] = (),
) -> Dataset:
    """Open the data set of a plan, as ``open_dataset`` does, with what the plan says of it.

    Raises:
        ConfigError: nothing says what the samples are.
        SourceChangedError: it is not the one that was planned.
    """
    if isinstance(source, Dataset):
        dataset = source
    elif metrics is not None:
        metrics = metrics if isinstance(metrics, Metrics) else open_metrics(metrics)
        planned = plan.header["metrics_fingerprint"]
        if planned is not None and metrics.fingerprint != planned:
            raise SourceChangedError(
                f"the plan was made from metrics {planned[:12]}…, {metrics.path} is "
                f"{metrics.fingerprint[:12]}…; give the metrics that it was made from, or plan again"
            )
        dataset = open_samples(source, metrics=metrics, tokenizer=tokenizer, fields=fields)
    else:
        if definition is None:
            definition = planned_definition(plan.definition, {}, tokenizer)
        dataset = open_samples(source, definition=definition, tokenizer=tokenizer, fields=fields)
        check_planned(dataset.source, plan.num_samples, plan.sources[0].files)
    if len(dataset) != plan.num_samples:
        raise SourceChangedError(
            f"the data set has {len(dataset):,} samples and the plan was made for {plan.num_samples:,}; give "
            "the data set that was analyzed, or analyze and plan again"
        )
    return dataset


def planned_metric(plan: Plan, definition: LengthDefinition) -> str:
    """Return the metric that the plan calls the length of a sample.

    Raises:
        ConfigError: the definition measures no such thing.
    """
    metric = main_metric(plan, definition.metrics)
    if metric not in definition.metrics:
        raise ConfigError(
            f"the plan counts {metric}, and the definition measures {', '.join(definition.metrics)}; give "
            "the definition that the data set was analyzed with"
        )
    return metric


@dataclass(frozen=True, kw_only=True)
class _Shuffle:
    """One run: two passes over files in the target's folder."""

    plan: Plan
    epochs: tuple[int, ...]
    feed: Feed
    target: Target
    compression: str
    shard_bytes: int

    def journal(self, identity: list[dict[str, object]]) -> Journal:
        """Open the journal; what it says was done, and whose file is gone, is done again with all else."""
        path = self.target.folder / _JOURNAL
        job = {
            "version": __version__,
            "plan": self.plan.fingerprint,
            "epochs": self.epochs,
            "sources": identity,
            "definition": self.feed.definition.to_json(),
            "columns": self.feed.columns.written.to_string(),
            "compression": self.compression,
            "shard_bytes": self.shard_bytes,
        }
        journal = Journal(path, job)
        if not all(map(self._is_there, *self._noted(journal))):
            journal.close()
            path.unlink()
            journal = Journal(path, job)
        if not len(journal):
            for old in self.target.folder.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
                elif old != path:
                    old.unlink()
        return journal

    def _noted(self, journal: Journal) -> tuple[list[Path], list[int]]:
        """Return the files that the journal says are finished, and their sizes."""
        files: list[Path] = []
        sizes: list[int] = []
        for stage, number in journal:
            if stage == _READING:
                files.append(spill_file(self._spill, number))
                sizes.append(Spilled.unpack(journal.payload(stage, number)).num_bytes)
            elif stage == _WRITING:
                files.append(self.target.folder / shard_file(number))
                sizes.append(Written.unpack(journal.payload(stage, number)).num_bytes)
        return files, sizes

    @staticmethod
    def _is_there(path: Path, size: int) -> bool:
        return path.is_file() and path.stat().st_size == size

    @property
    def _spill(self) -> Path:
        return self.target.folder / "spill"

    @property
    def _places(self) -> Path:
        return self.target.folder / "places"

    def read(self, journal: Journal, run: Executor, listener: Listener | None) -> int:
        """Make the first pass; return how many units an earlier run had done."""
        units = self.feed.units()
        stage: Stage[FeedUnit] = Stage(
            number=_READING,
            name="reading",
            task=Scatter(
                feed=self.feed,
                places=self._places,
                spill=self._spill,
                num_epochs=len(self.epochs),
                cuts=self._cuts,
            ),
            units=units,
            size_of=lambda unit: unit.unit.num_bytes,
            count=lambda payload: Spilled.unpack(payload)[:2],
        )
        if any((_READING, unit.number) not in journal for unit in units):
            self._check_room(self._kept_bytes_guessed(units), also_spill=True)
            self._spill.mkdir(exist_ok=True)
            write_places(self.plan, self.epochs, self._places)
        reused = stage.run(journal, run, listener)
        shutil.rmtree(self._places, ignore_errors=True)
        return reused

    def write(self, journal: Journal, run: Executor, listener: Listener | None) -> int:
        """Make the second pass; return how many shards an earlier run had written."""
        spilled = [
            Spilled.unpack(journal.payload(_READING, number)) for number in range(len(self.feed.units()))
        ]
        num_pieces = sum(unit.num_rows for unit in spilled)
        kept_bytes = sum(unit.kept_bytes for unit in spilled) / max(num_pieces, 1)
        units = self._shards(kept_bytes)
        stage: Stage[ShardUnit] = Stage(
            number=_WRITING,
            name="writing",
            task=Gather(
                plan=self.plan,
                epochs=self.epochs,
                columns=self.feed.columns,
                spill=self._spill,
                target=self.target.folder,
                compression=self.compression,
            ),
            units=units,
            size_of=lambda unit: unit.num_bytes,
            count=lambda payload: Written.unpack(payload)[:2],
        )
        if any((_WRITING, unit.number) not in journal for unit in units):
            self._check_room(kept_bytes, also_spill=False)
        return stage.run(journal, run, listener)

    def finish(self, journal: Journal) -> tuple[Header, list[Written]]:
        """Write what tells the shards, and publish all."""
        written: list[Written] = []
        while (_WRITING, len(written)) in journal:
            written.append(Written.unpack(journal.payload(_WRITING, len(written))))
        folder = self.target.folder
        first_row = 0
        shards = []
        with open(folder / BATCHES_FILE, "wb") as file:
            for shard in written:
                part = shard.batches.tobytes()
                file.write(part)
                rows = len(shard.batches)
                shards.append(
                    ShardEntry(
                        first_row, rows, shard.num_bytes, shard.sha256, hashlib.sha256(part).hexdigest()
                    )
                )
                first_row += rows
        columns = self.feed.columns
        header = Header(
            content_hash=self.plan.fingerprint,
            num_samples=self.plan.num_samples,
            epochs=tuple(
                EpochEntry(number, self.plan.epoch(number).num_microbatches) for number in self.epochs
            ),
            fields=columns.fields,
            kind=self.feed.definition.kind,
            trained_part=self.feed.definition.trained_part,
            columns={field.name: str(field.type) for field in columns.written},
            num_columns_read=len(columns.read) + 2,
            arrow_schema=columns.written.serialize().to_pybytes(),
            compression=self.compression,
            shards=tuple(shards),
        )
        (folder / HEADER_FILE).write_bytes(header.to_bytes())
        names = [shard_file(number) for number in range(len(shards))] + [BATCHES_FILE]
        for number, name in enumerate(names):
            if (_COPYING, number) not in journal:
                self.target.publish(name)
                journal.append(_COPYING, number, b"")
        self.target.finish([*names, HEADER_FILE])
        return header, written

    @property
    def _cuts(self) -> bool:
        return any(
            next(rows_of(self.plan, [epoch])).starts is not None
            for epoch in self.epochs
            if self.plan.epoch(epoch).num_microbatches
        )

    def _shards(self, kept_bytes: float) -> list[ShardUnit]:
        """Cut the plan into shards, by the sizes of its rows."""
        return cut_shards(
            [
                (
                    table.num_samples.astype(np.int64),
                    self._row_bytes(table.num_samples, table.num_tokens, kept_bytes),
                )
                for table in rows_of(self.plan, self.epochs)
            ],
            shard_bytes=self.shard_bytes,
            stretch_bytes=_STRETCH_BYTES,
        )

    def _row_bytes(
        self, num_pieces: NDArray[np.integer], num_tokens: NDArray[np.integer], kept_bytes: float
    ) -> NDArray[np.int64]:
        """Return (rows,) bytes of the record batches, uncompressed, about."""
        columns = self.feed.columns
        num_lists = len(columns.read) + len(columns.made)
        if not columns.counts_tokens:  # what is made of columns is as large as they are
            kept_bytes *= num_lists / len(columns.read)
        piece_bytes = kept_bytes + 12 + 4 * num_lists
        sizes = _BATCH_BYTES + num_pieces * piece_bytes + num_tokens * np.int64(columns.token_bytes)
        return np.ceil(sizes).astype(np.int64)

    def _kept_bytes_guessed(self, units: Sequence[FeedUnit]) -> float:
        """Return about how many bytes a sample has that the plan does not tell, before any is read."""
        columns = self.feed.columns
        if columns.counts_tokens and not columns.kept.names:
            return 0.0
        source = self.feed.source
        wanted = list(self.feed.read_columns) if not columns.counts_tokens else columns.kept.names
        whole = sum(unit.num_bytes for unit in source.units(wanted))
        if columns.counts_tokens and not all(part.format == "parquet" for part in source.parts):
            whole -= (
                int(self.plan.header["num_tokens"]) * columns.token_bytes
            )  # other formats count all columns
        return max(whole, 0) / max(source.num_rows, 1)

    def _check_room(self, kept_bytes: float, *, also_spill: bool) -> None:
        """Refuse a disk without room for what is to be written, beside what an earlier run has.

        Raises:
            TargetWriteError: says how much it takes, and how much there is.
        """
        shard_bytes = num_pieces = 0
        for table in rows_of(self.plan, self.epochs):
            shard_bytes += int(self._row_bytes(table.num_samples, table.num_tokens, kept_bytes).sum())
            num_pieces += int(table.num_samples.sum())
        if self.compression != "none":
            shard_bytes //= 2
        num_read, num_made = len(self.feed.columns.read), len(self.feed.columns.made)
        spill_bytes = shard_bytes * num_read // (num_read + num_made) + num_pieces * BYTES_PER_PLACE
        needed = shard_bytes + (spill_bytes if also_spill else 0)
        folder = self.target.folder
        used = sum(
            path.stat().st_size for path in folder.rglob("*.arrow") if also_spill or path.parent == folder
        )
        free = shutil.disk_usage(folder).free
        if needed - used > free:
            beside = f", {in_bytes(spill_bytes)} of them only until they are written" if also_spill else ""
            raise TargetWriteError(
                f"the shards take about {in_bytes(needed)} on the disk of {folder.parent}{beside}, and "
                f"{in_bytes(free + used)} are free there; make room, choose another place, or write one "
                "epoch at a time (--epoch)"
            )


def _epochs_of(plan: Plan, epoch: int | None) -> tuple[int, ...]:
    epochs = tuple(range(plan.num_epochs)) if epoch is None else (epoch,)
    for number in epochs:
        plan.epoch(number)
    if not sum(plan.epoch(number).num_microbatches for number in epochs):
        raise PlanError(
            f"the plan has no micro-batch in {counted(len(epochs), 'epoch')}; there is nothing to write"
        )
    return epochs


def _check_apart(out: PathLike, source: Source) -> None:
    """Refuse a target that holds the data set: replacing it would remove it."""
    folder = Path(os.path.realpath(out))
    for file in source.files:
        if folder in Path(os.path.realpath(file)).parents:
            raise ConfigError(f"--out {out} holds the data set itself ({file}); choose another directory")


def _check_same(source: Source, identity: list[dict[str, object]]) -> None:
    opened_anew: Source = pickle.loads(pickle.dumps(source))
    if [file["sha256"] for file in opened_anew.identity()] != [file["sha256"] for file in identity]:
        raise SourceChangedError(
            "the data set changed while it was read; run again once nothing writes to it"
        )


@contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """After an error that another run would meet again, leave nothing to go on from."""
    try:
        yield
    except PackerError as error:
        if not isinstance(error, WorkerLostError | TargetWriteError):
            shutil.rmtree(folder)
        raise
