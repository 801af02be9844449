"""A first budget for a plan, from how the lengths are distributed."""

from dataclasses import dataclass
from typing import Literal

from packer.metrics import Manifest, MetricSummary
from packer.samples import SEQLEN

LONGEST_PLANNED = 2**31 - 1
"""A plan holds lengths in 32 bits; `analyze` takes any of 64."""

_LARGEST_ROW = 1 << 17
"""More tokens in one micro-batch than nearly anybody trains on: longer samples are better cut."""
_ROOM = 8
"""Budgets of up to so many times what holds 99% of the samples are worth having no sample cut."""
_MOST_PIECES = 1024
"""A sample of more is an outlier: leave it out."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Options of a plan that accepts these lengths."""

    max_tokens: dict[str, int]
    """By metric."""
    too_long: Literal["error", "drop", "split"]

    @property
    def options(self) -> str:
        """As the command line takes them."""
        if list(self.max_tokens) == [SEQLEN]:
            budgets = str(self.max_tokens[SEQLEN])
        else:
            budgets = ",".join(f"{metric}={budget}" for metric, budget in self.max_tokens.items())
        return f"--max-tokens {budgets}" + (
            "" if self.too_long == "error" else f" --too-long {self.too_long}"
        )


def suggest_plan(manifest: Manifest) -> Suggestion | None:
    """Return the powers of two that hold the longest sample, or where that is out of the way, most of them.

    None where no budget would plan anything: all samples are empty, or most are longer than a plan takes.
    """
    lengths = {name: manifest.metrics[name] for name in manifest.definition.get("columns", [SEQLEN])}
    if not any(summary.max for summary in lengths.values()):
        return None
    if any(summary.p99 > LONGEST_PLANNED for summary in lengths.values()):
        return None
    budgets = {name: _budget(summary) for name, summary in lengths.items()}
    if all(summary.max <= budgets[name] for name, summary in lengths.items()):
        return Suggestion(budgets, "error")
    can_split = len(lengths) == 1 and all(
        summary.max <= _MOST_PIECES * budgets[name] for name, summary in lengths.items()
    )
    if can_split:
        return Suggestion(budgets, "split")
    # what is dropped must leave something
    leaves_some = all(0 < summary.p99 <= budgets[name] for name, summary in lengths.items())
    return Suggestion(budgets, "drop") if leaves_some else None


def _budget(summary: MetricSummary) -> int:
    most = _ROOM * _power_of_two(summary.p99)
    return min(_power_of_two(summary.max), max(most, _ROOM), _LARGEST_ROW)


def _power_of_two(length: int) -> int:
    """Return the smallest one, from 2 on, that holds a length."""
    return 1 << max(length - 1, 1).bit_length()
