"""Values of options that are more than a word: amounts, a budget a metric, shares, ids, a curriculum."""

import json
import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from packer.errors import SourceError
from packer.metrics import Metrics, open_metrics
from packer.plan import Plan

_SCALES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NAMED = re.compile(r"(?P<name>[^\s=,@/]+)=(?P<path>.+)", re.DOTALL)


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A whole number, plain or as ``20B``, ``1.5M``, ``2e9``: K, M, B and T are decimal."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, int):
            return value
        try:
            return whole_number(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


AMOUNT = Amount()


def whole_number(text: str) -> int:
    """Return the whole number that ``text`` spells.

    Raises:
        ValueError: it spells none.
    """
    digits = text.strip()
    scale = _SCALES.get(digits[-1:].upper(), 1)
    try:
        number = Decimal(digits[:-1] if scale > 1 else digits)
        if not number.is_finite() or abs(number.adjusted()) > 30:
            raise InvalidOperation
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a whole number, such as 20000, 1.5M, 20B or 2e9") from None
    scaled = number * scale
    if scaled != int(scaled):
        raise ValueError(f"{text!r} is not a whole number")
    return int(scaled)


def parse_metrics(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> Path | dict[str, Path]:
    """Return the one metrics directory, or several by the names of their sources."""
    matches = [_NAMED.fullmatch(value) for value in values]
    if len(values) == 1 and (matches[0] is None or Path(values[0]).exists()):
        return Path(values[0])
    named: dict[str, Path] = {}
    for value, match in zip(values, matches, strict=True):
        if match is None:
            raise click.BadParameter(
                f"{value!r} has no name, and there are {len(values)} of them; give each as NAME=METRICS",
                ctx,
                param,
            )
        if match["name"] in named:
            raise click.BadParameter(
                f"two sources have the name {match['name']!r}; give each a name of its own", ctx, param
            )
        named[match["name"]] = Path(match["path"])
    return named


def parse_mix(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> list[tuple[float, dict[str, float]]] | None:
    """Return the phases of ``NAME=SHARE,NAME=SHARE``, and of ``@START:NAME=SHARE,...`` for those after it."""
    phases = []
    for value in values:
        start, shares = 0.0, value
        if value.startswith("@"):
            begin, colon, shares = value[1:].partition(":")
            if not colon:
                raise click.BadParameter(f"{value!r} is not @START:NAME=SHARE,NAME=SHARE", ctx, param)
            start = _real_number(begin, ctx, param)
        phases.append((start, _numbers_by_name(shares, ctx, param)))
    return phases or None


def parse_passes(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> float | dict[str, float] | None:
    """Return the number of ``N``, or those of ``NAME=N,NAME=N``."""
    if value is None:
        return None
    return _numbers_by_name(value, ctx, param) if "=" in value else _real_number(value, ctx, param)


def _numbers_by_name(text: str, ctx: click.Context, param: click.Parameter) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{part!r} of {text!r} is not NAME=NUMBER", ctx, param)
        if name in numbers:
            raise click.BadParameter(f"{text!r} names {name!r} twice; leave one out", ctx, param)
        numbers[name] = _real_number(number, ctx, param)
    return numbers


def _real_number(text: str, ctx: click.Context, param: click.Parameter) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number", ctx, param) from None


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
        return AMOUNT.convert(value, param, ctx)
    budgets: dict[str, int] = {}
    for part in value.split(","):
        metric, _, number = part.partition("=")
        if not metric or metric in budgets:
            raise click.BadParameter(f"{value!r} is not METRIC=N,METRIC=N with each metric once", ctx, param)
        budgets[metric] = AMOUNT.convert(number, param, ctx)
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


def metrics_by_source(values: tuple[str, ...], plan: Plan) -> Metrics | dict[str, Metrics] | None:
    """Return the metrics of a repeatable ``--metrics [NAME=]METRICS``, their files checked."""
    given = by_source(values, plan)
    if not given:
        return None
    if isinstance(given, dict):
        return {name: _only(name, directories) for name, directories in given.items()}
    return _only(None, given)


def _only(name: str | None, directories: list[str]) -> Metrics:
    if len(directories) > 1:
        of = "of a plan of one data set" if name is None else f"of source {name}"
        raise click.UsageError(
            f"--metrics {of} is one directory, and {' and '.join(directories)} were given; leave all but one "
            "out"
        )
    metrics = open_metrics(directories[0])
    metrics.check_files()
    return metrics
