"""Under a curriculum: no step uses a sample that is harder than what the schedule admits by then."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.curriculum import Schedule, parse_curriculum
from packer.errors import PlanError
from packer.plan.epoch import DROP_REASONS
from packer.plan.reader import Plan
from packer.plan.rows import MicroBatches
from packer.plan.schema import DROPPED_FILE, microbatches_file
from packer.plan.verify_metrics import PlanMetrics
from packer.plan.verify_rows import Rows

_SEQLEN = "seqlen"


def check_curriculum(plan: Plan, metrics: PlanMetrics, seqlens: NDArray[np.integer]) -> Iterator[int]:
    """Check every micro-batch of every epoch; the other invariants must hold already.

    Memory: 24 bytes a sample where difficulties are percentiles, 8 a step of an epoch and metric.

    Args:
        plan: a plan with a curriculum.
        metrics: what it was made from.
        seqlens: (num_samples,) the metric that the plan calls seqlen.

    Yields:
        How many micro-batches were checked, part by part.

    Raises:
        InvariantError: the first sample that is used too early.
    """
    pieces = _pieces_of(plan, seqlens)
    difficulties = [
        _Difficulty(schedule, pieces, None if schedule.metric == _SEQLEN else metrics.metric(schedule.metric))
        for schedule in parse_curriculum(plan.config["curriculum"])
    ]
    first_step = 0
    for number in range(plan.num_epochs):
        epoch = plan.epoch(number)
        raises = plan.header["epochs"][number]["figures"].get("curriculum_raises", [])
        admitted = [each.admitted(first_step, epoch.num_steps, raises) for each in difficulties]
        for table in epoch.microbatches():
            for difficulty, most in zip(difficulties, admitted, strict=True):
                difficulty.check(number, table, most, first_step)
            yield len(table.step)
        first_step += epoch.num_steps


class _Pieces(NamedTuple):
    """What is planned, or dropped in some epochs only: P samples, or pieces of samples, in their order."""

    sample_ids: NDArray[np.int64]
    """(P,)"""
    seqlens: NDArray[np.int64]
    """(P,)"""
    first: NDArray[np.int64]
    """(num_samples,) the position of each sample's first piece."""
    limit: int
    """Tokens of a piece that is not the last of its sample."""


def _pieces_of(plan: Plan, seqlens: NDArray[np.integer]) -> _Pieces:
    """Take what no epoch drops as a whole, and cut it as the plan does."""
    lengths = seqlens.astype(np.int64)
    is_left_out = np.zeros(len(lengths), np.bool_)
    for part in plan.dropped():
        always = part.epoch == -1
        is_cut = part.reason == DROP_REASONS.index("truncated")
        is_left_out[part.sample_id[always & ~is_cut]] = True
        lengths[part.sample_id[always & is_cut]] -= part.num_tokens[always & is_cut]
    counts = (~is_left_out).astype(np.int64)
    limit = int(lengths.max(initial=1))
    if plan.config.get("too_long") == "split":
        if plan.header["max_seqlen"] is None:
            raise PlanError("max_seqlen is null in plan.json, so pieces of samples are unknown; plan again")
        limit = plan.header["max_seqlen"]
        counts *= -(-lengths // limit)
        _check_number(plan, int(counts.sum()))
    first = np.cumsum(counts) - counts
    sample_ids = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(sample_ids)) - first[sample_ids]) * limit
    if plan.header["version"] >= 2:
        # a last piece of one token takes one from the piece before
        starts -= (starts > 0) & (lengths[sample_ids] - starts == 1)
    ends = np.append(starts[1:], 0)
    ends[(first + counts - 1)[counts > 0]] = lengths[counts > 0]
    return _Pieces(sample_ids, np.minimum(ends - starts, limit), first, limit)


def _check_number(plan: Plan, num_pieces: int) -> None:
    """Refuse more pieces than the files can list: each is planned, or dropped, in every epoch."""
    files = plan.header["files"]
    room = files[microbatches_file(0)]["size"] + files[DROPPED_FILE]["size"] if plan.num_epochs else 0
    if num_pieces > room // 4:
        raise PlanError(
            f"max_seqlen {plan.header['max_seqlen']} in plan.json splits the samples into {num_pieces} "
            "pieces, more than are planned and dropped; plan again"
        )


class _Difficulty:
    """The difficulty of pieces by one metric of the curriculum."""

    def __init__(self, schedule: Schedule, pieces: _Pieces, metric: NDArray[np.integer] | None) -> None:
        self._schedule = schedule
        self._pieces = pieces
        self._metric = metric
        values = pieces.seqlens if metric is None else metric[pieces.sample_ids].astype(np.int64)
        # (P,) where difficulties are percentiles
        self._percentiles = None if schedule.whole is None else _percentiles(values, schedule.whole)
        difficulties = values if self._percentiles is None else self._percentiles
        last = schedule.levels[-1]
        # the last level, then what the schedule never admits, by difficulty
        self._beyond = np.concatenate([[last], np.unique(difficulties[difficulties > last])])

    def admitted(self, first_step: int, num_steps: int, raises: list[dict[str, int]]) -> NDArray[np.int64]:
        """Return the (num_steps,) most difficult that each step of an epoch may use."""
        steps = first_step + np.arange(num_steps)
        as_of = steps.copy()
        beyond = np.zeros(num_steps, np.int64)
        for raised in raises:
            later = slice(max(raised["step"] - first_step, 0), None)
            as_of[later] = np.maximum(as_of[later], raised["as_of"])
            beyond[later] = raised["beyond"]
        levels = self._schedule.levels_at(as_of)
        return np.where(beyond > 0, self._beyond[np.minimum(beyond, len(self._beyond) - 1)], levels)

    def check(self, epoch: int, table: MicroBatches, most: NDArray[np.int64], first_step: int) -> None:
        """Refuse the first piece that is more difficult than its step may use."""
        difficulties = self._of(table)
        admitted = np.repeat(most[table.step], np.diff(table.offsets))
        unit = "percentile " if self._percentiles is not None else ""

        def why(piece: int) -> str:
            step = first_step + int(np.repeat(table.step, np.diff(table.offsets))[piece])
            return (
                f"its {self._schedule.metric} is {unit}{difficulties[piece]}, step {step} of the curriculum "
                f"admits up to {unit}{admitted[piece]}"
            )

        Rows(epoch, table).refuse_piece(difficulties > admitted, why)

    def _of(self, table: MicroBatches) -> NDArray[np.integer]:
        """Return the difficulty of each piece of a table."""
        if self._percentiles is None:
            return table.seqlens if self._metric is None else self._metric[table.sample_ids]
        position = self._pieces.first[table.sample_ids]
        if table.starts is not None:
            position = position - -table.starts // self._pieces.limit  # rounded up: a start may be one less
        percentiles: NDArray[np.int64] = self._percentiles[np.minimum(position, len(self._percentiles) - 1)]
        return percentiles


def _percentiles(values: NDArray[np.int64], whole: int) -> NDArray[np.int64]:
    """Return in which of ``whole`` equal parts each value is, from 1; what is left over joins the last."""
    size = max(len(values) // whole, 1)
    percentiles = np.empty(len(values), np.int64)
    percentiles[np.argsort(values, kind="stable")] = np.minimum(np.arange(len(values)) // size + 1, whole)
    return percentiles if len(values) >= whole else np.full(len(values), whole)
