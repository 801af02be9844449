"""What earlier plans trained, taken out of what is to be planned.

A sample may have been trained in part: it was cut where a row ended, split or truncated, and the run stopped
between its pieces. So stretches of tokens are taken out, and what is left of a sample is planned as pieces.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, EmptyPlanError, SourceChangedError
from packer.options.config import PlanConfig
from packer.plan.epoch import DROP_REASONS, DroppedSamples
from packer.plan.sources import PlanSource
from packer.plan.trained import Trained
from packer.planner.choose.pieces import Pieces
from packer.planner.choose.selection import reason
from packer.planner.order.orders import id_dtype
from packer.planner.packing.microbatches import IntArray

_TRAINED = DROP_REASONS.index("trained")


class Stretches(NamedTuple):
    """Stretches of tokens, disjoint, in the order of their samples and starts; none touches the next one."""

    sample_ids: NDArray[np.int64]
    """(n,)"""
    starts: NDArray[np.int64]
    """(n,)"""
    stops: NDArray[np.int64]
    """(n,) the token behind the last one."""


def leave_out(
    pieces: Pieces, trained: Sequence[Trained], sources: Sequence[PlanSource], config: PlanConfig
) -> "LeftOver":
    """Take what plans trained out of what is to be planned.

    Raises:
        ConfigError: a curriculum, whose steps would begin anew.
        SourceChangedError: a plan has no source in common with ``sources``.
        EmptyPlanError: nothing is left.
    """
    if config.curriculum is not None:
        raise ConfigError(
            "--curriculum counts steps from the beginning of a plan, and with --except the run began before; "
            "leave --curriculum out"
        )
    return without_trained(pieces, trained_stretches(trained, sources))


def trained_stretches(trained: Sequence[Trained], sources: Sequence[PlanSource]) -> Stretches:
    """Return what plans trained of the samples of ``sources``, and what they left out as trained before.

    Args:
        trained: the plans, each up to a place.
        sources: those that are to be planned; a plan's own are found among them by their fingerprints.

    Raises:
        SourceChangedError: a plan has no source in common with them.
    """
    parts = [np.empty((3, 0), np.int64)]
    for one in trained:
        shifts = _shifts(one, sources)
        for pieces in one.pieces():
            parts.append(_named_anew(pieces.sample_ids, pieces.starts, pieces.seqlens, one, shifts))
        if one.epoch in (None, 0):  # the plan's first epoch left out what was trained before
            for part in one.plan.dropped():
                mine = part.reason == _TRAINED
                starts = np.zeros_like(part.num_tokens) if part.start is None else part.start
                columns = (part.sample_id[mine], starts[mine], part.num_tokens[mine])
                parts.append(_named_anew(*columns, one, shifts))
    return _joined(np.concatenate(parts, axis=1))


class LeftOver(NamedTuple):
    """What a plan's first epoch has besides what was trained before."""

    pieces: Pieces
    dropped: DroppedSamples
    """What was trained, in the order of the samples."""


