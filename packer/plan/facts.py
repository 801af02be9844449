"""What the planner knows about a plan besides its rows: the part of ``plan.json`` that it hands over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packer.plan.epoch import DROP_REASONS
from packer.plan.sources import PlanSource, joint_fingerprint
from packer.plan.trained import Account

_PASSES = ("mix", "repeat", "total_tokens", "total_steps")
"""Options with which an epoch may not reach all of a source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """Everything in ``plan.json`` that the writer cannot count for itself. Values are plain JSON."""

    config: Mapping[str, Any]
    """The whole configuration: one entry an option, by its name with underscores."""
    sources: Sequence[PlanSource]
    """The data sets, in order; ids count through them."""
    max_seqlen: int | None = None
    """A longer sample is too long: it is dropped, truncated, or split into pieces of so many tokens."""
    phases: Sequence[Mapping[str, Any]] | None = None
    """Stretches of the plan with shares of their own, in order: ``first_step``, and ``shares`` by source."""
    trained: Sequence[Account] = ()
    """What was trained before the plan begins, by plans that it goes on from: ``samples_before`` and
    ``tokens_before`` of its steps count it."""
    lr_base: float | None = None
    """The size at which the learning-rate factor is 1, in the unit of ``lr_by``; None without scaling."""
    loss_tokens: str | None = None
    """Where the steps' loss tokens come from (``labels``, ``seqlen - 1``); None where they are unknown."""

    @property
    def num_samples(self) -> int:
        """Samples of all sources, planned or not."""
        return sum(source.num_samples for source in self.sources)

    @property
    def drop_reasons(self) -> tuple[str, ...]:
        """The reasons that ``dropped.arrow`` knows: those of what is not asked for are left out at the end.

        So a plan's hash does not change with what later packers can do.
        """
        first_unasked = DROP_REASONS.index("trained")
        if any(self.config.get(name) is not None for name in _PASSES):
            return DROP_REASONS
        return DROP_REASONS[: first_unasked + bool(self.trained)]

    def to_json(self) -> dict[str, Any]:
        """Return the facts as ``plan.json`` has them."""
        return {
            "config": dict(self.config),
            "num_samples": self.num_samples,
            "num_tokens": sum(source.num_tokens for source in self.sources),
            "max_seqlen": self.max_seqlen,
            "metrics_fingerprint": joint_fingerprint(self.sources),
            "sources": [source.to_json() for source in self.sources],
            "phases": self.phases,
            "trained": [account.to_json() for account in self.trained],
            "lr_base": self.lr_base,
            "loss_tokens": self.loss_tokens,
        }
