"""Selection: which samples a plan takes, and why it leaves the others out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, EmptyPlanError, PlanError, SampleTooLongError
from packer.kernels.wrapped import LEAST_ROOM
from packer.options.bounds import ALONE, Company, full_row, least_company, longest_alone, longest_sample
from packer.options.config import MAX_SEQLEN, PlanConfig
from packer.plan.epoch import DROP_REASONS
from packer.planner.packing.microbatches import IntArray
from packer.wording import counted

KEPT = len(DROP_REASONS)
"""The fate of a sample that is planned; below it are the codes of the reasons to drop one."""


def reason(name: str) -> int:
    """Return the code of a reason to drop a sample."""
    return DROP_REASONS.index(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What becomes of each of N samples."""

    fates: NDArray[np.uint8] | None
    """(N,) ``KEPT``, or the code of a reason; None where all are kept, whole."""
    limit: int
    """A longer sample is too long: it can be in no micro-batch, alone or in the least company."""


def select(lengths: Mapping[str, IntArray], config: PlanConfig, loss_tokens: IntArray | None) -> Selection:
    """Decide which samples are planned.

    Args:
        lengths: (N,) lengths of all samples, ``seqlen`` and every metric that has a budget.
        config: the options.
        loss_tokens: (N,) tokens of each that the loss counts; None for all but the first.

    Raises:
        SampleTooLongError: a sample does not fit, and ``too_long`` is ``error``.
        EmptyPlanError: no sample is left.
        ConfigError: not a single token fits.
        PlanError: ``sample_ids`` names a sample that is not there.
    """
    seqlens = lengths["seqlen"]
    is_wanted = _wanted(seqlens, config, loss_tokens)
    company = _companies(lengths, is_wanted, config)
    for metric in dict.fromkeys(["seqlen", *config.budgets]):
        if longest_sample(config, metric) < 1:
            raise ConfigError(
                f"no sample fits a micro-batch of --max-tokens {config.budgets.get(metric)} after rounding; "
                "raise it or --max-attention, or lower --fixed-seqlen, --pad-multiple or --sp-size"
            )
    if config.packing == "wrapped" and full_row(config) < LEAST_ROOM:
        raise ConfigError(
            f"a wrapped row of {counted(full_row(config), 'token')}, after rounding, cannot take a part of a "
            f"sample and leave one that trains; raise --max-tokens {config.max_tokens} or --fixed-seqlen, so "
            f"that a row holds {LEAST_ROOM}"
        )
    limit = longest_sample(config, company=company.get("seqlen", ALONE))
    if limit < 1:
        raise EmptyPlanError(
            f"no sample can share a micro-batch with the {counted(config.min_samples - 1, 'shortest other')} "
            f"(--min-samples {config.min_samples}); lower --min-samples or raise --max-tokens"
        )
    others = {
        metric: longest_sample(config, metric, company[metric])
        for metric in config.budgets
        if metric != "seqlen"
    }
    if (
        is_wanted is None
        and int(seqlens.min()) > 0
        and int(seqlens.max()) <= limit
        and all(int(lengths[metric].max()) <= longest for metric, longest in others.items())
    ):
        return Selection(fates=None, limit=limit)
    is_too_long = seqlens > limit
    for metric, longest in others.items():
        is_too_long |= lengths[metric] > longest
    # the first that applies
    fates = np.full(len(seqlens), KEPT, np.uint8)
    if config.too_long in ("error", "drop"):
        fates[is_too_long] = reason("too_long")
    fates[seqlens == 0] = reason("empty")
    if is_wanted is not None:
        fates[~is_wanted] = reason("filtered")
    if config.too_long == "error":
        _refuse_too_long(fates, lengths, limit, others, company, config)
    if not (fates == KEPT).any():
        raise EmptyPlanError(
            f"no sample is left: {_why_none(fates, config, limit, company)}; loosen the filters or raise the "
            "limits"
        )
    return Selection(fates=fates, limit=limit)


