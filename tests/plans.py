"""Plans written down by hand: what a planner would hand over, from plain Python lists."""

from dataclasses import dataclass, field

import numpy as np

from packer.plan import DROP_REASONS, DroppedSamples, PlanFacts, PlannedEpoch


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
        num_samples=len(seqlens),
        num_tokens=sum(seqlens),
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
        padded_seqlens_by_metric={
            metric: np.array([row.padded_seqlens[metric] for row in rows], np.int32) for metric in metrics
        },
    )


def drops(*samples: tuple[int, int, int, str]) -> DroppedSamples:
    """Return dropped samples from (sample_id, seqlen, tokens lost, reason)."""
    return DroppedSamples(
        sample_ids=np.array([s[0] for s in samples], np.int64),
        seqlens=np.array([s[1] for s in samples], np.int64),
        num_tokens=np.array([s[2] for s in samples], np.int64),
        reasons=np.array([DROP_REASONS.index(s[3]) for s in samples], np.uint8),
    )
