"""One epoch composed of steps: all but what depends on the other epochs (learning-rate base, shapes)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.kernels import balance as balance_kernels
from packer.kernels import counting
from packer.options.config import PlanConfig
from packer.plan.epoch import DroppedSamples
from packer.planner.choose.pieces import Pieces, join_drops
from packer.planner.choose.selection import reason
from packer.planner.compose.balance import balance
from packer.planner.compose.deal import deal
from packer.planner.compose.mix import design_effect
from packer.planner.compose.mixture import Mixture, blocks_of, phases_of
from packer.planner.compose.repeats import part_repeats
from packer.planner.compose.sequence import put_in_sequence
from packer.planner.compose.steps import MicroBatchSums, Rows, fill_steps
from packer.planner.order.orders import Purpose, key_for, subkey, take
from packer.planner.order.stream import CutFrom, Draw
from packer.planner.order.threads import chunk_edges, run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """One epoch's rows. R rows, P pieces, T steps."""

    drawn: Draw
    """What the epoch was packed from."""
    pieces: IntArray
    """(P,) in the order of their rows, by their positions in ``drawn``."""
    sample_ids: IntArray
    """(P,)"""
    seqlens: NDArray[np.int32]
    """(P,)"""
    starts: NDArray[np.int32] | None
    """(P,) where each piece begins in its sample; None where no sample is cut."""
    offsets: NDArray[np.int64]
    """(R + 1,) row r holds pieces offsets[r]:offsets[r + 1]."""
    rows: Rows
    unpadded: NDArray[np.int64]
    """(R,) what S or T is rounded up from: the longest sample, or the room of all in a row."""
    unpadded_by_metric: dict[str, NDArray[np.int64]]
    """(R,) per metric, where there are several budgets."""
    costs: NDArray[np.int64]
    """(R,)"""
    num_samples: NDArray[np.int64]
    """(T,) fillers left out, as in all sums over a step."""
    num_tokens: NDArray[np.int64]
    """(T,)"""
    num_loss_tokens: NDArray[np.int64] | None
    """(T,)"""
    loss_tokens_of_rows: NDArray[np.int64] | None
    """(R,) where labels were counted; 0 for fillers."""
    max_seqlen: NDArray[np.int64]
    """(T,)"""
    is_ended: bool
    """A total ends the epoch."""
    num_met: int
    """Rows that hold a sample that is in their step once more, which its source is large enough to avoid."""
    is_full: NDArray[np.bool_]
    """(T,) neither filler nor repeat."""
    phases: NDArray[np.int64]
    """(H,) the first step of every phase; 0 first."""
    design_effect: dict[str, float | None]
    """How much more the steps differ in their mix than random ones, by ``seqlen`` and by ``source``."""
    dropped: DroppedSamples
    figures: dict[str, Any]

    @property
    def reached(self) -> tuple[Draw, int]:
        """The stream before anything was cut, and how many of its pieces the epoch takes at least a part of.

        These are all up to the last one; where no total ends the epoch, all.
        """
        stream = self.drawn if self.drawn.cut_from is None else self.drawn.cut_from.stream
        if not self.is_ended:
            return stream, len(stream.pieces)
        last = self.pieces if self.drawn.cut_from is None else self.drawn.cut_from.documents[self.pieces]
        return stream, int(last.max()) + 1

    def sizes(self, lr_by: str) -> NDArray[np.int64]:
        """Return the (T,) sizes of the steps in the unit ``lr_by``; loss tokens must be known."""
        if lr_by == "samples":
            return self.num_samples
        if lr_by == "tokens":
            return self.num_tokens
        assert self.num_loss_tokens is not None
        return self.num_loss_tokens


