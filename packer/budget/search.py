"""The largest budget that fits: from below, each next one where memory is expected to end."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from packer.budget.trial import Trial

RESOLUTION = 0.01
"""The search ends where the largest budget that fits and the smallest that does not are as near."""
_FIRST_LEAP = 4.0
_LEAP = 12.0
"""The next budget is at most so many times the largest that fits."""
_SHORT_OF = 0.995
"""A leap aims so much short of where memory is expected to end."""


@dataclass(kw_only=True, slots=True)
class Search:
    """Where the largest budget lies, as far as is known."""

    constant: float
    """Bytes that no micro-batch adds to."""
    usable: float
    """Bytes."""
    rounded: Callable[[float], int]
    """To budgets that may be tried."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def largest(self) -> Trial | None:
        """The largest budget that fits."""
        return max((one for one in self.trials if one.fits), key=lambda one: one.budget, default=None)

    @property
    def failed(self) -> int | None:
        """The smallest budget that does not fit."""
        return min((one.budget for one in self.trials if not one.fits), default=None)

    @property
    def expected(self) -> float | None:
        """Where memory is expected to end, by the two largest budgets that fit."""
        fitting = sorted((one for one in self.trials if one.fits and one.peak), key=lambda one: one.budget)
        if not fitting:
            return None
        last = fitting[-1]
        budget, peak = 0.0, self.constant
        if len(fitting) > 1 and fitting[-2].peak is not None:
            budget, peak = fitting[-2].budget, fitting[-2].peak.allocated
        assert last.peak is not None
        slope = (last.peak.allocated - peak) / (last.budget - budget)
        return math.inf if slope <= 0 else last.budget + (self.usable - last.peak.allocated) / slope

    def next_budget(self) -> int | None:
        """Return the budget to try next; None when the largest is found."""
        largest, failed = self.largest, self.failed
        if largest is None:
            return None
        budget = largest.budget
        if len(self.trials) > 1 and self.is_bounded_by_data:
            return None
        expected = self.expected
        assert expected is not None
        if failed is not None:
            if failed <= budget * (1 + RESOLUTION):
                return None
            # The failure is near where memory ends: from there down in growing strides, then halves.
            num_failed = sum(not one.fits for one in self.trials)
            stride = failed * (1 - RESOLUTION * 3 ** (num_failed - 1))
            target = max(stride, math.sqrt(budget * failed))
        else:
            if expected <= budget * (1 + RESOLUTION):
                return None
            leap = _FIRST_LEAP if len(self.trials) == 1 else _LEAP
            target = min(expected * _SHORT_OF, budget * leap)
        found = self.rounded(target)
        if found <= budget or (failed is not None and found >= failed):
            return None
        return found

    @property
    def is_bounded_by_data(self) -> bool:
        """Whether a larger budget made no larger tensor: of all samples, or by another option."""
        fitting = sorted((one for one in self.trials if one.fits), key=lambda one: one.budget)
        return len(fitting) > 1 and fitting[-1].largest_area <= fitting[-2].largest_area


def confirm_largest(search: Search, try_budget: Callable[[int], Trial], least: int) -> Iterator[Trial]:
    """Try the largest budget anew, as a run plays it, and smaller ones until one goes through; yield each.

    Args:
        search: what is known.
        try_budget: as thoroughly as a run does.
        least: no smaller budget is tried.
    """
    while (largest := search.largest) is not None:
        trial = try_budget(largest.budget)
        search.trials.remove(largest)
        search.trials.append(trial)
        yield trial
        if trial.fits:
            return
        smaller = search.rounded(largest.budget * (1 - RESOLUTION))
        known = search.largest
        if smaller >= least and (known is None or smaller > known.budget):
            search.trials.append(replace(largest, budget=smaller))


def find_largest(search: Search, try_budget: Callable[[int], Trial], first: int) -> Iterator[Trial]:
    """Try budgets until the largest that fits is found; yield each, so that the caller may end it."""
    budget: int | None = first
    while budget is not None:
        trial = try_budget(budget)
        search.trials.append(trial)
        yield trial
        budget = search.next_budget()
