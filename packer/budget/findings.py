"""What a calibration found, for a person, for machines and as a page."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from packer.budget.device import Peak
from packer.budget.stage import gigabytes
from packer.budget.trial import Trial
from packer.options.config import PlanConfig

_COLUMNS = {
    "max-tokens": 12,
    "tokens/s": 12,
    "of best": 9,
    "peak": 11,
    "accum": 7,
    "step tokens": 13,
    "padding": 9,
    "design effect": 15,
}
"""Head → width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A budget whose speed was measured, and the run that it makes."""

    max_tokens: int | Mapping[str, int]
    tokens_per_second: float
    """Real tokens of one rank."""
    peak: Peak
    """Of the micro-batches that were timed, in bytes."""
    grad_accum: int
    step_tokens: float
    """Real tokens of a step, on average."""
    padding: float
    """Padding tokens for each real one."""
    design_effect: float | None
    """Of the steps in length; None where the plan cannot tell."""

    @property
    def budget(self) -> int:
        """The budget; of several the first."""
        return self.max_tokens if isinstance(self.max_tokens, int) else next(iter(self.max_tokens.values()))

    @property
    def is_mixed(self) -> bool:
        """The steps differ no more in length than random ones would."""
        return self.design_effect is None or self.design_effect <= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What a calibration found; ``print`` it for a person."""

    device: str
    available: int
    """Bytes that the process may take."""
    usable: int
    """The same less the margin."""
    is_expandable: bool
    """``expandable_segments`` are on."""
    trials: tuple[Trial, ...]
    """The budgets whose extreme micro-batches were played, in that order."""
    largest: int | Mapping[str, int]
    """The largest budget that fits."""
    is_largest_sure: bool
    """No larger one fits, but by 1%; False where time ran out, or the data set has no more."""
    speeds: tuple[Measured, ...]
    """The smallest budget first."""
    recommended: PlanConfig
    """The smallest budget within 2% of the best speed, and the accumulation that keeps the step's tokens."""
    alternative: PlanConfig | None
    """Where the recommended budget's steps are no mix: the largest whose are, if there is one."""
    max_attention: int | None
    """A bound worth giving, where attention takes much of the memory."""
    seconds: float
    """That the calibration took."""
    command: str
    """``packer plan …`` with what is recommended."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all of it in plain JSON; sizes in bytes."""
        entries = asdict(replace(self, recommended=None, alternative=None))  # type: ignore[arg-type]
        entries["recommended"] = self.recommended.to_json()
        entries["alternative"] = None if self.alternative is None else self.alternative.to_json()
        for entry in (*entries["trials"], *entries["speeds"]):
            entry["peak"] = None if entry["peak"] is None else Peak(*entry["peak"])._asdict()
        return entries

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines for a person."""
        yield (
            f"calibration on {self.device}: {gigabytes(self.usable)} of {gigabytes(self.available)} to be "
            f"used, {self.seconds:.0f} s"
        )
        at_least = "" if self.is_largest_sure else ", at least"
        yield f"  largest budget that fits: {budget_text(self.largest)} tokens{at_least}"
        yield _row(list(_COLUMNS))
        best = max(one.tokens_per_second for one in self.speeds)
        for one in self.speeds:
            mark = "  <" if one.max_tokens == self.recommended.max_tokens else ""
            yield _row(_cells(one, best)) + mark
        for note in self.notes:
            yield f"Note: {note}"
        yield f"Next: {self.command}"

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page with a chart of speed and memory over budgets, and the lines for a person.

        Raises:
            TargetExistsError: ``path`` is there and is no web page.
            TargetWriteError: no room, no permission, or a read-only place.
        """
        from packer.report import write_calibration_html

        write_calibration_html(self.to_json(), list(self.lines()), path)


def budget_text(budget: int | Mapping[str, int]) -> str:
    """Return a budget for a person."""
    if isinstance(budget, int):
        return f"{budget:,}"
    return ", ".join(f"{metric} {limit:,}" for metric, limit in budget.items())


def _cells(one: Measured, best: float) -> list[str]:
    return [
        budget_text(one.max_tokens),
        f"{one.tokens_per_second:,.0f}",
        f"{one.tokens_per_second / best:.3f}",
        gigabytes(one.peak.allocated),
        f"{one.grad_accum}",
        f"{one.step_tokens:,.0f}",
        f"{one.padding:.1%}",
        "–" if one.design_effect is None else f"{one.design_effect:.2f}",
    ]


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True))
