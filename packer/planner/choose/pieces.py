"""Pieces: what is planned of the samples that were selected, those that are too long cut."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, EmptyPlanError, MetricsError, PlanError
from packer.options.config import MAX_SEQLEN, PlanConfig
from packer.plan.epoch import DroppedSamples
from packer.planner.choose.selection import KEPT, reason, select
from packer.planner.order.orders import id_dtype
from packer.planner.packing.microbatches import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """P samples, or pieces of samples, that are to be planned.

    Those of one sample are neighbours, but for what ``wrapped`` makes of them.
    """

    lengths: IntArray
    """(K, P) int32, one row a budget; the first is seqlen, unless budgets are on other metrics."""
    seqlens: NDArray[np.int32]
    """(P,) tokens."""
    ids: IntArray | None
    """(P,) the sample of each piece, rising unless the user gave an order; None where piece p is sample p."""
    starts: NDArray[np.int32] | None
    """(P,) where each piece begins in its sample; None where no sample is, or will be, cut."""
    source: IntArray
    """(N,) lengths of all samples of the source."""
    keys: IntArray | None = None
    """(N,) key of every sample of the source, below 0 where it has none: no two of one key may meet."""
    kept_apart: IntArray | None = None
    """(P,) pieces of one number must not meet in a micro-batch; below 0: may meet any. None: those of one
    sample must not. Keys say more, and go before it."""

    def __len__(self) -> int:
        """Return P."""
        return len(self.seqlens)

    @property
    def owners(self) -> IntArray | None:
        """What must not meet: by piece its key, or its sample where that may have several; None: all may."""
        if self.keys is not None:
            samples = np.arange(len(self)) if self.ids is None else self.ids
            keys = self.keys[samples].astype(np.int64)
            is_free = keys < 0
            keys[is_free] = int(keys.max(initial=0)) + 1 + samples[is_free]
            return keys
        if self.kept_apart is not None:
            return self.kept_apart
        return self.ids if self.starts is not None and (self.starts > 0).any() else None

    def sample_ids(self, pieces: IntArray) -> IntArray:
        """Return the samples of ``pieces``, int32 while every id of the source fits."""
        wide = len(self.source) > 2**31
        samples = pieces if self.ids is None else self.ids[pieces]
        return samples.astype(np.int64 if wide else np.int32, copy=False)

    def drop(self, pieces: IntArray, reasons: NDArray[np.uint8]) -> DroppedSamples:
        """Report ``pieces`` as dropped, in the order of their samples."""
        samples = self.sample_ids(pieces)
        if not (samples[1:] > samples[:-1]).all():
            order = np.lexsort((pieces if self.starts is None else self.starts[pieces], samples))
            pieces, samples, reasons = pieces[order], samples[order], reasons[order]
        return DroppedSamples(
            sample_ids=samples,
            seqlens=self.source[samples].astype(np.int64),
            num_tokens=self.seqlens[pieces].astype(np.int64),
            reasons=reasons,
            starts=None if self.starts is None else self.starts[pieces].astype(np.int64),
        )


_LEAST_CUT = 3
"""Tokens of a piece that can give one to a last one of a single token."""


class Chosen(NamedTuple):
    """What is planned of a data set."""

    pieces: Pieces
    dropped: DroppedSamples
    """What every epoch leaves out: samples filtered out, empty, or too long, and truncated ends."""
    max_seqlen: int
    """A longer sample is too long."""


def choose_pieces(
    seqlens: IntArray, config: PlanConfig, metrics: Mapping[str, IntArray], loss_tokens: IntArray | None
) -> Chosen:
    """Choose and cut the samples to plan.

    Args:
        seqlens: (N,) lengths of all samples.
        config: the options.
        metrics: further lengths of the samples, for budgets on them.
        loss_tokens: (N,) tokens of each that the loss counts; None for all but the first.

    Raises:
        SampleTooLongError: a sample does not fit, and ``too_long`` is ``error``.
        EmptyPlanError: nothing is left.
        MetricsError: a length below zero.
        PlanError: more pieces than a plan can count.
    """
    if not len(seqlens):
        raise EmptyPlanError("the data set holds no sample; analyze one that does")
    lengths = {"seqlen": seqlens, **metrics}
    for metric in dict.fromkeys(["seqlen", *config.budgets]):
        least = int(lengths[metric].min())
        if least < 0:
            raise MetricsError(
                f"sample {int(np.argmin(lengths[metric]))} has {metric} {least}, below 0; analyze the data "
                "again"
            )
    selection = select(lengths, config, loss_tokens)
    fates, limit = selection.fates, selection.limit
    if fates is None:
        kept = _narrow(np.arange(len(seqlens)), seqlens) if _is_reordered(config) else None
    else:
        kept = _narrow(np.flatnonzero(fates == KEPT), seqlens)
    if kept is None:
        pieces, lost = _all_samples(seqlens, lengths, config), _lost(seqlens, np.empty(0, np.int64), None)
        return Chosen(pieces, _placed(lost, pieces, limit), limit)
    if _is_reordered(config):
        ids = np.asarray(config.sample_ids)
        kept = _narrow(ids if fates is None else ids[fates[ids] == KEPT], seqlens)
    lost = _lost(seqlens, np.empty(0, np.int64) if fates is None else np.flatnonzero(fates < KEPT), fates)
    if config.too_long == "split" and int(seqlens[kept].max()) > limit:
        pieces = _split(seqlens, kept, limit, config)
    else:
        pieces, lost = _whole_or_truncated(seqlens, lengths, kept, limit, lost, config)
    return Chosen(pieces, _placed(lost, pieces, limit), limit)


def _is_reordered(config: PlanConfig) -> bool:
    """Say whether the samples come in an order of the user's own."""
    return config.sample_ids is not None and config.order == "sequential"


