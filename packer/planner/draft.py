"""One epoch laid out in rows: all but what depends on the other epochs (learning-rate base, shapes)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.kernels import balance as balance_kernels
from packer.kernels import counting
from packer.plan.epoch import DroppedSamples
from packer.planner.config import PlanConfig
from packer.planner.microbatches import IntArray, MicroBatches
from packer.planner.pieces import Pieces, reason
from packer.planner.steps import Rows, arrange
from packer.planner.threads import chunk_edges, run_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """What M micro-batches hold."""

    tokens: NDArray[np.int64]
    """(M,) Σ len."""
    longest: NDArray[np.int64]
    """(M,) max len."""
    rooms: NDArray[np.int64]
    """(M,) Σ len, every sample padded on its own."""
    squares: NDArray[np.int64]
    """(M,) Σ len²."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """One epoch's rows. R rows, P pieces, T steps."""

    pieces: IntArray
    """(P,) in the order of their rows."""
    seqlens: NDArray[np.int32]
    """(P,)"""
    offsets: NDArray[np.int64]
    """(R + 1,) row r holds pieces offsets[r]:offsets[r + 1]."""
    rows: Rows
    sums: Sums
    """Per row."""
    longest_by_metric: dict[str, NDArray[np.int64]]
    """(R,) per metric, where there are several budgets."""
    costs: NDArray[np.int64]
    """(R,)"""
    num_samples: NDArray[np.int64]
    """(T,) fillers left out, as in all sums over a step."""
    num_tokens: NDArray[np.int64]
    """(T,)"""
    num_loss_tokens: NDArray[np.int64] | None
    """(T,)"""
    max_seqlen: NDArray[np.int64]
    """(T,)"""
    is_full: NDArray[np.bool_]
    """(T,) neither filler nor repeat."""
    dropped: DroppedSamples
    figures: dict[str, int | float]

    def sizes(self, lr_by: str) -> NDArray[np.int64]:
        """Return the (T,) sizes of the steps in the unit ``lr_by``; loss tokens must be known."""
        if lr_by == "samples":
            return self.num_samples
        if lr_by == "tokens":
            return self.num_tokens
        assert self.num_loss_tokens is not None
        return self.num_loss_tokens


def lay_out(
    microbatches: MicroBatches,
    pieces: Pieces,
    config: PlanConfig,
    epoch: int,
    loss_tokens: IntArray | None,
    figures: dict[str, int | float],
) -> Draft:
    """Put packed micro-batches into rows, and sum up what they hold.

    Args:
        microbatches: in the order in which they are to run.
        pieces: what they are made of.
        config: the options.
        epoch: whose random choices are meant.
        loss_tokens: (N,) loss tokens of every sample of the source; None for all tokens but the first.
        figures: what is known of the epoch so far; balancing adds to it.

    Raises:
        EmptyPlanError: no step would be left.
    """
    seqlens = microbatches.seqlens
    if len(config.budgets) > 1 or "seqlen" not in config.budgets:
        seqlens = pieces.seqlens[microbatches.pieces]
    sums = sum_up(seqlens, microbatches.starts, microbatches.sizes, config.pad_segments_to)
    costs = sums.tokens
    if config.balance == "flops":
        costs = 12 * config.hidden_size * sums.tokens + sums.squares
    rows, imbalance = arrange(microbatches, costs, config, epoch)
    chosen = rows.microbatches
    sizes = microbatches.sizes[chosen]
    starts = microbatches.starts[chosen]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    ordered = _gather(microbatches.pieces, starts, offsets)
    ordered_seqlens = _gather(seqlens, starts, offsets)
    by_metric = {}
    if isinstance(config.max_tokens, dict):
        for metric, lengths in zip(config.budgets, pieces.lengths, strict=True):
            by_metric[metric] = sum_up(lengths[ordered], offsets[:-1], sizes, 1).longest
    # (R,) -> (T, E)
    counted = (~rows.is_filler).reshape(-1, config.microbatches_per_step)
    row_sums = Sums(
        tokens=sums.tokens[chosen],
        longest=sums.longest[chosen],
        rooms=sums.rooms[chosen],
        squares=sums.squares[chosen],
    )
    num_samples = (sizes.reshape(counted.shape) * counted).sum(axis=1)
    num_tokens = (row_sums.tokens.reshape(counted.shape) * counted).sum(axis=1)
    num_loss_tokens: NDArray[np.int64] | None = num_tokens - num_samples
    if loss_tokens is not None:
        num_loss_tokens = None
        if pieces.starts is None:
            known = loss_tokens[pieces.sample_ids(ordered)]
            per_row = np.add.reduceat(known, offsets[:-1], dtype=np.int64)
            num_loss_tokens = (per_row.reshape(counted.shape) * counted).sum(axis=1)
    if imbalance is not None:
        figures = figures | {"rank_imbalance_before": imbalance}
    return Draft(
        pieces=ordered,
        seqlens=ordered_seqlens,
        offsets=offsets,
        rows=rows,
        sums=row_sums,
        longest_by_metric=by_metric,
        costs=costs[chosen],
        num_samples=num_samples,
        num_tokens=num_tokens,
        num_loss_tokens=num_loss_tokens,
        max_seqlen=row_sums.longest.reshape(counted.shape).max(axis=1),
        is_full=np.logical_not((rows.is_filler | rows.is_repeat).reshape(counted.shape).any(axis=1)),
        dropped=_dropped(microbatches, rows, pieces),
        figures=figures,
    )


def sum_up(
    seqlens: IntArray, starts: NDArray[np.int64], sizes: NDArray[np.int64], segment_multiple: int
) -> Sums:
    """Sum up micro-batches that begin at ``starts`` in ``seqlens``."""
    tokens, longest, rooms, squares = np.empty((4, len(starts)), np.int64)
    run_chunks(
        lambda _, first, last: balance_kernels.measure(
            seqlens, starts, sizes, first, last, segment_multiple, tokens, longest, rooms, squares
        ),
        chunk_edges(len(starts), min_chunk=1 << 14),
    )
    return Sums(tokens=tokens, longest=longest, rooms=rooms, squares=squares)


def _gather(values: IntArray, starts: NDArray[np.int64], offsets: NDArray[np.int64]) -> Any:
    """Return stretches of ``values`` end to end; a view where they are so already."""
    if np.array_equal(starts, offsets[:-1]):
        return values[: offsets[-1]]
    out = np.empty(int(offsets[-1]), values.dtype)
    run_chunks(
        lambda _, first, last: counting.gather_segments(values, starts, offsets, first, last, out),
        chunk_edges(len(starts), min_chunk=1 << 14),
    )
    return out


def _dropped(microbatches: MicroBatches, rows: Rows, pieces: Pieces) -> DroppedSamples:
    """Report what found no company, and what filled no step."""
    left = rows.left_out
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(microbatches.sizes[left])])
    remainder = _gather(microbatches.pieces, microbatches.starts[left], offsets)
    reasons = np.full(len(remainder) + len(microbatches.leftover), reason("remainder"), np.uint8)
    reasons[len(remainder) :] = reason("min_samples")
    return pieces.drop(np.concatenate([remainder, microbatches.leftover]), reasons)
