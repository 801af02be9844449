"""What the planner knows about a plan besides its rows: the part of ``plan.json`` that it hands over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """Everything in ``plan.json`` that the writer cannot count for itself. Values are plain JSON."""

    config: Mapping[str, Any]
    """The whole configuration: one entry an option, by its name with underscores."""
    num_samples: int
    """Samples of the source, planned or not."""
    num_tokens: int
    """Tokens of the source: the sum of its sequence lengths."""
    max_seqlen: int | None = None
    """A longer sample is too long: it is dropped, truncated, or split into pieces of so many tokens."""
    metrics_fingerprint: str | None = None
    """Of the metrics directory; None where lengths came as an array."""
    sources: Sequence[Mapping[str, Any]] | None = None
    """Identities of the source files, as in the metrics' manifest; None where there is none."""
    definition: Mapping[str, Any] | None = None
    """How the lengths were measured, as in the metrics' manifest; None where there is none."""
    lr_base: float | None = None
    """The size at which the learning-rate factor is 1, in the unit of ``lr_by``; None without scaling."""
    loss_tokens: str | None = None
    """Where the steps' loss tokens come from (``labels``, ``seqlen - 1``); None where they are unknown."""