def without_trained(pieces: Pieces, trained: Stretches) -> LeftOver:
    """Take stretches out of pieces.

    A single token that is left of a piece would train nothing, since nothing predicts it: it is left out with
    the stretch before it. Where samples have several lengths, one that was trained in part is left out whole.

    Raises:
        EmptyPlanError: nothing is left.
    """
    ids = pieces.sample_ids(np.arange(len(pieces), dtype=id_dtype(len(pieces))))
    is_touched = np.zeros(len(pieces.source), np.bool_)
    is_touched[trained.sample_ids] = True
    touched = np.flatnonzero(is_touched[ids])
    begins = (
        np.zeros(len(touched), np.int64) if pieces.starts is None else pieces.starts[touched].astype(np.int64)
    )
    ends = begins + pieces.seqlens[touched]
    if len(pieces.lengths) > 1:
        trained = _whole(trained, pieces)
    rests, lost = _cut_out(ids[touched].astype(np.int64), begins, ends, trained, pieces)
    is_kept = np.ones(len(pieces), np.bool_)
    is_kept[touched] = False
    # (R,) the piece that each rest is of; those that were not touched are rests of themselves
    of_piece = np.concatenate([np.flatnonzero(is_kept), touched[rests[0]]])
    if not len(of_piece):
        raise EmptyPlanError(
            "no sample is left: --except leaves out all that the options choose; give it an earlier step, or "
            "leave it out to pass through the data again"
        )
    order = np.argsort(of_piece, kind="stable")
    of_piece = of_piece[order]
    starts = None if pieces.starts is None else pieces.starts[of_piece]
    lengths, seqlens = pieces.lengths[:, of_piece], pieces.seqlens[of_piece]
    is_cut = bool((rests[2] - rests[1] != ends[rests[0]] - begins[rests[0]]).any())
    if pieces.starts is not None or is_cut:
        num_whole = int(np.count_nonzero(is_kept))
        whole = np.zeros(num_whole, np.int32) if pieces.starts is None else pieces.starts[is_kept]
        starts = np.concatenate([whole, rests[1].astype(np.int32)])[order]
        kept = pieces.seqlens[is_kept]
        seqlens = np.concatenate([kept, (rests[2] - rests[1]).astype(np.int32)])[order]
        if len(pieces.lengths) == 1:
            lengths = seqlens[np.newaxis]
    left = replace(
        pieces, lengths=np.ascontiguousarray(lengths), seqlens=seqlens, ids=ids[of_piece], starts=starts
    )
    return LeftOver(left, _dropped(lost, pieces, has_starts=starts is not None))


def _shifts(one: Trained, sources: Sequence[PlanSource]) -> NDArray[np.int64]:
    """Return (S,) by how much the ids of each source of a plan differ here; below −N where it is not."""
    shifts = np.full(len(one.plan.sources), np.iinfo(np.int64).min, np.int64)
    for number, old in enumerate(one.plan.sources):
        for new in sources:
            if _are_same(old, new):
                shifts[number] = new.first_id - old.first_id
    if (shifts == np.iinfo(np.int64).min).all():
        raise SourceChangedError(
            f"--except {one.plan}: it was made from {_named(one.plan.sources)}, and this one is made from "
            f"{_named(sources)}; give the metrics that it was made from among the sources"
        )
    return shifts


def _are_same(old: PlanSource, new: PlanSource) -> bool:
    """Say whether two sources are one data set; lengths that came as arrays are told by their sums."""
    if old.fingerprint is not None or new.fingerprint is not None:
        return old.fingerprint == new.fingerprint
    return (old.num_samples, old.num_tokens) == (new.num_samples, new.num_tokens)


def _named(sources: Sequence[PlanSource]) -> str:
    """Name sources with what tells them apart."""
    marks = [source.fingerprint or "of lengths in memory" for source in sources]
    return ", ".join(
        f"{source.label} ({mark if len(mark) < 64 else f'{mark[:12]}…'})"
        for source, mark in zip(sources, marks, strict=True)
    )