def _all_samples(seqlens: IntArray, lengths: Mapping[str, IntArray], config: PlanConfig) -> Pieces:
    """Take every sample as it is; lengths of 32 bits are not copied."""
    tokens = np.asarray(seqlens, np.int32)
    budgets = tokens[np.newaxis]
    if isinstance(config.max_tokens, Mapping):
        budgets = np.stack([np.asarray(lengths[metric], np.int32) for metric in config.budgets])
    starts = np.broadcast_to(np.int32(0), tokens.shape) if config.packing == "wrapped" else None
    return Pieces(lengths=budgets, seqlens=tokens, ids=None, starts=starts, source=seqlens)


def _split(seqlens: IntArray, kept: IntArray, limit: int, config: PlanConfig) -> Pieces:
    """Cut samples into pieces of ``limit`` tokens, the last one of what is left.

    A single token that is left would train nothing, since it is not predicted: it takes one from the piece
    before.
    """
    if limit < _LEAST_CUT:
        raise ConfigError(
            f"--too-long split would make pieces of {limit} tokens, and the first token of a piece is not "
            f"predicted: some would train nothing; raise the limit to {_LEAST_CUT} at least, or choose "
            "--too-long truncate or drop"
        )
    whole = seqlens[kept].astype(np.int64)
    pieces = -(-whole // limit)
    most = int(np.argmax(whole))
    # told from the lengths, before anything of their size is made
    last = int(whole[most]) - 1 if config.packing == "wrapped" else (int(pieces[most]) - 1) * limit
    if last > MAX_SEQLEN:
        raise PlanError(
            f"sample {int(kept[most])} has {int(whole[most])} tokens, and its pieces would start after token "
            f"{MAX_SEQLEN}; choose --too-long truncate or drop"
        )
    id_dtype(int(pieces.sum()))
    ids = np.repeat(kept, pieces)  # in 32 bits while every id of the source fits
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = (np.arange(len(ids)) - first) * limit
    starts -= (starts > 0) & (np.repeat(whole, pieces) - starts == 1)
    ends = np.append(starts[1:], 0)
    ends[np.cumsum(pieces) - 1] = whole
    cut = (ends - starts).astype(np.int32)
    return Pieces(
        lengths=cut[np.newaxis],
        seqlens=cut,
        ids=ids,
        starts=starts.astype(np.int32),
        source=seqlens,
    )


def _whole_or_truncated(
    seqlens: IntArray,
    lengths: Mapping[str, IntArray],
    kept: IntArray,
    limit: int,
    lost: DroppedSamples,
    config: PlanConfig,
) -> tuple[Pieces, DroppedSamples]:
    """Take the first ``limit`` tokens of each sample; what is behind them joins what is lost."""
    is_all = len(kept) == len(seqlens) and not _is_reordered(config)
    whole = seqlens if is_all else seqlens[kept]
    cut = np.minimum(whole, limit).astype(np.int32)
    is_truncated = whole > limit
    if is_truncated.any():
        lost = _join(lost, kept[is_truncated], whole[is_truncated].astype(np.int64), limit)
    budgets = cut[np.newaxis]
    if isinstance(config.max_tokens, Mapping):
        budgets = np.stack([np.asarray(lengths[metric][kept], np.int32) for metric in config.budgets])
    pieces = Pieces(
        lengths=budgets,
        seqlens=cut,
        ids=None if is_all else kept,
        starts=np.zeros(len(cut), np.int32) if is_truncated.any() or config.packing == "wrapped" else None,
        source=seqlens,
    )
    return pieces, lost


def _narrow(ids: IntArray, seqlens: IntArray) -> IntArray:
    """Return ids in 32 bits while every id of the source fits."""
    return ids.astype(np.int64 if len(seqlens) > 2**31 else np.int32)


def _lost(seqlens: IntArray, samples: IntArray, fate: NDArray[np.uint8] | None) -> DroppedSamples:
    """Report whole samples as dropped."""
    tokens = seqlens[samples].astype(np.int64)
    reasons = np.empty(0, np.uint8) if fate is None else fate[samples]
    return DroppedSamples(sample_ids=samples, seqlens=tokens, num_tokens=tokens, reasons=reasons)


def with_starts(pieces: Pieces, lost: DroppedSamples) -> tuple[Pieces, DroppedSamples]:
    """Say where whole samples begin, for a plan that cuts some in another epoch."""
    if pieces.starts is None:
        pieces = replace(pieces, starts=np.broadcast_to(np.int32(0), pieces.seqlens.shape))
        lost = replace(lost, starts=np.zeros_like(lost.num_tokens))
    return pieces, lost


def _placed(lost: DroppedSamples, pieces: Pieces, limit: int) -> DroppedSamples:
    """Say where what is lost begins, where samples are cut: of truncated ones behind the limit."""
    if pieces.starts is None:
        return lost
    is_truncated = lost.reasons == reason("truncated")
    return replace(lost, starts=np.where(is_truncated, limit, 0).astype(np.int64))


def join_drops(one: DroppedSamples, other: DroppedSamples) -> DroppedSamples:
    """Return both, in the order of the samples, and of their tokens."""
    samples = np.concatenate([one.sample_ids, other.sample_ids])
    starts = None
    if one.starts is not None and other.starts is not None:
        starts = np.concatenate([one.starts, other.starts])
    order = np.argsort(samples, kind="stable") if starts is None else np.lexsort((starts, samples))
    return DroppedSamples(
        sample_ids=samples[order],
        seqlens=np.concatenate([one.seqlens, other.seqlens])[order],
        num_tokens=np.concatenate([one.num_tokens, other.num_tokens])[order],
        reasons=np.concatenate([one.reasons, other.reasons])[order],
        starts=None if starts is None else starts[order],
    )


def _join(lost: DroppedSamples, ids: IntArray, seqlens: NDArray[np.int64], limit: int) -> DroppedSamples:
    """Add truncated ends to what is lost, in the order of the samples."""
    samples = np.concatenate([lost.sample_ids, ids])
    order = np.argsort(samples, kind="stable")
    codes = np.concatenate([lost.reasons, np.full(len(ids), reason("truncated"), np.uint8)])
    return DroppedSamples(
        sample_ids=samples[order],
        seqlens=np.concatenate([lost.seqlens, seqlens])[order],
        num_tokens=np.concatenate([lost.num_tokens, seqlens - limit])[order],
        reasons=codes[order],
    )