def _wanted(seqlens: IntArray, config: PlanConfig, loss_tokens: IntArray | None) -> NDArray[np.bool_] | None:
    """Return which samples the filters let through; None for all. Empty ones have a reason of their own."""
    is_wanted = np.ones(len(seqlens), np.bool_)
    if config.filter_min is not None:
        is_wanted &= (seqlens >= config.filter_min) | (seqlens == 0)
    if config.filter_max is not None:
        is_wanted &= seqlens <= config.filter_max
    if config.drop_untrainable:
        trains = seqlens > 1 if loss_tokens is None else loss_tokens > 0
        is_wanted &= trains | (seqlens == 0)
    if config.sample_ids is not None:
        ids = np.asarray(config.sample_ids)
        last = int(ids.max())
        if last >= len(seqlens):
            raise PlanError(
                f"--sample-ids names sample {last}, but the data set has {len(seqlens)}, counted from 0; "
                "take the file that belongs to this data set"
            )
        is_named = np.zeros(len(seqlens), np.bool_)
        is_named[ids] = True
        is_wanted &= is_named
    return None if is_wanted.all() else is_wanted


def _companies(
    lengths: Mapping[str, IntArray], is_wanted: NDArray[np.bool_] | None, config: PlanConfig
) -> dict[str, Company]:
    """Return, per metric, the least company that ``min_samples`` asks for."""
    if config.min_samples == 1:
        return dict.fromkeys(config.budgets, ALONE)
    is_there = lengths["seqlen"] > 0
    if is_wanted is not None:
        is_there &= is_wanted
    num_there, others = int(np.count_nonzero(is_there)), config.min_samples - 1
    if 0 < num_there <= others:
        raise EmptyPlanError(
            f"no sample is left: {counted(num_there, 'sample')} cannot fill a micro-batch of --min-samples "
            f"{config.min_samples}; lower it"
        )
    companies = {}
    for metric in config.budgets:
        shortest: IntArray = np.empty(0, np.int64)
        if num_there:
            shortest = np.partition(lengths[metric][is_there], others - 1)[:others]
        companies[metric] = least_company(shortest.astype(np.int64), config)
    return companies


def _refuse_too_long(
    fates: NDArray[np.uint8],
    lengths: Mapping[str, IntArray],
    limit: int,
    others: Mapping[str, int],
    company: Mapping[str, Company],
    config: PlanConfig,
) -> None:
    culprits = np.flatnonzero(fates == reason("too_long"))
    if not len(culprits):
        return
    sample = int(culprits[0])
    metric, longest = "seqlen", limit
    if lengths["seqlen"][sample] <= limit:
        metric, longest = next(item for item in others.items() if lengths[item[0]][sample] > item[1])
    unit = "tokens" if metric == "seqlen" else metric
    more = f", and {len(culprits) - 1:,} more are too long" if len(culprits) > 1 else ""
    cures = "drop" if len(config.budgets) > 1 else "truncate, split or drop"
    raise SampleTooLongError(
        f"sample {sample} has {int(lengths[metric][sample])} {unit}, over the limit of {longest} "
        f"({_bounds(config, metric, longest, company)}){more}; raise the limit, or choose --too-long {cures}"
    )


def _bounds(config: PlanConfig, metric: str, longest: int, companies: Mapping[str, Company]) -> str:
    """Name the options that bound the length of one sample: those that would raise it, or all together."""
    if metric == "seqlen" and longest == config.max_seqlen:
        return f"--max-seqlen {config.max_seqlen}"
    company = companies.get(metric, ALONE)
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
    bounds = [name for name, value in given.items() if name == "max_tokens" or value != without[name]]
    biting = [
        name
        for name in bounds
        if longest_alone(replace(config, **{name: without[name]}), metric, company) > longest
    ]
    named = [f"--{name.replace('_', '-')} {given[name]}" for name in biting or bounds]
    if company != ALONE and longest_alone(config, metric) > longest:
        named.append(f"--min-samples {config.min_samples} with the shortest others")
    return ", ".join(named)


def _why_none(
    fates: NDArray[np.uint8], config: PlanConfig, limit: int, company: Mapping[str, Company]
) -> str:
    """Say how many samples each reason takes."""
    words = {
        "filtered": "filtered out",
        "empty": "empty",
        "too_long": f"over the limit of {limit} ({_bounds(config, 'seqlen', limit, company)})",
    }
    counts = np.bincount(fates, minlength=KEPT)[:KEPT]
    return ", ".join(f"{count:,} {words[DROP_REASONS[code]]}" for code, count in enumerate(counts) if count)