def _named_anew(
    sample_ids: IntArray, starts: IntArray, seqlens: IntArray, one: Trained, shifts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return (3, n) stretches with the ids that their samples have here; without those that are not here."""
    stops = np.array([source.stop_id for source in one.plan.sources], np.int64)
    shift = shifts[np.searchsorted(stops, sample_ids, side="right")]
    is_here = shift != np.iinfo(np.int64).min
    begins = starts[is_here].astype(np.int64)
    return np.stack([sample_ids[is_here] + shift[is_here], begins, begins + seqlens[is_here]])


def _joined(found: NDArray[np.int64]) -> Stretches:
    """Sort stretches and join those that overlap or touch."""
    ids, starts, stops = found[:, np.lexsort((found[1], found[0]))]
    if not len(ids):
        return Stretches(ids, starts, stops)
    # the furthest stop so far, sample by sample: ranks of samples make it one running maximum
    sample = np.cumsum(np.append(0, ids[1:] != ids[:-1]))
    width = int(stops.max()) + 1
    reached = np.maximum.accumulate(sample * width + stops) - sample * width
    opens = np.append(True, (ids[1:] != ids[:-1]) | (starts[1:] > reached[:-1]))
    last = np.append(np.flatnonzero(opens)[1:] - 1, len(ids) - 1)
    return Stretches(ids[opens], starts[opens], reached[last])


def _whole(trained: Stretches, pieces: Pieces) -> Stretches:
    ids = np.unique(trained.sample_ids)
    return Stretches(ids, np.zeros_like(ids), pieces.source[ids].astype(np.int64))


def _cut_out(
    ids: NDArray[np.int64],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    trained: Stretches,
    pieces: Pieces,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut stretches out of pieces of their samples.

    Returns:
        (3, R) rests: which of the pieces, start, stop. (3, L) what is left out: sample, start, stop.
    """
    samples, of_stretch = np.unique(trained.sample_ids, return_inverse=True)
    # one line of tokens, sample after sample, each with a token between it and the next
    offsets = np.concatenate([[0], np.cumsum(pieces.source[samples].astype(np.int64) + 1)])[:-1]
    opens, closes = offsets[of_stretch] + trained.starts, offsets[of_stretch] + trained.stops
    shift = offsets[np.searchsorted(samples, ids)]
    first, stop = begins + shift, ends + shift
    low = np.searchsorted(closes, first, side="right")
    num_met = np.maximum(np.searchsorted(opens, stop, side="left") - low, 0)
    # n stretches leave up to n + 1 rests of a piece: before each of them, and behind the last
    piece = np.repeat(np.arange(len(ids)), num_met + 1)
    place = np.arange(len(piece)) - np.repeat(np.cumsum(num_met + 1) - (num_met + 1), num_met + 1)
    before, behind = low[piece] + place - 1, low[piece] + place
    closed = np.append(closes, 0)
    rest_first = np.where(place > 0, closed[before], first[piece])
    rest_stop = np.where(
        place < num_met[piece], np.append(opens, 0)[np.minimum(behind, len(opens))], stop[piece]
    )
    rest_first, rest_stop = np.maximum(rest_first, first[piece]), np.minimum(rest_stop, stop[piece])
    size = rest_stop - rest_first
    is_kept = (size > 1) | ((size == 1) & (num_met[piece] == 0))
    rests = np.stack([piece, rest_first - shift[piece], rest_stop - shift[piece]])[:, is_kept]
    return rests, _complement(ids, begins, ends, rests)


def _complement(
    ids: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], rests: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return (3, L) what rests leave of the pieces that they are of: sample, start, stop; joined."""
    num_rests = np.bincount(rests[0], minlength=len(ids))
    # the gap before each rest, and the one behind the last of a piece
    before = np.concatenate([rests[0], np.arange(len(ids))])
    order = np.argsort(before, kind="stable")
    piece = before[order]
    is_behind = order >= rests.shape[1]
    starts_of, stops_of = np.append(rests[1], ends)[order], np.append(rests[2], ends)[order]
    is_first = np.append(True, piece[1:] != piece[:-1])
    gap_start = np.where(is_first, begins[piece], np.append(0, stops_of[:-1]))
    gap_stop = np.where(is_behind, ends[piece], starts_of)
    assert len(piece) == int(num_rests.sum()) + len(ids)
    is_gap = gap_stop > gap_start
    found = _joined(np.stack([ids[piece], gap_start, gap_stop])[:, is_gap])
    return np.stack(found)


def _dropped(lost: NDArray[np.int64], pieces: Pieces, *, has_starts: bool) -> DroppedSamples:
    samples = lost[0].astype(np.int64 if len(pieces.source) > 2**31 else np.int32)
    return DroppedSamples(
        sample_ids=samples,
        seqlens=pieces.source[samples].astype(np.int64),
        num_tokens=lost[2] - lost[1],
        reasons=np.full(len(samples), reason("trained"), np.uint8),
        starts=lost[1] if has_starts else None,
    )
