"""How several sources are mixed: shares by phase, passes by source; checked where the options are born."""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from packer.errors import ConfigError

_MOST_PASSES = 10**6
_MOST_SOURCES = 2**12 - 1
_NEARLY = Fraction(1, 10**6)
"""How far a sum of shares may be from 1: shares are often quotients, written with a few digits."""


class Phase(NamedTuple):
    """A stretch of the plan with shares of its own."""

    start: float
    """Share of the plan's total that is over when it begins."""
    shares: dict[str, float]
    """Of the tokens, or samples, of the stretch, by source; in sum 1."""


def phases_of(mix: Any) -> tuple[Phase, ...] | None:
    """Return the phases of a mix: of one mapping of shares, or of several with their starts.

    Args:
        mix: ``{"web": 0.7, "code": 0.3}``; or a list of ``(start, shares)``, the first of which starts at 0.

    Raises:
        ConfigError: shares that do not sum to 1, or phases out of order.
    """
    if mix is None:
        return None
    given = [(0.0, mix)] if isinstance(mix, Mapping) else _listed(mix)
    phases: list[Phase] = []
    for start, shares in given:
        if not _is_number(start) or not 0 <= start < 1:
            raise ConfigError(
                f"--mix @{start} starts outside the plan; give a share of its total from 0 to 1"
            )
        if phases and start <= phases[-1].start:
            raise ConfigError(
                f"--mix @{start:g} does not start after the phase before it, @{phases[-1].start:g}; put the "
                "phases in order"
            )
        phases.append(Phase(float(start), _shares(shares)))
    if not phases or phases[0].start != 0:
        begin = f"the first one starts at {phases[0].start:g}" if phases else "there is none"
        raise ConfigError(f"--mix must say what the plan begins with, but {begin}; add --mix NAME=SHARE,...")
    return tuple(phases)


def passes_of(option: str, passes: Any) -> dict[str, float] | None:
    """Return how often each source is passed through.

    Raises:
        ConfigError: what is no number above 0.
    """
    if passes is None:
        return None
    if not isinstance(passes, Mapping) or not passes:
        raise ConfigError(f"{option} {passes} names no source; give NAME=PASSES")
    return {_name(option, name): _pass_count(option, f"{name}=", number) for name, number in passes.items()}


def most_passes_of(passes: Any) -> float | dict[str, float] | None:
    """Return how often a source may be passed through: a number for all, or one a source."""
    if passes is None or isinstance(passes, Mapping):
        return passes_of("--max-passes", passes)
    return _pass_count("--max-passes", "", passes)


def check_source_name(name: Any) -> str:
    """Return a name by which a source can be told apart on the command line.

    Raises:
        ConfigError: another name.
    """
    return _name("a source", name)


def _listed(mix: Any) -> list[tuple[Any, Any]]:
    """Return pairs of start and shares."""
    if isinstance(mix, str) or not isinstance(mix, Iterable):
        raise ConfigError(f"--mix {mix!r} names no source; give NAME=SHARE,NAME=SHARE")
    pairs = []
    for entry in mix:
        if isinstance(entry, Mapping) and set(entry) == {"start", "shares"}:
            pairs.append((entry["start"], entry["shares"]))
        elif isinstance(entry, tuple | list) and len(entry) == 2:
            pairs.append((entry[0], entry[1]))
        else:
            raise ConfigError(f"--mix has the phase {entry!r}; give each as (start, {{name: share}})")
    return pairs


def _shares(shares: Any) -> dict[str, float]:
    if not isinstance(shares, Mapping) or not shares:
        raise ConfigError(f"--mix {shares!r} names no source; give NAME=SHARE,NAME=SHARE")
    if len(shares) > _MOST_SOURCES:
        raise ConfigError(f"--mix names {len(shares):,} sources, over {_MOST_SOURCES:,}; join some of them")
    for name, share in shares.items():
        _name("--mix", name)
        if not _is_number(share) or not 0 <= share <= 1:
            raise ConfigError(f"--mix {name}={share} is not a share from 0 to 1; shares sum to 1")
    numbers = {name: float(share) for name, share in shares.items()}
    total = sum(map(Fraction, numbers.values()), Fraction(0))
    if abs(total - 1) > _NEARLY:
        cure = "give one of them a share"
        if total:
            parts = (f"{name}={float(Fraction(share) / total):.6g}" for name, share in numbers.items())
            cure = f"give {','.join(parts)}"
        raise ConfigError(f"the shares of --mix sum to {float(total):g}, not to 1; {cure}")
    return numbers


def _pass_count(option: str, name: str, number: Any) -> float:
    if not _is_number(number) or not 0 < number <= _MOST_PASSES:
        raise ConfigError(f"{option} {name}{number} is not a number of passes above 0, to {_MOST_PASSES:,}")
    return float(number)


def _name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not name or not name.isprintable() or set(name) & set(",=@ "):
        raise ConfigError(
            f"{where} has the name {name!r}; a source's name is printable, without ',', '=', '@' and spaces"
        )
    return name


def _is_number(value: object) -> bool:
    is_one = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_one and math.isfinite(value)  # type: ignore[arg-type]
