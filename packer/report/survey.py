"""What only all micro-batches together tell: lengths, padding step by step, the work of every rank."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import PlanError
from packer.plan import DROP_REASONS, MicroBatch, MicroBatches, Plan
from packer.plan.sources import source_of
from packer.report.series import Series, binned, over_steps

NUM_BINS = 160
"""Points of a line along the steps."""
NUM_LENGTH_BINS = 64
MOST_LENGTHS = 1 << 22
"""Lengths up to this are counted one by one; longer ones count as this long in the histogram."""
FIXED_SIZE_SAMPLES = 1 << 20
"""Samples that are dealt into batches of fixed size, to estimate their padding."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSize:
    """The same samples in shuffled batches of a fixed number, padded to the longest of each, and rounded."""

    num_rows: int
    """Samples a batch: as many as a micro-batch of the plan holds on average: a step has its tokens."""
    padding: float
    """Padded over real tokens, less one."""
    times_largest: float
    """Its largest tensor over the plan's."""
    times_tokens: float
    """Tokens of its tensors over those of the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A plan in pictures' data."""

    length_edges: list[int]
    """(n + 1,) edges of the bins of sequence lengths."""
    planned_lengths: list[int]
    """(n,) planned samples, or pieces of samples, of all epochs."""
    dropped_lengths: dict[str, list[int]]
    """Reason → (n,)"""
    padding: Series
    """Of each stretch of steps: padded over real tokens, less one."""
    tokens: Series
    samples: Series
    lr_scale: Series
    mean_length: Series
    """Of the samples, or pieces, of a step."""
    random_length: tuple[float, float]
    """What steps of random samples would have: the mean, and the standard deviation over the steps."""
    is_cut: bool
    """Whether samples are in pieces: each is counted at its own length."""
    source_shares: dict[str, Series]
    """Name → its share of the tokens of each stretch of steps; empty where the plan has one source."""
    rank_costs: list[float]
    """(dp_size,) share of the whole cost that each rank has."""
    fixed_size: FixedSize | None
    """None where nothing is planned."""
    example_steps: dict[str, tuple[int, int]]
    """What it is an example of → (epoch, step)."""

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        entries = asdict(self)
        for name, value in entries.items():
            if isinstance(value, Series):
                entries[name] = value._asdict()
        entries["source_shares"] = {name: series._asdict() for name, series in self.source_shares.items()}
        return entries


def survey(plan: Plan, *, progress: Progress | None = None) -> Survey:
    """Read all micro-batches once.

    Memory: 16 bytes a step, with several sources as many more as 8 for each, and some megabytes for the
    lengths.
    """
    scan = _Scan(plan)
    total = sum(counts["num_microbatches"] for counts in plan.header["epochs"])
    done = 0
    for epoch in range(plan.num_epochs):
        scan.begin(epoch)
        for table in plan.epoch(epoch).microbatches():
            scan.count(table)
            done += len(table.step)
            if progress is not None:
                progress(done, total)
    dropped = scan.dropped_lengths()
    lengths = scan.lengths(max(map(len, dropped.values()), default=0))
    dropped = {reason: _added(counts, np.zeros_like(lengths)) for reason, counts in dropped.items()}
    edges = _length_edges(lengths + sum(dropped.values(), np.zeros_like(lengths)))
    paddings = scan.paddings()
    return Survey(
        length_edges=edges.tolist(),
        planned_lengths=_in_bins(lengths, edges),
        dropped_lengths={reason: _in_bins(counts, edges) for reason, counts in dropped.items()},
        padding=binned(paddings, sum(map(len, paddings)), NUM_BINS),
        tokens=over_steps(plan, "num_tokens", NUM_BINS),
        samples=over_steps(plan, "num_samples", NUM_BINS),
        lr_scale=over_steps(plan, "lr_scale", NUM_BINS),
        mean_length=_mean_length(plan),
        random_length=_random_length(lengths, plan),
        is_cut=scan.is_cut,
        source_shares=scan.source_shares(),
        rank_costs=scan.rank_costs(),
        fixed_size=_fixed_size(plan, lengths),
        example_steps=_examples(paddings),
    )


