"""``packer inspect --html``: a page for a browser in one file that needs no network."""

import html
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from packer.errors import TargetExistsError, TargetWriteError
from packer.plan import Plan
from packer.report.summary import PlanSummary, summarize
from packer.report.survey import Progress, Survey, step_rows, survey
from packer.report.text import facts, shape_rows

SHOWN_MICROBATCHES = 64
"""Of a step with more, the first are drawn."""
SHOWN_SAMPLES = 1024
"""Of a micro-batch with more, about as many are drawn."""
SHOWN_SHAPES = 40
"""Of a plan with more, the most frequent are listed."""


def write_html(plan: Plan, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Write the report of a plan; ``path`` is replaced when the page is complete.

    Args:
        plan: what to report on; all its micro-batches are read once.
        path: the file.
        progress: told how many micro-batches are read.

    Raises:
        TargetExistsError: ``path`` is there and is no web page.
        TargetWriteError: no room, no permission, or a read-only place.
    """
    path = Path(path)
    _refuse_other_files(path)
    publish_page(html_page(plan, progress=progress), path)


def publish_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page; ``path``, if it is an earlier one, is replaced when all is written.

    Raises:
        TargetExistsError: ``path`` is there and is no web page.
        TargetWriteError: no room, no permission, or a read-only place.
    """
    path = Path(path)
    _refuse_other_files(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TargetWriteError(f"cannot write {path}: {error.strerror}; choose another --html") from error


def _refuse_other_files(path: Path) -> None:
    """Let an earlier report be replaced, and nothing else: least of all a file of the plan."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except FileNotFoundError:
        if not path.absolute().parent.is_dir():
            raise TargetWriteError(
                f"cannot write {path}: there is no folder {path.parent}; make it or choose another --html"
            ) from None
        return
    except OSError as error:
        raise TargetWriteError(f"cannot write {path}: {error.strerror}; choose another --html") from error
    if start and not start.lstrip().lower().startswith(b"<!doctype html"):
        raise TargetExistsError(f"{path} exists and is no report; choose another --html")


def html_page(plan: Plan, *, progress: Progress | None = None) -> str:
    """Return the report of a plan as one HTML page."""
    data = _data(plan, summarize(plan), survey(plan, progress=progress))
    here = files("packer.report")
    page = (here / "page.html").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    # "<" inside the JSON could end its element.
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"title": html.escape(data["title"]), "data": content, "script": script}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], page)


def _data(plan: Plan, summary: PlanSummary, found: Survey) -> dict[str, Any]:
    """Return what the page's script draws."""
    epochs = f"{summary.num_epochs} epochs, " if summary.num_epochs > 1 else ""
    return {
        "title": f"Plan {plan.path.name}" if plan.path is not None else "Plan",
        "subtitle": f"{epochs}layout {summary.layout}, {summary.packing} packing, order {summary.order}",
        "content_hash": plan.fingerprint,
        "summary": summary.as_json() | {"shapes": None},
        "shapes": list(shape_rows(summary, SHOWN_SHAPES)),
        "facts": list(facts(summary)),
        "config": [[name, _plain(value)] for name, value in plan.config.items() if value is not None],
        "limits": _limits(plan),
        "survey": found.as_json(),
        "steps": _steps(plan, found),
    }


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _limits(plan: Plan) -> list[tuple[str, int]]:
    """Return the lengths that the histogram marks."""
    budget, longest = plan.config["max_tokens"], plan.config.get("max_seqlen")
    limits = [] if isinstance(budget, dict) else [("max_tokens", budget)]
    return limits if longest is None else [*limits, ("max_seqlen", longest)]


def _steps(plan: Plan, found: Survey) -> list[dict[str, Any]]:
    """Return the steps that are drawn, each once."""
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    for name, (epoch, step) in found.example_steps.items():
        if (epoch, step) not in steps:
            steps[epoch, step] = _step(plan, name, epoch, step)
    return list(steps.values())


def _step(plan: Plan, name: str, epoch: int, step: int) -> dict[str, Any]:
    row = plan.epoch(epoch).step(step)
    rows = list(step_rows(plan, epoch, step))
    padded = sum(microbatch["padded_tokens"] for microbatch in rows)
    return {
        "name": name,
        "epoch": epoch,
        "step": step,
        "num_samples": row.num_samples,
        "num_tokens": row.num_tokens,
        "lr_scale": row.lr_scale,
        "padding": padded / row.num_tokens - 1 if row.num_tokens else 0.0,
        "microbatches": [_microbatch(plan, microbatch) for microbatch in rows[:SHOWN_MICROBATCHES]],
    }


def _microbatch(plan: Plan, row: dict[str, Any]) -> dict[str, Any]:
    """Return what a micro-batch's picture needs; of very many samples only some are drawn."""
    seqlens: list[int] = row["seqlens"]
    names = ("accum", "dp_rank", "num_tokens", "padded_seqlen", "padded_tokens", "is_filler", "is_repeat")
    if plan.layout == "padded":
        shown = sorted(seqlens, reverse=True)[:: -(-len(seqlens) // SHOWN_SAMPLES)]
    else:
        shown = seqlens[:SHOWN_SAMPLES]
    return {name: row[name] for name in names} | {
        "num_samples": len(seqlens),
        "seqlens": shown,
        "rest": sum(seqlens) - sum(shown),  # of a packed row: one block at its end
    }
