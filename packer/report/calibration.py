"""A calibration as a page for a browser: speed and memory over budgets, in one file that needs no network."""

import html
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packer.report.html import publish_page

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 32
"""Margins around the plot: names of the axes lie in them."""
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1c2330}"
    "pre{background:#f4f6f9;padding:1rem;overflow-x:auto}svg{max-width:100%;height:auto}"
    "text{font:12px system-ui,sans-serif;fill:#5a6475}.head{font-weight:600;fill:#1c2330}"
    ".line{fill:none;stroke:#2463c7;stroke-width:2}.dot{fill:#2463c7}.chosen{fill:#d9480f}"
    ".failed{fill:none;stroke:#b3261e;stroke-width:2}.limit{stroke:#b3261e;stroke-dasharray:5 4}"
    ".near{fill:#2463c7;opacity:.12}.axis{stroke:#c6ccd6}"
)


def write_calibration_html(
    found: Mapping[str, Any], lines: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Write what a calibration found; an earlier page at ``path`` is replaced.

    Args:
        found: What ``Calibration.to_json`` gave.
        lines: The same for a person.
        path: The file.

    Raises:
        TargetExistsError: ``path`` is there and is no web page.
        TargetWriteError: no room, no permission, or a read-only place.
    """
    publish_page(calibration_page(found, lines), path)


def calibration_page(found: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return the page."""
    text = html.escape("\n".join(lines))
    charts = "\n".join([_speed(found), _memory(found)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Calibration</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Calibration on {html.escape(found['device'])}</h1>\n"
        f"{charts}\n<pre>{text}</pre>\n</body></html>\n"
    )


class _Plot(NamedTuple):
    """Scales of a chart: budgets by their logarithm, values from 0."""

    low: float
    high: float
    top: float

    def x(self, budget: float) -> float:
        """Return where a budget lies."""
        span = math.log(self.high / self.low) or 1.0
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(budget / self.low) / span

    def y(self, value: float) -> float:
        """Return where a value lies."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.top


def _speed(found: Mapping[str, Any]) -> str:
    """Draw tokens a second; the band is what counts as the best, the dot in it the recommended budget."""
    speeds = found["speeds"]
    budgets = [_leading(one["max_tokens"]) for one in speeds]
    values = [one["tokens_per_second"] for one in speeds]
    best, chosen = max(values), _leading(found["recommended"]["max_tokens"])
    plot = _Plot(min(budgets), max(budgets), 1.1 * best)
    width = _WIDTH - _LEFT - _RIGHT
    near, top = plot.y(0.98 * best), plot.y(best)
    marks = [f'<rect class="near" x="{_LEFT}" y="{top:.1f}" width="{width}" height="{near - top:.1f}"/>']
    marks.append(_line(plot, list(zip(budgets, values, strict=True))))
    for budget, value in zip(budgets, values, strict=True):
        kind = "dot chosen" if budget == chosen else "dot"
        marks.append(_dot(plot, budget, value, kind, f"{budget:,} tokens: {value:,.0f} tokens/s"))
    return _chart("tokens a second, of one rank", plot, marks, [(best, f"{best:,.0f}")], budgets)


def _memory(found: Mapping[str, Any]) -> str:
    """Draw the peak of every budget that was tried; those that did not fit lie on the limit, as rings."""
    trials = sorted(found["trials"], key=lambda one: one["budget"])
    budgets = [one["budget"] for one in trials]
    usable = found["usable"]
    plot = _Plot(min(budgets), max(budgets), 1.1 * usable)
    fitting = [(one["budget"], one["peak"]["allocated"]) for one in trials if one["fits"]]
    limit = plot.y(usable)
    marks = [f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{limit:.1f}" y2="{limit:.1f}"/>']
    marks.append(_line(plot, fitting))
    marks += [_dot(plot, *one, "dot", f"{one[0]:,} tokens: {one[1] / 1e9:.2f} GB") for one in fitting]
    for one in trials:
        if not one["fits"]:
            title = f"{one['budget']:,} tokens: out of memory"
            marks.append(_dot(plot, one["budget"], usable, "failed", title))
    return _chart("peak memory, GB", plot, marks, [(usable, f"{usable / 1e9:.3g}")], budgets)


def _chart(
    head: str,
    plot: _Plot,
    marks: Sequence[str],
    ticks: Sequence[tuple[float, str]],
    budgets: Sequence[int],
) -> str:
    base = plot.y(0)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{head}">',
        f'<text class="head" x="{_LEFT}" y="16">{head}</text>',
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>',
        *marks,
    ]
    for value, name in [(0.0, "0"), *ticks]:
        place = plot.y(value) + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{place:.1f}" text-anchor="end">{name}</text>')
    for budget in _spaced(plot, sorted(set(budgets))):
        place = plot.x(budget)
        parts.append(f'<text x="{place:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{budget:,}</text>')
    return "".join([*parts, "</svg>"])


def _spaced(plot: _Plot, budgets: Sequence[int]) -> Iterator[int]:
    """Yield the budgets whose names have room beside each other, the largest first."""
    last = math.inf
    for budget in reversed(budgets):
        if last - plot.x(budget) >= 64:
            last = plot.x(budget)
            yield budget


def _line(plot: _Plot, points: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{plot.x(budget):.1f},{plot.y(value):.1f}" for budget, value in points)
    return f'<polyline class="line" points="{path}"/>'


def _dot(plot: _Plot, budget: float, value: float, kind: str, title: str) -> str:
    place = f'cx="{plot.x(budget):.1f}" cy="{plot.y(value):.1f}"'
    return f'<circle class="{kind}" {place} r="5"><title>{html.escape(title)}</title></circle>'


def _leading(budget: Any) -> int:
    return int(next(iter(budget.values())) if isinstance(budget, Mapping) else budget)
