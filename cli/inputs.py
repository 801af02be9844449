"""Values of options that are more than a number: a budget a metric, a file of ids, a curriculum."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from packer.errors import SourceError
from packer.plan import Plan


def only_one(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the value of a repeatable option that may be given once: click keeps the last one in silence."""
    if len(values) > 1:
        given = " and ".join(map(repr, values))
        raise click.UsageError(
            f"{param.opts[0]} takes one value, and was given {given}; leave all but one out"
        )
    return values[0] if values else None


def parse_max_tokens(ctx: click.Context, param: click.Parameter, value: str) -> int | dict[str, int]:
    """Return the budget of ``N``, or the budgets of ``METRIC=N,METRIC=N``."""
    if "=" not in value:
        return _whole_number(value)
    budgets: dict[str, int] = {}
    for part in value.split(","):
        metric, _, number = part.partition("=")
        if not metric or metric in budgets:
            raise click.BadParameter(f"{value!r} is not METRIC=N,METRIC=N with each metric once", ctx, param)
        budgets[metric] = _whole_number(number)
    return budgets


def read_sample_ids(
    ctx: click.Context, param: click.Parameter, path: Path | None
) -> NDArray[np.integer] | None:
    """Return the ids in a text file with one a line, or in a ``.npy`` array."""
    if path is None:
        return None
    try:
        if path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        else:
            ids = np.array(path.read_text(encoding="utf-8").split(), dtype=np.int64)
    except OSError as error:
        raise SourceError(f"cannot read --sample-ids {path}: {error.strerror}") from error
    except (ValueError, OverflowError, EOFError) as error:
        raise SourceError(
            f"--sample-ids {path} must hold one whole number a line, or be a .npy array of them: {error}"
        ) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SourceError(f"--sample-ids {path} holds {ids.ndim}-dimensional {ids.dtype}, not a list of ids")
    return ids  # type: ignore[no-any-return]


def read_curriculum(ctx: click.Context, param: click.Parameter, path: Path | None) -> dict[str, Any] | None:
    """Return the object in a JSON file with the keys of DeepSpeed's curriculum."""
    if path is None:
        return None
    try:
        curriculum = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"cannot read --curriculum {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"--curriculum {path} is not JSON: {error}") from error
    if not isinstance(curriculum, dict):
        raise SourceError(f"--curriculum {path} must hold a JSON object with DeepSpeed's curriculum keys")
    return curriculum


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a whole number") from None


def by_source(values: tuple[str, ...], plan: Plan) -> dict[str, list[str]] | list[str]:
    """Return the values of a repeatable ``[NAME=]VALUE`` option: by name, where the plan's sources have some.

    Of a plan of one data set without a name they are taken as they are, also with an ``=`` in them.
    """
    if plan.sources[0].name is None or not all("=" in value for value in values):
        return list(values)
    named: dict[str, list[str]] = {}
    for value in values:
        name, _, rest = value.partition("=")
        named.setdefault(name, []).append(rest)
    return named
