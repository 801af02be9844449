"""Which samples a plan takes, and how those that are too long are cut."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import EmptyPlanError, MetricsError, PlanError, SampleTooLongError
from packer.plan.epoch import DROP_REASONS, DroppedSamples
from packer.planner.choose.limits import longest_alone, max_seqlen
from packer.planner.config import MAX_SEQLEN, PlanConfig

IntArray = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """P samples, or pieces of samples, that are to be planned; those of one sample are neighbours."""

    lengths: IntArray
    """(K, P) int32, one row a budget; the first is seqlen, unless budgets are on other metrics."""
    seqlens: NDArray[np.int32]
    """(P,) tokens."""
    ids: IntArray | None
    """(P,) the sample of each piece, rising; None where piece p is sample p."""
    starts: NDArray[np.int32] | None
    """(P,) where each piece begins in its sample; None where no sample is cut."""
    source: IntArray
    """(N,) lengths of all samples of the source."""

    def __len__(self) -> int:
        """Return P."""
        return len(self.seqlens)

    @property
    def owners(self) -> IntArray | None:
        """The sample of each piece where one sample may have several; else None."""
        return self.ids if self.starts is not None and (self.starts > 0).any() else None

    def sample_ids(self, pieces: IntArray) -> IntArray:
        """Return the samples of ``pieces``, int32 while every id of the source fits."""
        wide = len(self.source) > 2**31
        samples = pieces if self.ids is None else self.ids[pieces]
        return samples.astype(np.int64 if wide else np.int32, copy=False)

    def drop(self, pieces: IntArray, reasons: NDArray[np.uint8]) -> DroppedSamples:
        """Report ``pieces`` as dropped, in the order of their samples."""
        order = np.argsort(pieces, kind="stable")
        pieces, reasons = pieces[order], reasons[order]
        samples = self.sample_ids(pieces)
        return DroppedSamples(
            sample_ids=samples,
            seqlens=self.source[samples].astype(np.int64),
            num_tokens=self.seqlens[pieces].astype(np.int64),
            reasons=reasons,
        )


def reason(name: str) -> int:
    """Return the code of a reason to drop a sample."""
    return DROP_REASONS.index(name)


def choose_pieces(
    seqlens: IntArray, config: PlanConfig, metrics: Mapping[str, IntArray]
) -> tuple[Pieces, DroppedSamples]:
    """Choose and cut the samples to plan.

    Args:
        seqlens: (N,) lengths of all samples.
        config: the options.
        metrics: further lengths of the samples, for budgets on them.

    Returns:
        The pieces, and what every epoch leaves out: samples filtered out, empty, too long, without possible
        company, and the ends of those that are truncated.

    Raises:
        SampleTooLongError: a sample does not fit, and ``too_long`` is ``error``.
        EmptyPlanError: nothing is left.
        MetricsError: a length below zero.
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
    fate, limit = _fates(seqlens, lengths, config)
    if fate is None:
        return _all_samples(seqlens, lengths, config), _lost(seqlens, np.empty(0, np.int64), None)
    kept = _narrow(np.flatnonzero(fate == _KEPT), seqlens)
    if not len(kept):
        raise EmptyPlanError(
            f"no sample is left: {_why_none(fate, config, limit)}; loosen the filters or raise the limits"
        )
    lost = _lost(seqlens, np.flatnonzero(fate < _KEPT), fate)
    if config.too_long == "split" and int(seqlens[kept].max()) > limit:
        return _split(seqlens, kept, limit), lost
    return _whole_or_truncated(seqlens, lengths, kept, limit, lost, config)


def _all_samples(seqlens: IntArray, lengths: Mapping[str, IntArray], config: PlanConfig) -> Pieces:
    """Take every sample as it is; lengths of 32 bits are not copied."""
    tokens = np.asarray(seqlens, np.int32)
    budgets = tokens[np.newaxis]
    if isinstance(config.max_tokens, Mapping):
        budgets = np.stack([np.asarray(lengths[metric], np.int32) for metric in config.budgets])
    return Pieces(lengths=budgets, seqlens=tokens, ids=None, starts=None, source=seqlens)