def compose(
    microbatches: MicroBatches,
    drawn: Draw,
    mixture: Mixture,
    config: PlanConfig,
    epoch: int,
    loss_tokens: IntArray | None,
) -> Composition:
    """Make steps of packed micro-batches, and sum up what they hold.

    Args:
        microbatches: in the order in which they were packed.
        drawn: what they are made of.
        mixture: the mixes that the steps are to have.
        config: the options.
        epoch: whose random choices are meant.
        loss_tokens: (N,) loss tokens of every sample of the source; None for all tokens but the first.

    Raises:
        EmptyPlanError: no step would be left.
    """
    pieces = drawn.pieces
    if len(config.budgets) > 1 or "seqlen" not in config.budgets:
        microbatches = replace(microbatches, seqlens=pieces.seqlens[microbatches.pieces])
    sums = _sum_up(microbatches, config)
    sources = None if drawn.sources is None else take(drawn.sources, microbatches.pieces)
    phases = phases_of(microbatches, drawn, config)
    blocks = blocks_of(microbatches, phases, mixture, config)
    order = deal(microbatches, sources, sums.costs, blocks, config, epoch)
    parting = key_for(config.seed, epoch, Purpose.REPEATS)
    if drawn.is_stream and sources is not None:
        whole = blocks[-1].stop // config.microbatches_per_step * config.microbatches_per_step
        order[:whole], _ = part_repeats(
            order[:whole], None, microbatches, drawn, phases, config, subkey(parting, 0)
        )
        order = put_in_sequence(order, microbatches, sources, blocks, mixture.fractions, config)
    rows = fill_steps(order, microbatches, sums, config, epoch)
    # what filled the last step may meet its like there
    parted, num_met = part_repeats(
        rows.microbatches,
        rows.is_filler | rows.is_repeat,
        microbatches,
        drawn,
        phases,
        config,
        subkey(parting, 1),
    )
    rows = replace(rows, microbatches=parted)
    rows, imbalance = balance(rows, sums.costs, config, epoch)
    figures = microbatches.figures
    if imbalance is not None:
        figures = figures | {"rank_imbalance_before": imbalance}
    dropped = None if config.has_total else _dropped(microbatches, rows, pieces)
    leftover = microbatches.leftover
    starts, sizes = take(microbatches.starts, rows.microbatches), take(microbatches.sizes, rows.microbatches)
    offsets = _offsets(sizes)
    # at a billion samples every copy counts: each array is gathered and let go before the next
    parts, seqlens = microbatches.pieces, microbatches.seqlens
    del microbatches
    ordered = _gather(parts, starts, offsets)
    del parts
    ordered_seqlens = _gather(seqlens, starts, offsets)
    del seqlens, starts
    samples = pieces.sample_ids(ordered)
    has_filler = bool(rows.is_filler.any())
    step_size = config.microbatches_per_step

    def per_step(values: IntArray) -> IntArray:
        return _by_step(np.sum, values * ~rows.is_filler if has_filler else values, step_size)

    num_samples, num_tokens = per_step(sizes), per_step(take(sums.tokens, rows.microbatches))
    num_loss_tokens: NDArray[np.int64] | None = num_tokens - num_samples
    loss_tokens_of_rows = None
    if loss_tokens is not None:
        num_loss_tokens = None
        if pieces.starts is None:
            known = loss_tokens[samples]
            loss_tokens_of_rows = np.add.reduceat(known, offsets[:-1], dtype=np.int64) * ~rows.is_filler
            num_loss_tokens = _by_step(np.sum, loss_tokens_of_rows, step_size)
    longest = take(sums.longest, rows.microbatches)
    if dropped is None:
        # what a total does not reach is dropped by pass, not here
        lost = leftover[leftover <= int(ordered.max())]
        dropped = pieces.drop(lost, np.full(len(lost), reason("min_samples"), np.uint8))
        if drawn.cut_from is not None:
            dropped = join_drops(dropped, _cut_off(ordered, drawn, drawn.cut_from))
    num_steps = len(rows.microbatches) // step_size
    phases = np.minimum(phases, num_steps)
    effect = design_effect(
        ordered_seqlens,
        None if drawn.sources is None else take(drawn.sources, ordered),
        mixture.num_sources,
        offsets,
        rows.is_filler,
        step_size,
        phases,
    )
    return Composition(
        drawn=drawn,
        pieces=ordered,
        sample_ids=samples,
        seqlens=ordered_seqlens,
        starts=None if pieces.starts is None else pieces.starts[ordered],
        offsets=offsets,
        rows=rows,
        unpadded=take(sums.rooms, rows.microbatches) if config.layout == "packed" else longest,
        unpadded_by_metric=_longest_by_metric(ordered, offsets, pieces, config),
        costs=take(sums.costs, rows.microbatches),
        num_samples=num_samples,
        num_tokens=num_tokens,
        num_loss_tokens=num_loss_tokens,
        loss_tokens_of_rows=loss_tokens_of_rows,
        is_ended=config.has_total,
        num_met=num_met,
        max_seqlen=_by_step(np.max, longest, step_size),
        is_full=~_by_step(np.any, rows.is_filler | rows.is_repeat, step_size),
        phases=phases,
        design_effect=effect,
        dropped=dropped,
        figures=figures,
    )


