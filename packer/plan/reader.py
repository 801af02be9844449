"""Read a plan: opening costs the same at any number of samples, and a micro-batch is found by arithmetic."""

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import PlanError
from packer.plan import schema
from packer.plan.header import read_header
from packer.plan.rows import Dropped, MicroBatch, MicroBatches, StepRow, Steps
from packer.plan.sources import PlanSource, sources_of
from packer.plan.storage import FolderFiles, MemoryFiles, PlanTable
from packer.plan.tables import FolderTarget
from packer.publish import published_directory
from packer.wording import counted


def load_plan(path: str | os.PathLike[str]) -> "Plan":
    """Open a plan directory: memory-mapped, in a time that does not depend on the number of samples.

    A URL that fsspec knows (``s3://…``) is copied to this node first, once, by the hash of the plan.

    The header's hash, the files' sizes and their footers are checked here, the values of a record batch when
    rows of it are read, everything by ``verify_plan``.

    Raises:
        PlanError: no plan, one of another version, or one with a missing, foreign or truncated file.
    """
    text = os.fspath(path)
    url = text if "://" in text else None
    if url is None:
        folder = Path(path)
    else:
        from packer.plan.copied import copied_plan  # reads sources, which a local plan does not need

        folder = copied_plan(url)
    files = FolderFiles(folder, url)
    plan = Plan(read_header(folder), files)
    plan.check_files()
    return plan


class Plan:
    """What every rank sees in every micro-batch of every step.

    It pickles as its path where it lies on disk, so that workers map the file instead of copying it.
    """

    OPEN_TABLES = 8

    def __init__(self, header: dict[str, Any], files: FolderFiles | MemoryFiles) -> None:
        self._header = header
        self._files = files
        self._tables: dict[str, PlanTable] = {}

    @property
    def header(self) -> dict[str, Any]:
        """The parsed ``plan.json``."""
        return self._header

    @property
    def path(self) -> Path | None:
        """The plan's directory; None for a plan in memory."""
        return self._files.folder if isinstance(self._files, FolderFiles) else None

    @property
    def fingerprint(self) -> str:
        """The content hash: equal for plans that give every rank the same samples in the same order."""
        return str(self._header["content_hash"])

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the plan was made with, one entry an option."""
        config: dict[str, Any] = self._header["config"]
        return config

    @property
    def layout(self) -> str:
        """``padded`` (a B × S tensor) or ``packed`` (one row of T tokens)."""
        return str(self.config["layout"])

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, D."""
        return int(self.config["dp_size"])

    @property
    def grad_accum(self) -> int:
        """Micro-batches of one rank in a step, A."""
        return int(self.config["grad_accum"])

    @property
    def num_epochs(self) -> int:
        """Epochs planned."""
        return int(self._header["num_epochs"])

    @property
    def num_samples(self) -> int:
        """Samples of the source, planned or not."""
        return int(self._header["num_samples"])

    @cached_property
    def sources(self) -> tuple[PlanSource, ...]:
        """The data sets that the samples are of, in order; sample ids count through them."""
        return sources_of(self._header)

    @property
    def definition(self) -> Mapping[str, Any]:
        """How samples were measured: what all sources have in common stands in that of the first.

        Empty where lengths came as an array, or from metrics without a manifest.
        """
        return self.sources[0].definition or {}

    def epoch(self, epoch: int) -> "Epoch":
        """Open one epoch.

        Raises:
            PlanError: there is no such epoch, or its files are not what the header says.
        """
        if not 0 <= epoch < self.num_epochs:
            raise PlanError(
                f"epoch {epoch} is not planned: the plan has {counted(self.num_epochs, 'epoch')}, from 0; "
                "plan more with --epochs"
            )
        return Epoch(
            self._table(schema.microbatches_file(epoch)),
            self._table(schema.steps_file(epoch)),
        )

    def dropped(self) -> Iterator[Dropped]:
        """Yield what is not planned, some ten thousand rows at a time."""
        for columns in self.batches(schema.DROPPED_FILE):
            required = {name: columns[name] for name in Dropped._fields if name != "start"}
            yield Dropped(**required, start=columns.get("start"))

    def columns(self, name: str) -> pa.Schema:
        """Return the schema of one table, by its file's name below the plan's folder."""
        return self._table(name).columns

    def batches(self, name: str) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the record batches of one table as arrays; see ``PlanTable.batch``."""
        table = self._table(name)
        for index in range(table.num_batches):
            yield table.batch(index)

    def record_batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one table, by its file's name below the plan's folder."""
        table = self._table(name)
        for index in range(table.num_batches):
            yield table.record_batch(index)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> "Plan":
        """Write the plan into a directory and return it opened from there.

        Raises:
            TargetExistsError: ``path`` exists and may not be replaced.
            TargetBusyError: another process is writing the same target.
            TargetWriteError: no room, no permission, or a read-only place.
        """
        with published_directory(path, marker=schema.HEADER_FILE, overwrite=overwrite) as folder:
            target = FolderTarget(folder)
            for name in [*schema.plan_files(self.num_epochs), schema.HEADER_FILE]:
                with target.open(name) as stream:
                    stream.write(self.buffer(name))
        return load_plan(path)

    def check_files(self) -> None:
        """Check the size and the footer of every file.

        Raises:
            PlanError: a file is missing, truncated, foreign, or of another shape than the header says.
        """
        for name in schema.plan_files(self.num_epochs):
            self._table(name)

    def buffer(self, name: str) -> pa.Buffer:
        """Return the bytes of one file of the plan, mapped where it lies on disk."""
        return self._files.buffer(name)

    def _table(self, name: str) -> PlanTable:
        """Open a table; the last few stay open, so that values are not checked again."""
        table = self._tables.get(name)
        if table is None:
            table = PlanTable(self._files, name, self._header)
            if len(self._tables) >= self.OPEN_TABLES:
                self._tables = {}
            self._tables[name] = table
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._files, FolderFiles):
            return _reopen, (self._files.root, self.fingerprint, self._files.origin)
        return Plan, (self._header, self._files)

    def __repr__(self) -> str:
        place = self.path or "in memory"
        epochs = counted(self.num_epochs, "epoch")
        return f"Plan({place}, {self.layout}, {epochs}, {self.fingerprint[:12]})"