def _split(seqlens: IntArray, kept: IntArray, limit: int) -> Pieces:
    """Cut samples into pieces of ``limit`` tokens, the last one of what is left."""
    whole = seqlens[kept].astype(np.int64)
    pieces = -(-whole // limit)
    ids = np.repeat(kept, pieces)  # in 32 bits while every id of the source fits
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = (np.arange(len(ids)) - first) * limit
    if int(starts.max()) > MAX_SEQLEN:
        raise PlanError(
            f"sample {int(ids[np.argmax(starts)])} has pieces that start after token {MAX_SEQLEN}; choose "
            "--too-long truncate or drop"
        )
    cut = np.minimum(np.repeat(whole, pieces) - starts, limit).astype(np.int32)
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
    whole = seqlens if len(kept) == len(seqlens) else seqlens[kept]
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
        ids=None if len(kept) == len(seqlens) else kept,
        starts=np.zeros(len(cut), np.int32) if is_truncated.any() else None,
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


_KEPT = len(DROP_REASONS)
"""The fate of a sample that is planned; below it are the codes of the reasons to drop one."""


def _fates(
    seqlens: IntArray, lengths: Mapping[str, IntArray], config: PlanConfig
) -> tuple[NDArray[np.uint8] | None, int]:
    """Return what becomes of each sample, None if all are kept whole, and the longest that is not cut."""
    least, most = int(seqlens.min()), int(seqlens.max())
    limit = max_seqlen(config)
    others = {metric: max_seqlen(config, metric) for metric in config.budgets if metric != "seqlen"}
    filter_min = config.filter_min or 0
    filter_max = most if config.filter_max is None else config.filter_max
    shortest = max(1, least, filter_min)
    in_company = limit
    if config.min_samples > 1 and len(config.budgets) == 1:
        in_company = longest_alone(config, company=config.min_samples, least=shortest)
    if (
        config.sample_ids is None
        and least >= max(1, filter_min)
        and most <= min(limit, filter_max, in_company)
        and all(int(lengths[metric].max()) <= longest for metric, longest in others.items())
    ):
        return None, limit
    fate = np.full(len(seqlens), _KEPT, np.uint8)
    is_too_long = seqlens > limit
    for metric, longest in others.items():
        is_too_long |= lengths[metric] > longest
    cut = config.too_long in ("truncate", "split")
    if not cut:
        fate[is_too_long] = reason("too_long")
        fate[(seqlens > in_company) & ~is_too_long] = reason("min_samples")
    elif in_company < limit:
        fate[np.minimum(seqlens, limit) > in_company] = reason("min_samples")
    fate[seqlens == 0] = reason("empty")
    fate[((seqlens < filter_min) & (seqlens > 0)) | (seqlens > filter_max)] = reason("filtered")
    if config.sample_ids is not None:
        ids = np.asarray(config.sample_ids)
        if ids[-1] >= len(seqlens):
            raise PlanError(
                f"--sample-ids names sample {ids[-1]}, but the data set has {len(seqlens)}, counted from 0; "
                "take the file that belongs to this data set"
            )
        is_wanted = np.zeros(len(seqlens), np.bool_)
        is_wanted[ids] = True
        fate[~is_wanted] = reason("filtered")
    if config.too_long == "error":
        _refuse_too_long(fate, seqlens, lengths, limit, others, config)
    return fate, limit


def _refuse_too_long(
    fate: NDArray[np.uint8],
    seqlens: IntArray,
    lengths: Mapping[str, IntArray],
    limit: int,
    others: Mapping[str, int],
    config: PlanConfig,
) -> None:
    culprits = np.flatnonzero(fate == reason("too_long"))
    if not len(culprits):
        return
    sample = int(culprits[0])
    metric, longest = "seqlen", limit
    if seqlens[sample] <= limit:
        metric, longest = next(item for item in others.items() if lengths[item[0]][sample] > item[1])
    unit = "tokens" if metric == "seqlen" else metric
    more = f", and {len(culprits) - 1:,} more are too long" if len(culprits) > 1 else ""
    cures = "drop" if len(config.budgets) > 1 else "truncate, split or drop"
    raise SampleTooLongError(
        f"sample {sample} has {int(lengths[metric][sample])} {unit}, over the limit of {longest} "
        f"({_bounds(config, metric, longest)}){more}; raise the limit, or choose --too-long {cures}"
    )


def _bounds(config: PlanConfig, metric: str, longest: int) -> str:
    """Name the options that bound the length of one sample: those that would raise it, or all together."""
    if metric == "seqlen" and longest == config.max_seqlen:
        return f"--max-seqlen {config.max_seqlen}"
    budget = config.budgets.get(metric, MAX_SEQLEN)
    without: dict[str, Any] = {
        "max_tokens": config.budgets | {metric: MAX_SEQLEN},
        "fixed_seqlen": None,
        "max_attention": None,
        "pad_multiple": 1,
        "sp_size": 1,
        "pad_segments_to": 1,
    }
    given = {name: getattr(config, name) for name in without} | {"max_tokens": budget}
    bounds = [name for name, value in given.items() if name == "max_tokens" or value not in (None, 1)]
    biting = [
        name for name in bounds if longest_alone(replace(config, **{name: without[name]}), metric) > longest
    ]
    return ", ".join(f"--{name.replace('_', '-')} {given[name]}" for name in biting or bounds)


def _why_none(fate: NDArray[np.uint8], config: PlanConfig, limit: int) -> str:
    """Say how many samples each reason takes."""
    words = {
        "filtered": "filtered out",
        "empty": "empty",
        "too_long": f"over the limit of {limit} ({_bounds(config, 'seqlen', limit)})",
        "min_samples": f"too long to share a micro-batch of --min-samples {config.min_samples}",
    }
    counts = np.bincount(fate, minlength=_KEPT)[:_KEPT]
    return ", ".join(f"{count:,} {words[DROP_REASONS[code]]}" for code, count in enumerate(counts) if count)


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
