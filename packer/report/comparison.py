"""Two plans side by side: what differs in their configuration, and what it does."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from packer.plan import Plan
from packer.report.summary import PlanSummary, ratio, summarize
from packer.report.text import amount, percent
from packer.wording import counted, on_one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """One figure of both plans."""

    name: str
    left: float | None
    """None where the plan has no such figure."""
    right: float | None
    form: Callable[[float], str]

    @property
    def change(self) -> float | None:
        """Right over left, less one; None where that says nothing."""
        if self.left is None or self.right is None or not self.left:
            return None
        return self.right / self.left - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two plans have in common, and what not."""

    same_content: bool
    """Every rank sees the same samples in the same order."""
    same_data: bool | None
    """They are of the same metrics; None where one of them does not say."""
    options: dict[str, tuple[Any, Any]]
    """Options that differ."""
    effects: list[Effect]

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "same_content": self.same_content,
            "same_data": self.same_data,
            "options": {name: list(values) for name, values in self.options.items()},
            "effects": {
                effect.name: {"left": effect.left, "right": effect.right, "change": effect.change}
                for effect in self.effects
            },
        }


def compare(left: Plan, right: Plan) -> Comparison:
    """Compare two plans by their headers and steps."""
    one, other = left.config, right.config
    names = [*one, *(name for name in other if name not in one)]
    fingerprints = [plan.header["metrics_fingerprint"] for plan in (left, right)]
    return Comparison(
        same_content=left.fingerprint == right.fingerprint,
        same_data=None if None in fingerprints else fingerprints[0] == fingerprints[1],
        options={
            name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)
        },
        effects=list(_effects(summarize(left), summarize(right))),
    )


def _effects(left: PlanSummary, right: PlanSummary) -> Iterator[Effect]:
    def effect(name: str, of: Callable[[PlanSummary], float | None], form: Callable[[float], str]) -> Effect:
        return Effect(name=name, left=of(left), right=of(right), form=form)

    yield effect("steps", lambda s: s.num_steps, _whole)
    yield effect("micro-batches", lambda s: s.num_microbatches, _whole)
    yield effect("samples planned", lambda s: s.planned_samples, _whole)
    yield effect("tokens planned", lambda s: s.planned_tokens, amount)
    for name in dict.fromkeys(each.name for side in (left, right) for each in side.sources):
        if name is not None:
            named = on_one_line(name)
            yield effect(f"share of {named}", partial(_of_source, name=name, figure="share"), percent)
            yield effect(f"passes of {named}", partial(_of_source, name=name, figure="passes"), _factor)
    for reason in sorted({*left.dropped, *right.dropped}):
        yield effect(f"dropped {reason}", partial(_dropped, reason=reason), _whole)
    yield effect("padding", lambda s: s.padding, percent)
    yield effect("tokens of all tensors", lambda s: s.padded_tokens, amount)
    yield effect("largest micro-batch", lambda s: s.largest_microbatch, _whole)
    yield effect("tokens per step, median", lambda s: s.tokens_per_step and s.tokens_per_step.median, _whole)
    yield effect(
        "samples per step, median", lambda s: s.samples_per_step and s.samples_per_step.median, _whole
    )
    yield effect("design effect", lambda s: s.design_effect["seqlen"], ratio)
    yield effect("design effect of sources", lambda s: s.design_effect["source"], ratio)
    yield effect("LR factor, smallest", lambda s: s.lr_scale and s.lr_scale.min, _factor)
    yield effect("LR factor, largest", lambda s: s.lr_scale and s.lr_scale.max, _factor)
    yield effect("shapes", lambda s: None if s.shapes is None else len(s.shapes), _whole)
    yield effect("packs over the bound", lambda s: s.over_bound, _whole)
    yield effect("rank imbalance", lambda s: s.rank_imbalance, percent)
    yield effect("rank imbalance by step", lambda s: s.rank_imbalance_by_step, percent)


def side_by_side(left: Plan, right: Plan, names: tuple[str, str]) -> RenderableType:
    """Return a comparison for a person; ``names`` head the columns."""
    found = compare(left, right)
    parts: list[RenderableType] = [Text(_verdict(found), style="bold")]
    if found.same_data is False:
        parts.append(Text("Note: they are plans of different data", style="yellow"))
    if found.options:
        options = _table("option", names)
        for name, values in found.options.items():
            options.add_row(name, *(_plain(value) for value in values))
        parts.append(options)
    effects = _table("effect", names)
    effects.add_column("change", justify="right")
    for effect in found.effects:
        if effect.left is None and effect.right is None:
            continue
        shown = ["–" if value is None else effect.form(value) for value in (effect.left, effect.right)]
        style = "dim" if effect.left == effect.right else ""
        effects.add_row(effect.name, *shown, _change(effect), style=style)
    return Group(*parts, effects)


def _verdict(found: Comparison) -> str:
    if found.same_content:
        return "the same plan: every rank sees the same samples in the same order"
    if not found.options:
        return "the same configuration, but other contents: other data, or another version of packer"
    return f"{counted(len(found.options), 'option')} differ{'s' if len(found.options) == 1 else ''}"


def _table(first: str, names: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title_justify="left")
    table.add_column(first, style="bold")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _change(effect: Effect) -> str:
    if effect.change is None or effect.left == effect.right:
        return ""
    return f"{effect.change:+.1%}" if abs(effect.change) < 10 else f"{effect.change + 1:,.0f}×"


def _of_source(summary: PlanSummary, name: str, figure: str) -> float | None:
    """Return a figure of one source; None where the plan has no such source."""
    return next((getattr(each, figure) for each in summary.sources if each.name == name), None)


def _dropped(summary: PlanSummary, reason: str) -> int:
    return summary.dropped.get(reason, {"num_samples": 0})["num_samples"]


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict) and value.keys() == {"count", "sha256"}:
        return f"{value['count']:,} ({value['sha256'][:8]})"
    return value if isinstance(value, str) else json.dumps(value)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _factor(value: float) -> str:
    return f"{value:.3g}"
