"""Plans written down by hand: what a planner would hand over, from plain Python lists."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from packer.plan import DROP_REASONS, DroppedSamples, Plan, PlanFacts, PlannedEpoch, plan_in_memory
from packer.plan.digest import HEADER_HASH, batch_digest, content_hash, header_hash
from packer.plan.sources import PlanSource
from tests import invariants


@dataclass(kw_only=True)
class Row:
    """One micro-batch: pieces are (sample_id, seqlen) or (sample_id, seqlen, start)."""

    pieces: list[tuple[int, ...]]
    padded_seqlen: int | None = None
    cost: int | None = None
    is_filler: bool = False
    is_repeat: bool = False
    padded_seqlens: dict[str, int] = field(default_factory=dict)

    @property
    def seqlens(self) -> list[int]:
        return [piece[1] for piece in self.pieces]


def config(**options: object) -> dict[str, object]:
    """Return the configuration of a small plan."""
    defaults: dict[str, object] = {
        "layout": "padded",
        "count": "padded",
        "max_tokens": 64,
        "order": "sequential",
        "packing": "next-fit",
        "dp_size": 1,
        "grad_accum": 1,
        "epochs": 1,
        "seed": 0,
        "lr_scaling": "none",
        "lr_by": "samples",
        "remainder": "drop",
        "too_long": "error",
    }
    return defaults | options


def facts(seqlens: list[int], **options: object) -> PlanFacts:
    """Return the facts of a plan over samples of these lengths."""
    return PlanFacts(
        config=config(**options),
        sources=[PlanSource(num_samples=len(seqlens), num_tokens=sum(seqlens))],
        lr_base=1.0,
        loss_tokens="seqlen - 1",
    )


def epoch(
    rows: list[Row],
    *,
    dp_size: int = 1,
    grad_accum: int = 1,
    layout: str = "padded",
    cut: bool = False,
    lr_scales: list[float] | None = None,
    dropped: DroppedSamples | None = None,
    loss_tokens: bool = True,
    id_dtype: type = np.int32,
) -> PlannedEpoch:
    """Return the arrays of one epoch; sizes of the steps are counted here, one row after the other."""
    per_step = dp_size * grad_accum
    assert len(rows) % per_step == 0
    steps = [rows[first : first + per_step] for first in range(0, len(rows), per_step)]
    counted = [[row for row in step if not row.is_filler] for step in steps]
    pieces = [piece for row in rows for piece in row.pieces]
    padded = [row.padded_seqlen or (sum if layout == "packed" else max)(row.seqlens) for row in rows]
    metrics = list(rows[0].padded_seqlens) if rows else []
    return PlannedEpoch(
        sample_ids=np.array([piece[0] for piece in pieces], id_dtype),
        seqlens=np.array([piece[1] for piece in pieces], np.int32),
        starts=np.array([piece[2] for piece in pieces], np.int32) if cut else None,
        offsets=np.cumsum([0] + [len(row.pieces) for row in rows], dtype=np.int64),
        padded_seqlens=np.array(padded, np.int32),
        costs=np.array([sum(r.seqlens) if r.cost is None else r.cost for r in rows], np.int64),
        is_filler=np.array([row.is_filler for row in rows], np.bool_),
        is_repeat=np.array([row.is_repeat for row in rows], np.bool_),
        step_num_samples=np.array([sum(len(r.pieces) for r in s) for s in counted], np.int64),
        step_num_tokens=np.array([sum(sum(r.seqlens) for r in s) for s in counted], np.int64),
        step_num_loss_tokens=np.array(
            [sum(max(n - 1, 0) for r in s for n in r.seqlens) for s in counted], np.int64
        )
        if loss_tokens
        else None,
        step_max_seqlen=np.array([max(n for r in s for n in r.seqlens) for s in steps], np.int32),
        lr_scales=np.array(lr_scales or [1.0] * len(steps), np.float64),
        dropped=dropped or drops(),
        design_effect={
            "seqlen": invariants.design_effect(
                [[n for row in step for n in row.seqlens] for step in counted]
            ),
            "source": None,
        },
        padded_seqlens_by_metric={
            metric: np.array([row.padded_seqlens[metric] for row in rows], np.int32) for metric in metrics
        },
    )


def drops(*samples: tuple[int, int, int, str], starts: list[int] | None = None) -> DroppedSamples:
    """Return dropped samples from (sample_id, seqlen, tokens lost, reason)."""
    return DroppedSamples(
        sample_ids=np.array([s[0] for s in samples], np.int64),
        seqlens=np.array([s[1] for s in samples], np.int64),
        num_tokens=np.array([s[2] for s in samples], np.int64),
        reasons=np.array([DROP_REASONS.index(s[3]) for s in samples], np.uint8),
        starts=None if starts is None else np.array(starts, np.int64),
    )


def whole_plan() -> tuple[Plan, list[int]]:
    """Return a plan of two epochs without cuts, on two ranks, and the lengths of its samples."""
    seqlens = [5, 3, 8, 2, 7, 4, 6, 1, 9, 0, 30, 3, 100]

    def row(*ids: int) -> Row:
        return Row(pieces=[(i, seqlens[i]) for i in ids])

    rows = [
        [row(0, 1), row(2), row(4, 5), row(6, 7)],
        [row(8, 11), row(0, 1), row(2, 3), row(4, 5)],
    ]
    sizes = [[3, 4], [4, 4]]
    lost = [
        drops((3, 2, 2, "remainder"), (8, 9, 9, "remainder"), (11, 3, 3, "remainder")),
        drops((6, 6, 6, "remainder"), (7, 1, 1, "remainder")),
    ]
    always = drops((9, 0, 0, "empty"), (10, 30, 30, "too_long"), (12, 100, 100, "filtered"))
    made = facts(
        seqlens,
        max_tokens=20,
        dp_size=2,
        epochs=2,
        max_seqlen=10,
        too_long="drop",
        filter_max=50,
        lr_scaling="linear",
    )
    epochs = [
        epoch(rows[e], dp_size=2, lr_scales=[n / 3.75 for n in sizes[e]], dropped=lost[e]) for e in range(2)
    ]
    return plan_in_memory(replace(made, lr_base=3.75), epochs, dropped=always), seqlens


def cut_plan() -> tuple[Plan, list[int]]:
    """Return a packed plan with samples in pieces: one of its pieces is dropped, another sample truncated."""
    seqlens = [25, 4, 8, 14]
    rows = [
        Row(pieces=[(0, 8, 0), (1, 2, 2)], padded_seqlen=12),
        Row(pieces=[(0, 8, 16)], padded_seqlen=8),
        Row(pieces=[(1, 2, 0), (2, 8, 0)], padded_seqlen=12),
        Row(pieces=[(3, 8, 0)], padded_seqlen=8),
    ]
    options = {"layout": "packed", "grad_accum": 2}
    lost = drops((0, 25, 8, "remainder"), (0, 25, 1, "remainder"))
    made = facts(seqlens, **options, max_tokens=12, pad_multiple=4, too_long="truncate", max_seqlen=8)
    plan = plan_in_memory(
        made, [epoch(rows, cut=True, dropped=lost, **options)], dropped=drops((3, 14, 6, "truncated"))
    )
    return plan, seqlens


MIXED = {"web": [5, 3, 8, 2, 7, 4, 6], "code": [6, 1, 9], "old": [4, 4]}
"""Lengths of the sources of ``mixed_plan``: ids 0 to 6, 7 to 9, 10 and 11."""


def mixed_plan(**options: object) -> Plan:
    """Return a plan of three sources: six of seven samples once, two passes but for a sample, and none."""
    seqlens = [length for lengths in MIXED.values() for length in lengths]

    def row(*ids: int) -> Row:
        return Row(pieces=[(i, seqlens[i]) for i in ids])

    rows = [row(0, 1), row(7), row(2), row(9), row(4, 5), row(8, 7), row(3), row(9)]
    passes = {"web": (6 / 7, 1), "code": (5 / 3, 2), "old": (0.0, 0)}
    shares = {"web": 0.45, "code": 0.55, "old": 0.0}
    sources, first_id = [], 0
    for name, lengths in MIXED.items():
        sources.append(
            PlanSource(
                name=name,
                first_id=first_id,
                num_samples=len(lengths),
                num_tokens=sum(lengths),
                passes=passes[name][0],
                num_passes=passes[name][1],
            )
        )
        first_id += len(lengths)
    made = PlanFacts(
        config=config(max_tokens=20, dp_size=2, order="random", packing="windowed")
        | {"mix": [{"start": 0.0, "shares": shares}], "mix_by": "tokens", "total_steps": 4}
        | options,
        sources=sources,
        phases=[{"first_step": 0, "shares": shares}],
        lr_base=1.0,
        loss_tokens="seqlen - 1",
    )
    lost = drops((6, 6, 6, "unreached"), (8, 1, 1, "unreached"))
    planned = epoch(rows, dp_size=2, dropped=lost)
    of_sources = [
        [(length, int(i >= 7)) for row in rows[at : at + 2] for i, length in row.pieces]
        for at in (0, 2, 4, 6)
    ]
    planned.design_effect["source"] = invariants.design_effect_of(of_sources)
    return plan_in_memory(made, [planned], dropped=drops())


def copying_plan(kind: str) -> tuple[Plan, list[int]]:
    """Return a plan whose last step is made full by a filler or a repeat."""
    seqlens = [4, 4, 2]
    rows = [
        Row(pieces=[(0, 4)]),
        Row(pieces=[(1, 4)]),
        Row(pieces=[(2, 2)]),
        Row(pieces=[(2, 2)], is_filler=kind == "keep", is_repeat=kind == "fill"),
    ]
    made = facts(seqlens, dp_size=2, remainder=kind)
    return plan_in_memory(made, [epoch(rows, dp_size=2)], dropped=drops()), seqlens


def many_rows(num_rows: int, num_epochs: int = 1) -> tuple[PlanFacts, list[PlannedEpoch]]:
    """Return facts and epochs of a plan in which row r holds sample 2r and 2r + 1."""
    planned = PlannedEpoch(
        sample_ids=np.arange(2 * num_rows, dtype=np.int32),
        seqlens=np.full(2 * num_rows, 7, np.int32),
        starts=None,
        offsets=np.arange(0, 2 * num_rows + 1, 2),
        padded_seqlens=np.full(num_rows, 7, np.int32),
        costs=np.full(num_rows, 14),
        is_filler=np.zeros(num_rows, bool),
        is_repeat=np.zeros(num_rows, bool),
        step_num_samples=np.full(num_rows, 2),
        step_num_tokens=np.full(num_rows, 14),
        step_num_loss_tokens=None,
        step_max_seqlen=np.full(num_rows, 7, np.int32),
        lr_scales=np.ones(num_rows),
        dropped=drops(),
    )
    made = PlanFacts(
        config=config(), sources=[PlanSource(num_samples=2 * num_rows, num_tokens=14 * num_rows)]
    )
    return made, [planned] * num_epochs


def forge(folder: Path, name: str, edit) -> None:
    """Change a file of a plan and set every hash to match: what is wrong then is the content alone.

    ``edit`` gets the header, or the rows of a table as a list of dictionaries, and changes it in place.
    """
    header = json.loads((folder / "plan.json").read_text())
    if name == "plan.json":
        edit(header)
    else:
        with pa.ipc.open_file(pa.py_buffer((folder / name).read_bytes())) as reader:
            columns, table = reader.schema, reader.read_all()
        rows = table.to_pylist()
        edit(rows)
        batch = _record_batch(rows, columns)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_file(sink, columns) as writer:
            writer.write_batch(batch)
        data = (folder / name).read_bytes()
        header["files"][name] |= {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "num_rows": len(rows),
            "batch_digests": [batch_digest(batch)],
        }
        header["content_hash"] = content_hash(
            {name: entry["batch_digests"] for name, entry in header["files"].items()}
        )
    header[HEADER_HASH] = header_hash(header)
    (folder / "plan.json").write_text(json.dumps(header))


def _record_batch(rows: list[dict[str, object]], columns: pa.Schema) -> pa.RecordBatch:
    """Return rows as one record batch; reasons keep the codes that they have in every plan."""
    arrays = []
    for column in columns:
        values = [row[column.name] for row in rows]
        if column.name == "reason":
            codes = pa.array([DROP_REASONS.index(str(value)) for value in values], pa.int8())
            arrays.append(pa.DictionaryArray.from_arrays(codes, pa.array(DROP_REASONS)))
        else:
            arrays.append(pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def write_metric(folder: Path, name: str, values: list[int]) -> Path:
    """Write a metric by hand, as DeepSpeed's analyzer leaves it; return the metrics directory."""
    place = folder / name
    place.mkdir(parents=True)
    prefix = str(place / f"{name}_sample_to_metric")
    count = len(values)
    np.array(values, "<i4").tofile(f"{prefix}.bin")
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\4" + count.to_bytes(8, "little")
    body = np.ones(count, "<i4").tobytes() + np.arange(0, 4 * count, 4, dtype="<i8").tobytes()
    documents = np.array([0, count], "<i8")
    Path(f"{prefix}.idx").write_bytes(head + (2).to_bytes(8, "little") + body + documents.tobytes())
    return folder
