"""``packer.calibrate``: the largest budget that fits, tokens a second over budgets, and which one to take."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from packer.budget import ranks
from packer.budget.advice import WITHIN, bound_of_attention, largest_mixed, notes, smallest_fast
from packer.budget.candidates import Candidates, require_config
from packer.budget.command import plan_command
from packer.budget.device import Device, open_device
from packer.budget.findings import Calibration, Measured
from packer.budget.rehearsal import MARGIN, usable_bytes
from packer.budget.search import Search, confirm_largest, find_largest
from packer.budget.snapshot import Stateful
from packer.budget.stage import Training, gigabytes
from packer.budget.trial import Bench, Speed
from packer.errors import ConfigError, PlanError
from packer.metrics import Metrics
from packer.options.config import PlanConfig
from packer.runtime.batches.batch import Batch

_SEARCH_SHARE = 0.6
"""Of the time: the search for the largest budget; the rest is for speeds."""
_SPEED_SHARE = 1 / 16
"""Of the time: one speed."""
_REFINEMENTS = 2
_PLAYS = 3
"""Micro-batches of a trial, about: the extremes that may be the highest, and the largest again."""


def calibrate(
    train_step: Callable[[Batch], Tensor],
    seqlens: ArrayLike | Metrics | str | os.PathLike[str],
    config: PlanConfig,
    *,
    model: Any,
    optimizer: Any,
    device: torch.device | str | int | Device | None = None,
    dataset: Any = None,
    loader_options: Mapping[str, Any] | None = None,
    loss_tokens: ArrayLike | None = None,
    metrics: Mapping[str, ArrayLike] | None = None,
    also: Sequence[Stateful] = (),
    backward: Callable[[Tensor], Any] = Tensor.backward,
    update: Callable[[], Any] | None = None,
    margin: float = MARGIN,
    max_seconds: float = 150.0,
) -> Calibration:
    """Find the budget to plan with, on this GPU, with this model.

    Plans of growing budgets are made, and their extreme micro-batches played as ``rehearse`` plays them,
    until the next would not fit: running out of memory is survived, and what fragments of memory take is
    counted, since the allocator itself is held to the limit. Then tokens a second are measured over budgets,
    with the accumulation that keeps the tokens of a step. Recommended is the smallest budget within 2% of the
    best speed: of equal speed, it leaves the most micro-batches a step, hence the best mix.

    Everything is left as it was, as by ``rehearse``. On several ranks every rank calls it, all get the same
    answer, and none runs out of memory: budgets are approached from below.

    Args:
        train_step: From a batch, on the device, to its loss; backward is called here.
        seqlens: What ``make_plan`` takes: lengths, or a metrics directory.
        config: The options of the run. Its ``max_tokens`` need only hold the longest sample; its
            ``step_tokens``, or else the tokens that its steps have, are kept at every budget.
        model: What the optimizer updates, as it is trained; or several.
        optimizer: Or several.
        device: Where batches go: ``cuda``, ``cpu``, or a `Device`. Default: the GPU, if there is one.
        dataset: Whose samples are played. Default: random ids of the planned lengths.
        loader_options: Further ones of ``PlanLoader``: ``sp_size``, ``pad_cu_seqlens``, ``collate``.
        loss_tokens: As for ``make_plan``.
        metrics: As for ``make_plan``.
        also: What else a step changes and has ``state_dict`` and ``load_state_dict``: a gradient scaler.
        backward: What the loop calls, where it is not ``loss.backward()``.
        update: What the loop calls for an update, where it is not ``optimizer.step()``.
        margin: Share of the device's memory that is to stay free.
        max_seconds: When to end: what is known by then is told.

    Raises:
        ConfigError: ``train_step`` returns no loss, or arguments have no meaning.
        PlanError: Not even the smallest budget that holds the samples fits.
        PackerError: What keeps ``config`` from being planned.
    """
    clock = _Clock(max_seconds)
    candidates = Candidates(seqlens, require_config(config), loss_tokens=loss_tokens, metrics=metrics)
    training = Training.of(train_step, model, optimizer, also=tuple(also), backward=backward, update=update)
    place = open_device(device)
    available, usable = place.available(), usable_bytes(place, margin)
    bench = Bench(candidates, training, place, usable=usable, dataset=dataset, loader_options=loader_options)
    with bench.stage.set(), place.capped(usable if bench.stage.can_fail else None):
        search = _search(bench, clock)
        speeds = _speeds(bench, search, clock)
    assert search.largest is not None
    chosen = smallest_fast(speeds)
    mixed = largest_mixed(speeds, chosen)
    max_attention = bound_of_attention(bench, chosen)
    recommended = _run(candidates, chosen, max_attention)
    return Calibration(
        device=place.name,
        available=available,
        usable=usable,
        is_expandable=place.is_expandable,
        trials=tuple(search.trials),
        largest=candidates.config_at(search.largest.budget).max_tokens,
        is_largest_sure=search.next_budget() is None and not search.is_bounded_by_data,
        speeds=tuple(speeds),
        recommended=recommended,
        alternative=None if mixed is None else _run(candidates, mixed, max_attention),
        max_attention=max_attention,
        seconds=clock.seconds,
        command=plan_command(recommended, candidates.source),
        notes=tuple(notes(bench, search, speeds, chosen, max_attention, place)),
    )


class _Clock:
    """The time that is left; the same on every rank, so that all do the same."""

    def __init__(self, limit: float) -> None:
        if not limit > 0:
            raise ConfigError(f"max_seconds={limit} leaves no time; 150 is the default")
        self._begin = time.perf_counter()
        self.limit = limit

    @property
    def seconds(self) -> float:
        """Since the calibration began."""
        return max(ranks.from_all(time.perf_counter() - self._begin))

    def left(self, share: float = 1.0) -> float:
        """Return the seconds that are left of a share of the time."""
        return self.limit * share - self.seconds


def _search(bench: Bench, clock: _Clock) -> Search:
    """Find the largest budget that fits, or that there is time for.

    Raises:
        PlanError: There is none.
    """
    candidates = bench.candidates
    first = candidates.least
    if not bench.warm_up(first):
        raise PlanError(_nothing_fits(bench, first))
    search = Search(constant=bench.constant, usable=bench.usable, rounded=candidates.rounded)
    for _ in find_largest(search, bench.try_budget, first):
        if search.largest is None:
            raise PlanError(_nothing_fits(bench, first))
        upcoming = search.next_budget()
        if upcoming is not None and _PLAYS * bench.seconds_of(upcoming) > clock.left(_SEARCH_SHARE):
            break
    for trial in confirm_largest(search, partial(bench.try_budget, every_extreme=True), first):
        if not trial.fits and search.largest is None:
            raise PlanError(_nothing_fits(bench, first))
    return search


def _nothing_fits(bench: Bench, budget: int) -> str:
    taken = (
        f", {gigabytes(bench.constant)} of it for weights, gradients and optimizer" if bench.constant else ""
    )
    return (
        f"a budget of {budget:,} tokens, which the longest sample takes, does not fit into "
        f"{gigabytes(bench.usable)}{taken}; turn on activation checkpointing, shard the model, cut long "
        "samples (--max-seqlen with --too-long truncate or split), or share them among GPUs (--sp-size)"
    )


def _speeds(bench: Bench, search: Search, clock: _Clock) -> list[Measured]:
    """Measure speeds from the largest budget that a step has room for down to where they fall off.

    Raises:
        PlanError: None could be measured.
    """
    candidates, largest = bench.candidates, search.largest
    assert largest is not None
    found: dict[int, Measured] = {}
    budget = max(min(largest.budget, candidates.rounded(candidates.most)), candidates.least)
    while True:
        if found and _PLAYS * bench.seconds_of(budget) > clock.left():
            break
        speed = bench.measure_speed(budget, _time_for_one(clock))
        if speed is not None:
            one = found[budget] = _measured(candidates, budget, speed)
            best = max(other.tokens_per_second for other in found.values())
            # two halvings below the best, and a mix: smaller ones are neither faster nor needed
            if one.tokens_per_second < best * (1 - 4 * WITHIN) and one.is_mixed:
                break
        smaller = candidates.rounded(budget / 2)
        if smaller < candidates.least or smaller == budget:
            break
        budget = smaller
    if not found:
        raise PlanError(
            f"budgets up to {largest.budget:,} tokens fit one micro-batch, and not a step of several; raise "
            "margin="
        )
    _refine(bench, found, clock)
    return [found[budget] for budget in sorted(found)]


def _refine(bench: Bench, found: dict[int, Measured], clock: _Clock) -> None:
    """Measure between the smallest budget that is fast enough and the next smaller one."""
    for _ in range(_REFINEMENTS):
        chosen = smallest_fast(found.values()).budget
        below = max((budget for budget in found if budget < chosen), default=None)
        if below is None or chosen < below * 1.3:
            return
        between = bench.candidates.rounded(math.sqrt(below * chosen))
        if between in found or _PLAYS * bench.seconds_of(between) > clock.left():
            return
        speed = bench.measure_speed(between, _time_for_one(clock))
        if speed is None:
            return
        found[between] = _measured(bench.candidates, between, speed)


def _time_for_one(clock: _Clock) -> float:
    return min(clock.limit * _SPEED_SHARE, max(clock.left() / 4, 0.0))


def _measured(candidates: Candidates, budget: int, speed: Speed) -> Measured:
    plan = candidates.plan(budget)
    counts = plan.header["epochs"][0]
    return Measured(
        max_tokens=candidates.config_at(budget).max_tokens,
        tokens_per_second=speed.tokens_per_second,
        peak=speed.peak,
        grad_accum=plan.grad_accum,
        step_tokens=counts["num_tokens"] / max(counts["num_steps"], 1),
        padding=counts["num_padded_tokens"] / max(counts["num_tokens"], 1) - 1,
        design_effect=counts["design_effect"]["seqlen"],
    )


def _run(candidates: Candidates, one: Measured, max_attention: int | None) -> PlanConfig:
    """Return the configuration of a run with a measured budget."""
    config = candidates.config_at(one.budget)
    config = replace(config, step_tokens=None, grad_accum=one.grad_accum)
    return config if max_attention is None else replace(config, max_attention=max_attention)
