"""What a plan takes of each of its sources: samples, tokens, shares and passes."""

from dataclasses import dataclass
from typing import Any

from packer.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSummary:
    """One source of a plan, over all epochs; copies of micro-batches are not counted."""

    name: str | None
    """None where the plan has one data set without a name."""
    num_samples: int
    """Of the data set."""
    num_tokens: int
    passes: float
    """How often an epoch passes through what the plan may take of it."""
    planned_samples: int | None
    """None for plans of format version 1."""
    planned_tokens: int | None
    share: float | None
    """Of the planned tokens, or samples, whichever the mix counts."""
    asked: tuple[tuple[int, float], ...]
    """The share that was asked for, from each step on; empty where none was."""


def source_summaries(plan: Plan) -> tuple[SourceSummary, ...]:
    """Return what a plan takes of each source, from its header."""
    header = plan.header
    counts = [epoch["sources"] for epoch in header["epochs"]] if header["version"] >= 2 else []
    unit = "num_samples" if plan.config.get("mix_by") == "samples" else "num_tokens"
    whole = sum(source[unit] for epoch in counts for source in epoch)
    found = []
    for number, source in enumerate(plan.sources):
        planned = {
            name: sum(epoch[number][name] for epoch in counts) for name in ("num_samples", "num_tokens")
        }
        found.append(
            SourceSummary(
                name=source.name,
                num_samples=source.num_samples,
                num_tokens=source.num_tokens,
                passes=source.passes,
                planned_samples=planned["num_samples"] if counts else None,
                planned_tokens=planned["num_tokens"] if counts else None,
                share=planned[unit] / whole if whole else None,
                asked=tuple(
                    (int(phase["first_step"]), float(phase["shares"].get(source.name, 0.0)))
                    for phase in header.get("phases") or ()
                ),
            )
        )
    return tuple(found)


def as_json(source: SourceSummary) -> dict[str, Any]:
    """Return plain JSON."""
    return {
        "name": source.name,
        "num_samples": source.num_samples,
        "num_tokens": source.num_tokens,
        "passes": source.passes,
        "planned_samples": source.planned_samples,
        "planned_tokens": source.planned_tokens,
        "share": source.share,
        "asked": [{"first_step": first_step, "share": share} for first_step, share in source.asked],
    }
