"""Write a plan, or what it trained, for readers that do not know packer."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer.arrays import to_arrow
from packer.errors import ConfigError, PlanError
from packer.plan import schema
from packer.plan.npz import write_npz
from packer.plan.reader import Plan
from packer.plan.sources import source_of
from packer.plan.trained import Trained
from packer.publish import check_target, published_directory

ExportFormat = Literal["deepspeed", "npz", "parquet", "samples"]

MARKER = "export.json"
EXPORT_VERSION = 1

_ROWS_PER_GROUP = 1 << 20

_SAMPLES = pa.schema(
    [
        ("epoch", pa.int32()),
        ("step", pa.int64()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("sample_id", pa.int64()),
        ("start", pa.int32()),
        ("num_tokens", pa.int32()),
        ("is_repeat", pa.bool_()),
    ]
)


def export_plan(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    to: ExportFormat,
    epoch: int | None = None,
    step: int | None = None,
    overwrite: bool = False,
    progress: Callable[[float], None] | None = None,
) -> list[str]:
    """Write a plan into the directory ``out``, in bounded memory; the same plan gives the same bytes.

    ``deepspeed``: ``epoch-NNNNN.json`` with the three lists of ``batch_by_seqlens``: ``microbatch_ids``, one
    ``[batch_id, sample_ids]`` a micro-batch, ``batch_sizes`` and ``batch_max_seqlens``, one a step. The
    micro-batches stand in the order in which a sampler deals them to the ranks in turn.

    ``npz``: ``epoch-NNNNN.npz``, uncompressed. ``offsets`` (M + 1,) int64; ``sample_ids, seqlens`` and, where
    samples are cut, ``starts`` (P,): micro-batch m holds pieces ``offsets[m]:offsets[m + 1]``; the other
    columns of the micro-batches (M,); those of the steps (T,) under ``step_…``. ``dropped.npz`` beside them.

    ``parquet``: ``epoch-NNNNN/microbatches.parquet``, ``steps.parquet`` and ``dropped.parquet``, with the
    columns of the Arrow files.

    ``samples``: ``samples.parquet``, one row a piece that was trained before a place in the plan, in order:
    ``epoch, step``; ``source``, its name or null; ``row`` in the source, ``sample_id`` in the plan;
    ``start, num_tokens``; ``is_repeat``. Fillers train nothing and are not in it.

    Args:
        plan: what to export.
        out: the directory to publish.
        to: the format.
        epoch: of ``samples``: which epoch. Default: 0 with ``step`` alone, else all of them.
        step: of ``samples``: the first step that was not trained. Default: all were.
        overwrite: replace an export that is there.
        progress: told which share is written.

    Returns:
        The names of the files below ``out``.

    Raises:
        ConfigError: a place for another format than ``samples``.
        PlanError: DeepSpeed's lists cannot say what the plan says, or the plan has no such place.
        TargetExistsError: ``out`` exists and may not be replaced.
        TargetBusyError: another process is writing the same target.
        TargetWriteError: no room, no permission, or a read-only place.
    """
    if to not in get_args(ExportFormat):
        raise ConfigError(f"--to {to} is unknown; choose one of {', '.join(get_args(ExportFormat))}")
    if to != "samples" and (epoch, step) != (None, None):
        raise ConfigError(
            f"--epoch and --step say what was trained, and --to {to} is the whole plan; leave them out"
        )
    if step is not None and epoch is None:
        epoch = 0
    trained = Trained(plan=plan, epoch=epoch, step=step)
    check_target(out, marker=MARKER, overwrite=overwrite)
    if to == "deepspeed":
        _refuse_what_lists_cannot_say(plan)
    write: Callable[[Plan, Path], Iterator[float]] = {
        "deepspeed": _write_deepspeed,
        "npz": write_npz,
        "parquet": _write_parquet,
        "samples": lambda _, folder: _write_samples(trained, folder),
    }[to]
    with published_directory(out, marker=MARKER, overwrite=overwrite) as folder:
        for share in write(plan, folder):
            if progress is not None:
                progress(share)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        _write_marker(plan, folder, to, names)
    return names


def _write_marker(plan: Plan, folder: Path, to: str, names: list[str]) -> None:
    content = {
        "format": "packer-export",
        "version": EXPORT_VERSION,
        "to": to,
        "content_hash": plan.fingerprint,
        "config": plan.config,
        "num_samples": plan.num_samples,
        "num_epochs": plan.num_epochs,
        "files": names,
    }
    (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _refuse_what_lists_cannot_say(plan: Plan) -> None:
    for epoch, counts in enumerate(plan.header["epochs"]):
        if any(table.starts is not None for table in plan.epoch(epoch).microbatches()):
            raise PlanError(
                "DeepSpeed's lists name whole samples, this plan cuts some; export it to npz or parquet, or "
                "plan with --too-long drop"
            )
        if counts["num_fillers"]:
            raise PlanError(
                "DeepSpeed's lists cannot mask a filler, which would train twice; export to npz or parquet, "
                "or plan with --remainder drop or fill"
            )


def _write_deepspeed(plan: Plan, folder: Path) -> Iterator[float]:
    for number in range(plan.num_epochs):
        epoch = plan.epoch(number)
        with open(folder / f"epoch-{number:05d}.json", "w", encoding="ascii") as stream:
            stream.write('{"microbatch_ids": [')
            separator = ""
            for table in epoch.microbatches():
                ids = table.sample_ids.tolist()
                edges = table.offsets.tolist()
                lists = [
                    [step, ids[edges[at] : edges[at + 1]]] for at, step in enumerate(table.step.tolist())
                ]
                stream.write(separator + json.dumps(lists)[1:-1])
                separator = ", "
                rows = table.first_row + len(table.step)
                yield (number + rows / epoch.num_microbatches) / plan.num_epochs
            for name, column in (("batch_sizes", "num_samples"), ("batch_max_seqlens", "max_seqlen")):
                stream.write(f'], "{name}": [')
                parts = (getattr(table, column).tolist() for table in epoch.steps())
                stream.write(", ".join(json.dumps(part)[1:-1] for part in parts))
            stream.write("]}\n")


def _write_samples(trained: Trained, folder: Path) -> Iterator[float]:
    sources = trained.plan.sources
    first_ids = np.array([source.first_id for source in sources], np.int64)
    names = pa.array([source.name for source in sources], pa.string())
    with pq.ParquetWriter(folder / "samples.parquet", _SAMPLES, compression="zstd") as writer:
        for pieces in trained.pieces():
            of_source = source_of(pieces.sample_ids, sources)
            sample_ids = pieces.sample_ids.astype(np.int64)
            columns = [
                np.full(len(sample_ids), pieces.epoch, np.int32),
                pieces.step,
                names.take(to_arrow(of_source)),
                sample_ids - first_ids[of_source],
                sample_ids,
                pieces.starts,
                pieces.seqlens,
                pieces.is_repeat,
            ]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, _SAMPLES.types, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=_SAMPLES), row_group_size=_ROWS_PER_GROUP)
            yield trained.share_of(pieces)


def _write_parquet(plan: Plan, folder: Path) -> Iterator[float]:
    names = schema.plan_files(plan.num_epochs)
    total = sum(plan.header["files"][name]["num_rows"] for name in names)
    done = 0
    for name in names:
        path = (folder / name).with_suffix(".parquet")
        path.parent.mkdir(exist_ok=True)
        with pq.ParquetWriter(path, plan.columns(name), compression="zstd") as writer:
            for batch in plan.record_batches(name):
                writer.write_batch(batch, row_group_size=_ROWS_PER_GROUP)
                done += batch.num_rows
                yield done / total
