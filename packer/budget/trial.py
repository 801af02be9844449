"""A budget tried: the extreme micro-batches of its plan, and how fast the others are."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

from packer.budget import ranks
from packer.budget.candidates import Candidates
from packer.budget.device import Device, Peak
from packer.budget.extremes import Extreme, find_extremes, typical
from packer.budget.law import NOTHING, Law
from packer.budget.rehearsal import Batches
from packer.budget.stage import Stage, Training
from packer.plan import Plan
from packer.runtime.batches.batch import Batch

LAPS = 3
"""Timed rounds of a speed, of which the middle one counts."""
_SURE = 4
"""Measurements from which on micro-batches that take less than the largest need not be played."""
_NEARLY_LARGEST = 0.99
LAP_SECONDS = 0.3
"""A round is no shorter, or a clock's noise would show in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What became of a budget; the same on every rank."""

    budget: int
    fits: bool
    peak: Peak | None
    """The highest over its extremes; None where it ran out of memory, or would have."""
    largest_area: int
    """Tokens of its largest tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast a budget trains; the same on every rank."""

    tokens_per_second: float
    """Real tokens of one rank, its share of the updates included."""
    peak: Peak


class Bench:
    """Tries budgets on one training, one after the other, and keeps what it measured."""

    def __init__(
        self,
        candidates: Candidates,
        training: Training,
        device: Device,
        *,
        usable: int,
        dataset: Any,
        loader_options: Mapping[str, Any] | None,
    ) -> None:
        self.candidates = candidates
        self.usable = min(ranks.from_all(usable))
        """Bytes, of the rank that has the fewest."""
        self.stage = Stage(training, device)
        self._training = training
        self._device = device
        self._dataset = dataset
        self._loader_options = loader_options
        self.sizes: list[Extreme] = []
        self.peaks: list[float] = []
        self.seconds: list[float] = []
        """Of every micro-batch that was played: itself, bytes, seconds."""
        self.constant = 0
        """Bytes that are taken before a micro-batch comes: weights, gradients, optimizer's state."""

    @property
    def memory(self) -> Law | None:
        """How memory grows with a micro-batch."""
        return Law.fit([NOTHING, *self.sizes], [self.constant, *self.peaks])

    @property
    def time(self) -> Law | None:
        """How time grows with a micro-batch."""
        return Law.fit(self.sizes, self.seconds)

    def warm_up(self, budget: int) -> bool:
        """Allocate gradients and the optimizer's state with the smallest micro-batch; False: it does not fit.

        Raises:
            PackerError: There is no plan of this budget.
        """
        plan = self.candidates.microbatches(budget)
        batch = self._batches(plan).of(find_extremes(plan)[0])
        if self.stage.attempt(lambda: self.stage.warm_up(batch)) is None:
            return False
        self.constant = max(ranks.from_all(self.stage.constant()))
        return True

    def seconds_of(self, budget: int) -> float:
        """Return how long the largest micro-batch of a budget is likely to take."""
        if not self.sizes:
            return 0.0
        rates = [seconds / size.area for size, seconds in zip(self.sizes, self.seconds, strict=True)]
        return rates[-1] * budget

    def try_budget(self, budget: int, *, every_extreme: bool = False) -> Trial:
        """Play the extremes of a budget's plan, and the largest again when the others have left fragments.

        Args:
            budget: Tokens of a micro-batch.
            every_extreme: Those too that take less than the largest by what is known: each shape leaves
                fragments of its own. Without, they are left out as soon as that can be told.

        Raises:
            PackerError: There is no such plan.
        """
        plan = self.candidates.microbatches(budget)
        batches, extremes = self._batches(plan), find_extremes(plan)
        largest_area = extremes[-1].area
        self._device.release()
        highest = Peak(0, 0)
        played = extremes if every_extreme else self._worth_playing(extremes)
        for extreme in [*played, extremes[-1]]:
            peak = self._play(batches, extreme)
            if peak is None:
                return Trial(budget=budget, fits=False, peak=None, largest_area=largest_area)
            highest = Peak(*map(max, highest, peak))
        fits = self.stage.can_fail or highest.reserved <= self.usable
        return Trial(budget=budget, fits=fits, peak=highest, largest_area=largest_area)

    def measure_speed(self, budget: int, seconds: float) -> Speed | None:
        """Measure tokens a second of a budget in about so many seconds; None if memory did not do.

        Micro-batches of all sizes are played one after the other as a step does, and an update besides.

        Raises:
            PackerError: There is no such plan.
        """
        plan = self.candidates.plan(budget)
        expected = max(self.seconds_of(budget), 1e-3)
        count = min(max(int(seconds / (LAPS + 1) / expected), 1), 4)
        chosen = typical(plan, count)
        batches = self._batches(plan)
        made = [batches.of(extreme) for extreme in chosen]
        if not self.stage.can_fail and not self._fit(chosen, made):
            return None
        laps = max(1, min(round(LAP_SECONDS / (expected * len(made))), 50))
        self._device.release()
        self._device.reset_peak()
        if self.stage.attempt(lambda: self.stage.lap(made)) is None:
            return None
        # where there is no time for a median, once must do
        rounds = LAPS if expected * len(made) * (LAPS + 1) <= seconds else 1
        found = self.stage.attempt(lambda: [self.stage.lap(made * laps) for _ in range(rounds)])
        if found is None:
            return None
        lap = max(ranks.from_all(statistics.median(found))) / laps
        peak = Peak(*map(max, *ranks.from_all(self._device.peak()), Peak(0, 0)))
        _, update = self.stage.update()
        update = max(ranks.from_all(update))
        tokens = sum(extreme.tokens for extreme in chosen)
        per_update = lap / len(made) * plan.grad_accum + update
        return Speed(
            tokens_per_second=tokens / len(made) * plan.grad_accum / per_update,
            peak=peak,
        )

    def _fit(self, chosen: Sequence[Extreme], made: Sequence[Batch]) -> bool:
        """Whether micro-batches fit by what is known of memory, each beside the batches of the others."""
        law = self.memory
        waiting = sum(
            value.nbytes for batch in made for value in tree_iter(batch) if isinstance(value, Tensor)
        )
        return law is None or max(map(law.cost, chosen)) + waiting <= self.usable

    def _worth_playing(self, extremes: Sequence[Extreme]) -> list[Extreme]:
        """Return the extremes that may be the one that takes most; all of them before that can be told."""
        law = self.memory
        if law is None or len(self.sizes) < _SURE:
            return list(extremes)
        highest = max(map(law.cost, extremes))
        return [extreme for extreme in extremes if law.cost(extreme) >= _NEARLY_LARGEST * highest]

    def _play(self, batches: Batches, extreme: Extreme) -> Peak | None:
        """Play a micro-batch; None if memory does not do, or, on several ranks, would not."""
        law = self.memory
        if not self.stage.can_fail and law is not None and law.cost(extreme) > self.usable:
            return None
        batch = batches.of(extreme)
        found = self.stage.attempt(lambda: self.stage.play(batch))
        if found is None:
            return None
        peak, seconds = found
        peak = Peak(*map(max, *ranks.from_all(peak), Peak(0, 0)))
        self.sizes.append(extreme)
        self.peaks.append(float(peak.allocated))
        self.seconds.append(max(ranks.from_all(seconds)))
        return peak

    def _batches(self, plan: Plan) -> Batches:
        return Batches(plan, self._training, self._device, self._dataset, self._loader_options)