class _Scan:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lengths = np.zeros(1, np.int64)
        self._costs = np.zeros(plan.dp_size)
        self.is_cut = False
        self._padded: list[NDArray[np.int64]] = []
        self._real: list[NDArray[np.int64]] = []
        self._of_sources: list[NDArray[np.int64]] = []

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        num_steps = self._plan.epoch(epoch).num_steps
        self._padded.append(np.zeros(num_steps, np.int64))
        self._real.append(np.zeros(num_steps, np.int64))
        # (num_steps, sources) tokens
        num_sources = len(self._plan.sources)
        self._of_sources.append(np.zeros((num_steps if num_sources > 1 else 0, num_sources), np.int64))

    def count(self, table: MicroBatches) -> None:
        """Add rows of the epoch."""
        copies = table.is_filler | table.is_repeat
        self.is_cut |= table.starts is not None
        seqlens = table.seqlens
        if copies.any():
            seqlens = seqlens[np.repeat(~copies, np.diff(table.offsets))]
        self._lengths = _added(self._lengths, np.bincount(np.clip(seqlens, 0, MOST_LENGTHS)))
        row = table.first_row + np.arange(len(table.cost))
        self._costs += np.bincount(row % self._plan.dp_size, table.cost, minlength=len(self._costs))
        area = table.padded_seqlen.astype(np.int64)
        if self._plan.layout == "padded":
            area *= table.num_samples
        step = row // (self._plan.dp_size * self._plan.grad_accum)
        starts = np.flatnonzero(np.diff(step, prepend=-1))
        steps = step[starts]
        self._padded[-1][steps] += np.add.reduceat(area, starts)
        self._real[-1][steps] += np.add.reduceat(table.num_tokens * ~table.is_filler, starts)
        if len(self._plan.sources) > 1:
            trained = np.repeat(~table.is_filler, np.diff(table.offsets))
            of_piece = np.repeat(step, np.diff(table.offsets))[trained]
            of = source_of(table.sample_ids[trained], self._plan.sources)
            np.add.at(self._of_sources[-1], (of_piece, of), table.seqlens[trained])

    def lengths(self, at_least: int) -> NDArray[np.int64]:
        """Return how many planned pieces have each length, up to ``at_least`` and the longest."""
        return _added(self._lengths, np.zeros(at_least, np.int64))

    def dropped_lengths(self) -> dict[str, NDArray[np.int64]]:
        """Return the same for each reason; what every epoch drops counts in each."""
        counts: dict[str, NDArray[np.int64]] = {}
        for part in self._plan.dropped():
            for code in np.unique(part.reason):
                mine = part.reason == code
                times = np.where(part.epoch[mine] < 0, self._plan.num_epochs, 1)
                # of a sample that is cut, the piece that is lost
                found = np.bincount(np.clip(part.num_tokens[mine], 0, MOST_LENGTHS), times).astype(np.int64)
                reason = DROP_REASONS[code]
                counts[reason] = _added(counts.get(reason, np.zeros(1, np.int64)), found)
        return counts

    def paddings(self) -> list[NDArray[np.float64]]:
        """Return per epoch the (num_steps,) padding of each step."""
        return [
            padded / np.maximum(real, 1) - 1 for padded, real in zip(self._padded, self._real, strict=True)
        ]

    def source_shares(self) -> dict[str, Series]:
        """Return each source's share of the tokens along the steps."""
        if len(self._plan.sources) == 1:
            return {}
        num_steps = sum(map(len, self._real))
        shares = [
            tokens / np.maximum(real, 1)[:, None]
            for tokens, real in zip(self._of_sources, self._real, strict=True)
        ]
        return {
            source.label: binned((share[:, number] for share in shares), num_steps, NUM_BINS)
            for number, source in enumerate(self._plan.sources)
        }

    def rank_costs(self) -> list[float]:
        """Return each rank's share of the whole cost."""
        shares: list[float] = (self._costs / max(self._costs.sum(), 1)).tolist()
        return shares