class Epoch:
    """One epoch of a plan; every access is O(1)."""

    def __init__(self, microbatches: PlanTable, steps: PlanTable) -> None:
        self._microbatches = microbatches
        self._steps = steps
        self._metrics = schema.metrics_of(microbatches.columns.names)

    @property
    def num_steps(self) -> int:
        """Optimizer updates."""
        return self._steps.num_rows

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all ranks: steps × grad_accum × dp_size."""
        return self._microbatches.num_rows

    def microbatch(self, row: int) -> MicroBatch:
        """Return one micro-batch, row = (step · grad_accum + accum) · dp_size + dp_rank."""
        columns, at = self._microbatches.locate(row)
        offsets = columns["offsets"]
        pieces = slice(offsets[at], offsets[at + 1])
        starts, loss_tokens = columns.get("starts"), columns.get(schema.LOSS_TOKENS)
        return MicroBatch(
            step=columns["step"].item(at),
            accum=columns["accum"].item(at),
            dp_rank=columns["dp_rank"].item(at),
            sample_ids=columns["sample_ids"][pieces],
            seqlens=columns["seqlens"][pieces],
            starts=None if starts is None else starts[pieces],
            num_samples=columns["num_samples"].item(at),
            num_tokens=columns["num_tokens"].item(at),
            max_seqlen=columns["max_seqlen"].item(at),
            padded_seqlen=columns["padded_seqlen"].item(at),
            cost=columns["cost"].item(at),
            is_filler=columns["is_filler"].item(at),
            is_repeat=columns["is_repeat"].item(at),
            padded_seqlens={metric: padded.item(at) for metric, padded in self._by_metric(columns)},
            num_loss_tokens=None if loss_tokens is None else loss_tokens.item(at),
        )

    def step(self, step: int) -> StepRow:
        """Return one step."""
        columns, at = self._steps.locate(step)
        loss_tokens = columns.get("num_loss_tokens")
        return StepRow(
            num_samples=columns["num_samples"].item(at),
            num_tokens=columns["num_tokens"].item(at),
            num_loss_tokens=None if loss_tokens is None else loss_tokens.item(at),
            max_seqlen=columns["max_seqlen"].item(at),
            lr_scale=columns["lr_scale"].item(at),
            samples_before=columns["samples_before"].item(at),
            tokens_before=columns["tokens_before"].item(at),
        )

    def microbatches(self) -> Iterator[MicroBatches]:
        """Yield all rows in order, one record batch at a time, as arrays."""
        for index in range(self._microbatches.num_batches):
            columns = self._microbatches.batch(index)
            yield MicroBatches(
                first_row=index * self._microbatches.rows_per_batch,
                padded_seqlens=dict(self._by_metric(columns)),
                starts=columns.get("starts"),
                num_loss_tokens=columns.get(schema.LOSS_TOKENS),
                **{
                    name: columns[name]
                    for name in MicroBatches._fields
                    if name not in ("first_row", "padded_seqlens", "starts", schema.LOSS_TOKENS)
                },
            )

    def steps(self) -> Iterator[Steps]:
        """Yield all steps in order, one record batch at a time, as arrays."""
        for index in range(self._steps.num_batches):
            columns = self._steps.batch(index)
            yield Steps(
                first_step=index * self._steps.rows_per_batch,
                num_loss_tokens=columns.get("num_loss_tokens"),
                **{
                    name: columns[name]
                    for name in Steps._fields
                    if name not in ("first_step", "num_loss_tokens")
                },
            )

    def __repr__(self) -> str:
        steps, microbatches = counted(self.num_steps, "step"), counted(self.num_microbatches, "micro-batch")
        return f"Epoch({steps}, {microbatches})"

    def _by_metric(self, columns: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[np.int32]]]:
        return ((metric, columns[schema.PADDED_SEQLEN_PREFIX + metric]) for metric in self._metrics)


def _reopen(folder: Path, fingerprint: str, origin: str | None) -> Plan:
    """Open a plan that another process had open, if it still is the same; another node has no copy yet."""
    plan = load_plan(origin if origin is not None and not folder.exists() else folder)
    if plan.fingerprint != fingerprint:
        raise PlanError(f"{folder} was replaced by another plan while it was in use; start the run again")
    return plan