def _sum_up(microbatches: MicroBatches, config: PlanConfig) -> MicroBatchSums:
    num_microbatches = len(microbatches)
    tokens, longest = np.empty((2, num_microbatches), np.int64)
    rooms = np.empty(num_microbatches, np.int64) if config.pad_segments_to > 1 else tokens
    costs = np.empty(num_microbatches, np.int64) if config.balance == "flops" else tokens
    run_chunks(
        lambda _, first, last: balance_kernels.measure(
            microbatches.seqlens,
            microbatches.starts,
            microbatches.sizes,
            first,
            last,
            config.pad_segments_to,
            12 * config.hidden_size,
            tokens,
            longest,
            rooms,
            costs,
        ),
        chunk_edges(num_microbatches, min_chunk=1 << 14),
    )
    return MicroBatchSums(tokens=tokens, longest=longest, rooms=rooms, costs=costs)


def _longest_by_metric(
    ordered: IntArray, offsets: NDArray[np.int64], pieces: Pieces, config: PlanConfig
) -> dict[str, NDArray[np.int64]]:
    """Return (R,) per metric: the longest of each row, where there are several budgets."""
    if not isinstance(config.max_tokens, dict):
        return {}
    return {
        metric: np.maximum.reduceat(lengths[ordered], offsets[:-1]).astype(np.int64)
        for metric, lengths in zip(config.budgets, pieces.lengths, strict=True)
    }


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _by_step(reduce: Callable[..., IntArray], values: IntArray, num_rows: int) -> IntArray:
    """Reduce the ``num_rows`` rows of each step to one value; as they are, where a step has one row."""
    # (R,) -> (T, E) -> (T,)
    return reduce(values.reshape(-1, num_rows), axis=1) if num_rows > 1 else values


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


def _cut_off(planned: IntArray, drawn: Draw, cut_from: CutFrom) -> DroppedSamples:
    """Report what a total leaves of documents whose like in the stream are reached."""
    is_lost = np.ones(len(drawn.pieces), np.bool_)
    is_lost[planned] = False
    is_lost &= cut_from.documents <= int(cut_from.documents[planned].max())
    lost: IntArray = np.flatnonzero(is_lost)
    return drawn.pieces.drop(lost, np.full(len(lost), reason("unreached"), np.uint8))


def _dropped(microbatches: MicroBatches, rows: Rows, pieces: Pieces) -> DroppedSamples:
    """Report what found no company, and what filled no step."""
    left = rows.left_out
    remainder = _gather(microbatches.pieces, microbatches.starts[left], _offsets(microbatches.sizes[left]))
    reasons = np.full(len(remainder) + len(microbatches.leftover), reason("remainder"), np.uint8)
    reasons[len(remainder) :] = reason("min_samples")
    return pieces.drop(np.concatenate([remainder, microbatches.leftover]), reasons)