def _added(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add counts of different length."""
    if len(left) < len(right):
        left, right = right, left
    total = left.copy()
    total[: len(right)] += right
    return total


def _length_edges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return edges of bins: of equal width, or growing where few samples are far longer than most."""
    present = np.flatnonzero(counts)
    if not len(present):
        return np.array([0, 1])
    longest = int(present[-1])
    median = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
    if longest > 32 * max(median, 1):
        edges = np.geomspace(max(int(present[0]), 1), longest + 1, NUM_LENGTH_BINS + 1)
        return np.unique(np.concatenate(([int(present[0])], np.ceil(edges).astype(np.int64))))
    width = -(-(longest + 1) // NUM_LENGTH_BINS)
    return np.arange(0, longest + 1 + width, width)


def _in_bins(counts: NDArray[np.int64], edges: NDArray[np.int64]) -> list[int]:
    totals = np.concatenate(([0], np.cumsum(counts)))
    at = np.minimum(edges, len(counts))
    in_bins: list[int] = np.diff(totals[at]).tolist()
    return in_bins


def _mean_length(plan: Plan) -> Series:
    """Return the mean length of each step's samples, along all steps of all epochs."""
    tables = (table for epoch in range(plan.num_epochs) for table in plan.epoch(epoch).steps())
    num_steps = sum(counts["num_steps"] for counts in plan.header["epochs"])
    means = (table.num_tokens / np.maximum(table.num_samples, 1) for table in tables)
    return binned(means, num_steps, NUM_BINS)


def _random_length(counts: NDArray[np.int64], plan: Plan) -> tuple[float, float]:
    """Return the mean length, and how much it would differ between steps of random samples."""
    total = int(counts.sum())
    num_steps = sum(epoch["num_steps"] for epoch in plan.header["epochs"])
    if not total or not num_steps:
        return 0.0, 0.0
    lengths = np.arange(len(counts), dtype=np.float64)
    mean = float(lengths @ counts) / total
    variance = float((lengths - mean) ** 2 @ counts) / total
    return mean, math.sqrt(variance * num_steps / total)


def _fixed_size(plan: Plan, counts: NDArray[np.int64]) -> FixedSize | None:
    """Deal a choice of the planned lengths into batches of as many samples as the plan's micro-batches."""
    total = int(counts.sum())
    if not total:
        return None
    largest = max(epoch["max_padded_tokens"] for epoch in plan.header["epochs"])
    multiple = math.lcm(plan.config.get("sp_size", 1), plan.config.get("pad_multiple", 1))
    num_rows = max(round(total / _planned_microbatches(plan)), 1)
    generator = np.random.default_rng(0)
    if total <= FIXED_SIZE_SAMPLES:
        lengths = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    else:
        lengths = generator.choice(len(counts), FIXED_SIZE_SAMPLES, p=counts / total)
    starts = np.arange(0, len(lengths), num_rows)
    longest_of = -(-np.maximum.reduceat(lengths, starts) // multiple) * multiple
    areas = longest_of * np.diff(np.append(starts, len(lengths)))
    padding = float(areas.sum() / lengths.sum() - 1)
    tokens = float(np.arange(len(counts)) @ counts)
    padded = sum(epoch["num_padded_tokens"] for epoch in plan.header["epochs"])
    return FixedSize(
        num_rows=num_rows,
        padding=padding,
        times_largest=float(areas.max()) / max(largest, 1),
        times_tokens=tokens * (1 + padding) / max(padded, 1),
    )


def _planned_microbatches(plan: Plan) -> int:
    """Return how many micro-batches are no copies."""
    epochs = plan.header["epochs"]
    counts = (each["num_microbatches"] - each["num_fillers"] - each["num_repeats"] for each in epochs)
    return max(int(sum(counts)), 1)


def _examples(paddings: list[NDArray[np.float64]]) -> dict[str, tuple[int, int]]:
    """Return steps worth a picture."""
    filled = [epoch for epoch, padding in enumerate(paddings) if len(padding)]
    if not filled:
        return {}
    epoch = filled[0]
    order = np.argsort(paddings[epoch], kind="stable")
    steps = {
        "typical": order[len(order) // 2],
        "least padding": order[0],
        "most padding": order[-1],
        "first": 0,
        "last": len(order) - 1,
    }
    return {name: (epoch, int(step)) for name, step in steps.items()}


def microbatches_of(plan: Plan, epoch: int, step: int) -> list[MicroBatch]:
    """Return the micro-batches of one step in the order of their rows.

    Raises:
        PlanError: there is no such epoch or step.
    """
    opened = plan.epoch(epoch)
    if not 0 <= step < opened.num_steps:
        raise PlanError(f"step {step} is not planned: epoch {epoch} has steps 0 to {opened.num_steps - 1}")
    per_step = plan.dp_size * plan.grad_accum
    return [opened.microbatch(row) for row in range(step * per_step, (step + 1) * per_step)]


def step_rows(plan: Plan, epoch: int, step: int) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of one step, as plain JSON; of several sources with the place of each sample's.

    Raises:
        PlanError: there is no such epoch or step.
    """
    for found in microbatches_of(plan, epoch, step):
        of_sources = {"sources": source_of(found.sample_ids, plan.sources).tolist()}
        yield {
            "accum": found.accum,
            "dp_rank": found.dp_rank,
            "sample_ids": found.sample_ids.tolist(),
            "seqlens": found.seqlens.tolist(),
            "starts": None if found.starts is None else found.starts.tolist(),
            "num_tokens": found.num_tokens,
            "padded_seqlen": found.padded_seqlen,
            "padded_tokens": found.padded_seqlen * (found.num_samples if plan.layout == "padded" else 1),
            "cost": found.cost,
            "is_filler": found.is_filler,
            "is_repeat": found.is_repeat,
        } | (of_sources if len(plan.sources) > 1 else {})
