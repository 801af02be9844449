"""Write a plan epoch by epoch: a folder published by rename, or the same bytes in memory."""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer._version import __version__
from packer.arrays import numpy_dtype, to_arrow
from packer.plan import schema
from packer.plan.counts import Cuts, ShapeTable, SourceCounts, drop_counts, time_lost, whole_samples
from packer.plan.digest import HEADER_HASH, content_hash, header_hash
from packer.plan.epoch import DroppedSamples, PlannedEpoch
from packer.plan.facts import PlanFacts
from packer.plan.reader import Plan, load_plan
from packer.plan.storage import MemoryFiles
from packer.plan.tables import FolderTarget, MemoryTarget, TableFiles, Target
from packer.publish import published_directory

Progress = Callable[[float], None]


def write_plan(
    out: str | os.PathLike[str],
    facts: PlanFacts,
    epochs: Iterable[PlannedEpoch],
    *,
    dropped: DroppedSamples,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Write a plan into ``out``, one epoch after the other, and open it.

    Memory holds one epoch at a time. The folder appears under its name when it is complete, or not at all.

    Args:
        out: the directory to publish.
        facts: what the planner knows besides the rows.
        epochs: the epochs in order; each is written before the next is asked for.
        dropped: what every epoch leaves out.
        overwrite: replace a plan that is there.
        progress: told which share of the epoch at hand is written.

    Raises:
        TargetExistsError: ``out`` exists and may not be replaced.
        TargetBusyError: another process is writing the same target.
        TargetWriteError: no room, no permission, or a read-only place.
    """
    with published_directory(out, marker=schema.HEADER_FILE, overwrite=overwrite) as folder:
        _write_files(FolderTarget(folder), facts, epochs, dropped, progress)
    return load_plan(out)


def plan_in_memory(
    facts: PlanFacts,
    epochs: Iterable[PlannedEpoch],
    *,
    dropped: DroppedSamples,
    progress: Progress | None = None,
) -> Plan:
    """Build a plan that lives in memory: the same files, byte for byte, as on disk."""
    target = MemoryTarget()
    header = _write_files(target, facts, epochs, dropped, progress)
    return Plan(header, MemoryFiles(target.buffers()))


def _write_files(
    target: Target,
    facts: PlanFacts,
    epochs: Iterable[PlannedEpoch],
    dropped: DroppedSamples,
    progress: Progress | None,
) -> dict[str, Any]:
    """Write the tables, then the header; return the header as a reader sees it."""
    tables = _write_tables(target, facts, epochs, dropped, progress)
    header: dict[str, Any] = json.loads(json.dumps(tables, allow_nan=False))  # as a reader sees it
    header[HEADER_HASH] = header_hash(header)
    with target.open(schema.HEADER_FILE) as stream:
        stream.write((_readable(header) + "\n").encode())
    return header


def _readable(value: Any, depth: int = 0) -> str:
    """Return JSON with one line an entry in the outer objects, and one line an object inside."""
    inner = "\n" + "  " * (depth + 1)
    end = "\n" + "  " * depth
    if isinstance(value, dict) and value and depth < 2:
        entries = [f"{inner}{json.dumps(key)}: {_readable(item, depth + 1)}" for key, item in value.items()]
        return "{" + ",".join(entries) + end + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + ",".join(f"{inner}{json.dumps(item)}" for item in value) + end + "]"
    return json.dumps(value)


def _write_tables(
    target: Target,
    facts: PlanFacts,
    epochs: Iterable[PlannedEpoch],
    dropped: DroppedSamples,
    progress: Progress | None,
) -> dict[str, Any]:
    """Write all tables; return the header but for its own hash."""
    files: dict[str, dict[str, Any]] = {}
    counts: list[dict[str, Any]] = []
    shapes = ShapeTable(facts.config)
    totals = _Totals(facts)
    with TableFiles(target) as tables:
        drops = _DroppedTable(tables, facts, has_starts=dropped.starts is not None)
        drops.append(None, dropped)
        for number, epoch in enumerate(epochs):
            name = schema.microbatches_file(number)
            files[name], tensor_counts = _write_microbatches(tables, name, facts, epoch, shapes, progress)
            name = schema.steps_file(number)
            files[name] = _write_steps(tables, name, epoch, totals)
            drops.append(number, epoch.dropped)
            cuts = Cuts(epoch, dropped, facts.num_samples)
            counts.append(
                tensor_counts
                | {
                    "num_cut": cuts.num_cut,
                    "design_effect": epoch.design_effect,
                    "dropped": drop_counts(epoch.dropped, cuts.is_begun),
                    "figures": epoch.figures,
                }
            )
        files[schema.DROPPED_FILE] = drops.close()
    return {
        "format": schema.FORMAT,
        "version": schema.VERSION,
        "packer": __version__,
        **facts.to_json(),
        "num_epochs": len(counts),
        "shapes": shapes.as_json(),
        "dropped": drop_counts(dropped),
        "epochs": counts,
        "files": files,
        "content_hash": content_hash({name: entry["batch_digests"] for name, entry in files.items()}),
    }


def _write_microbatches(
    tables: TableFiles,
    name: str,
    facts: PlanFacts,
    epoch: PlannedEpoch,
    shapes: ShapeTable,
    progress: Progress | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write one epoch's micro-batches; return the file's entry and the epoch's counts."""
    sample_id = schema.id_type(facts.num_samples)
    rows_per_batch = schema.rows_per_batch(epoch.offsets)
    columns = schema.microbatches_schema(
        sample_id=sample_id,
        has_starts=epoch.starts is not None,
        metrics=tuple(epoch.padded_seqlens_by_metric),
        has_loss_tokens=epoch.num_loss_tokens is not None,
        rows_per_batch=rows_per_batch,
    )
    num_rows = len(epoch.offsets) - 1
    packed = facts.config["layout"] == "packed"
    by_slots, by_steps = time_lost(epoch.costs, facts.config["dp_size"], facts.config["grad_accum"])
    counts: dict[str, Any] = {
        "num_steps": len(epoch.step_num_samples),
        "num_microbatches": num_rows,
        "num_samples": 0,
        "num_pieces": 0,
        "num_tokens": 0,
        "num_padded_tokens": 0,
        "num_fillers": int(np.count_nonzero(epoch.is_filler)),
        "num_repeats": int(np.count_nonzero(epoch.is_repeat)),
        "max_padded_tokens": 0,
        "rank_imbalance": by_slots,
        "rank_imbalance_by_step": by_steps,
    }
    of_sources = SourceCounts(facts.sources)
    table = tables.open(name, columns)
    for first in range(0, num_rows, rows_per_batch):
        rows = slice(first, min(first + rows_per_batch, num_rows))
        arrays = _microbatch_arrays(epoch, rows, facts.config["dp_size"], facts.config["grad_accum"])
        table.append(_record_batch(columns, arrays))
        planned = ~(epoch.is_filler[rows] | epoch.is_repeat[rows])
        area = epoch.padded_seqlens[rows].astype(np.int64)
        if not packed:
            area *= arrays["num_samples"]
        counts["num_samples"] += int(whole_samples(arrays)[planned].sum())
        counts["num_pieces"] += int(arrays["num_samples"][planned].sum(dtype=np.int64))
        counts["num_tokens"] += int(arrays["num_tokens"][planned].sum())
        of_sources.add(*_planned_pieces(arrays, planned))
        counts["num_padded_tokens"] += int(area.sum())
        counts["max_padded_tokens"] = max(counts["max_padded_tokens"], int(area.max(initial=0)))
        shapes.add(
            np.ones_like(area) if packed else arrays["num_samples"],
            epoch.padded_seqlens[rows],
            arrays["num_tokens"] * ~epoch.is_filler[rows],
        )
        if progress is not None:
            progress(rows.stop / num_rows)
    return table.close(), counts | {"sources": of_sources.as_json()}


def _planned_pieces(
    arrays: dict[str, Any], is_planned: NDArray[np.bool_]
) -> tuple[NDArray[np.integer], NDArray[np.int32], NDArray[np.int32] | None]:
    """Return samples, tokens and, where samples are cut, starts of the pieces in rows that are no copies."""
    offsets, sample_ids = arrays["sample_ids"]
    seqlens, starts = arrays["seqlens"][1], arrays["starts"][1] if "starts" in arrays else None
    if is_planned.all():
        return sample_ids, seqlens, starts
    wanted = np.repeat(is_planned, np.diff(offsets))
    return sample_ids[wanted], seqlens[wanted], None if starts is None else starts[wanted]


def _microbatch_arrays(epoch: PlannedEpoch, rows: slice, dp_size: int, grad_accum: int) -> dict[str, Any]:
    """Return the columns of some rows; a list column is a pair (offsets int32, elements)."""
    row = np.arange(rows.start, rows.stop, dtype=np.int64)
    slot = row // dp_size
    step = slot // grad_accum
    offsets = epoch.offsets[rows.start : rows.stop + 1]
    pieces = slice(int(offsets[0]), int(offsets[-1]))
    local = (offsets - offsets[0]).astype(np.int32)
    seqlens = np.ascontiguousarray(epoch.seqlens[pieces])
    num_samples = np.diff(local)
    assert num_samples.min(initial=1) > 0, "a micro-batch holds at least one sample"
    arrays: dict[str, Any] = {
        "step": step,
        "accum": (slot - step * grad_accum).astype(np.int32),
        "dp_rank": (row - slot * dp_size).astype(np.int32),
        "sample_ids": (local, np.ascontiguousarray(epoch.sample_ids[pieces])),
        "seqlens": (local, seqlens),
        "num_samples": num_samples,
        "num_tokens": np.add.reduceat(seqlens, local[:-1], dtype=np.int64),
        "max_seqlen": np.maximum.reduceat(seqlens, local[:-1]),
        "padded_seqlen": epoch.padded_seqlens[rows],
        "cost": epoch.costs[rows],
        "is_filler": epoch.is_filler[rows],
        "is_repeat": epoch.is_repeat[rows],
    }
    if epoch.starts is not None:
        arrays["starts"] = (local, epoch.starts[pieces])
    if epoch.num_loss_tokens is not None:
        arrays[schema.LOSS_TOKENS] = epoch.num_loss_tokens[rows]
    for metric, padded in epoch.padded_seqlens_by_metric.items():
        arrays[schema.PADDED_SEQLEN_PREFIX + metric] = padded[rows]
    return arrays


def _write_steps(tables: TableFiles, name: str, epoch: PlannedEpoch, totals: "_Totals") -> dict[str, Any]:
    """Write one epoch's steps; return the file's entry. ``samples_before`` counts all that came before."""
    columns = schema.steps_schema()
    table = tables.open(name, columns)
    for first in range(0, len(epoch.step_num_samples), schema.MAX_ROWS_PER_BATCH):
        rows = slice(first, first + schema.MAX_ROWS_PER_BATCH)
        num_samples, num_tokens = epoch.step_num_samples[rows], epoch.step_num_tokens[rows]
        samples_before, totals.samples = _running(num_samples, totals.samples)
        tokens_before, totals.tokens = _running(num_tokens, totals.tokens)
        num_loss_tokens = epoch.step_num_loss_tokens
        arrays = {
            "step": np.arange(first, first + len(num_samples), dtype=np.int64),
            "num_samples": num_samples,
            "num_tokens": num_tokens,
            "num_loss_tokens": pa.nulls(len(num_samples), pa.int64())
            if num_loss_tokens is None
            else num_loss_tokens[rows],
            "max_seqlen": epoch.step_max_seqlen[rows],
            "lr_scale": epoch.lr_scales[rows],
            "samples_before": samples_before,
            "tokens_before": tokens_before,
        }
        table.append(_record_batch(columns, arrays))
    return table.close()


class _DroppedTable:
    """``dropped.arrow``, filled epoch by epoch in record batches of equal size."""

    def __init__(self, tables: TableFiles, facts: PlanFacts, *, has_starts: bool) -> None:
        sample_id = schema.id_type(facts.num_samples)
        self._columns = schema.dropped_schema(sample_id=sample_id, has_starts=has_starts)
        self._reasons = schema.reason_dictionary(facts.drop_reasons)
        self._table = tables.open(schema.DROPPED_FILE, self._columns)
        self._pending: list[pa.RecordBatch] = []

    def append(self, epoch: int | None, dropped: DroppedSamples) -> None:
        for first in range(0, len(dropped.sample_ids), schema.MAX_ROWS_PER_BATCH):
            rows = slice(first, first + schema.MAX_ROWS_PER_BATCH)
            reasons = to_arrow(dropped.reasons[rows].astype(np.int8))
            num_rows = len(reasons)
            starts = np.zeros(num_rows, np.int64) if dropped.starts is None else dropped.starts[rows]
            arrays = {
                "start": starts,
                "epoch": pa.nulls(num_rows, pa.int32())
                if epoch is None
                else np.full(num_rows, epoch, np.int32),
                "sample_id": dropped.sample_ids[rows],
                "seqlen": dropped.seqlens[rows],
                "num_tokens": dropped.num_tokens[rows],
                "reason": pa.DictionaryArray.from_arrays(reasons, self._reasons),
            }
            self._pending.append(_record_batch(self._columns, arrays))
            self._flush(schema.MAX_ROWS_PER_BATCH)

    def close(self) -> dict[str, Any]:
        self._flush(1)
        return self._table.close()

    def _flush(self, at_least: int) -> None:
        """Write what is pending in full batches, the last one excepted."""
        if sum(batch.num_rows for batch in self._pending) < at_least:
            return
        rows = pa.Table.from_batches(self._pending, self._columns).combine_chunks()
        self._pending = []
        for batch in rows.to_batches(schema.MAX_ROWS_PER_BATCH):
            if batch.num_rows >= min(at_least, schema.MAX_ROWS_PER_BATCH):
                self._table.append(batch)
            else:
                self._pending.append(batch)


class _Totals:
    """Samples and tokens of the steps so far: of earlier plans, and of those written, over all epochs."""

    def __init__(self, facts: PlanFacts) -> None:
        self.samples = sum(account.num_samples for account in facts.trained)
        self.tokens = sum(account.num_tokens for account in facts.trained)


def _running(sizes: NDArray[np.int64], start: int) -> tuple[NDArray[np.int64], int]:
    """Return the total before each step and after the last."""
    totals = start + np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    return totals[:-1], int(totals[-1])


def _record_batch(columns: pa.Schema, arrays: dict[str, Any]) -> pa.RecordBatch:
    """Wrap arrays in their columns, without a copy where the dtype is the column's already."""
    return pa.RecordBatch.from_arrays(
        [_array(field, arrays[field.name]) for field in columns], schema=columns
    )


def _array(field: pa.Field, values: Any) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, tuple):
        offsets, elements = values
        inner = _array(field.type.value_field, elements)
        return pa.ListArray.from_arrays(to_arrow(offsets), inner, type=field.type)
    return to_arrow(values.astype(numpy_dtype(field.type), copy=False))
