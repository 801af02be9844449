"""The sources of a plan: data sets whose samples are counted through, one after the other."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from json import dumps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError

T = TypeVar("T")

_NAMED_SAMPLES = re.compile(r"\bsamples? -?\d+(?:, \d+)*\b(?! to )")
"""How messages call samples: by their ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSource:
    """One data set of a plan. Values are plain JSON: an entry of ``sources`` in ``plan.json``."""

    name: str | None = None
    """As the user calls it; None where the plan has one source without a name."""
    first_id: int = 0
    """Its samples are ``first_id`` to ``first_id + num_samples − 1``."""
    num_samples: int
    """Samples of the data set, planned or not."""
    num_tokens: int
    """The sum of their lengths."""
    passes: float = 1.0
    """How often an epoch passes through what the plan may take of it, the last pass in part."""
    num_passes: int = 1
    """Passes begun: in each of them every sample is planned or dropped. 0: the epoch does not reach it."""
    fingerprint: str | None = None
    """Of the metrics directory; None where lengths came as an array."""
    definition: Mapping[str, Any] | None = None
    """How the lengths were measured, as in the metrics' manifest; None where there is none."""
    files: Sequence[Mapping[str, Any]] | None = None
    """Identities of its files, as in the metrics' manifest; None where there is none."""

    @property
    def stop_id(self) -> int:
        """The first sample id that is not its own."""
        return self.first_id + self.num_samples

    @property
    def label(self) -> str:
        """What reports and messages call it."""
        return "the data set" if self.name is None else self.name

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ``plan.json``: without the tokenizer's place, which other machines lack."""
        entry = asdict(self)
        if self.definition is not None:
            entry["definition"] = {key: value for key, value in self.definition.items() if key != "tokenizer"}
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "PlanSource":
        """Return the source that ``to_json`` wrote, also one with entries of a later packer."""
        return cls(**{option.name: entry[option.name] for option in fields(cls) if option.name in entry})


def sources_of(header: Mapping[str, Any]) -> tuple[PlanSource, ...]:
    """Return the sources of a plan, of any version: format 1 had one, without a name."""
    if header["version"] >= 2:
        return tuple(map(PlanSource.from_json, header["sources"]))
    only = PlanSource(
        num_samples=header["num_samples"],
        num_tokens=header["num_tokens"],
        fingerprint=header["metrics_fingerprint"],
        definition=header["definition"],
        files=header["sources"],
    )
    return (only,)


def joint_fingerprint(sources: Sequence[PlanSource]) -> str | None:
    """Return what ``plan.json`` calls ``metrics_fingerprint``: of one source its own, of several a hash.

    None where lengths of one of them came as an array.
    """
    fingerprints = [source.fingerprint for source in sources]
    if len(sources) == 1 or None in fingerprints:
        return fingerprints[0] if len(sources) == 1 else None
    named = [[source.name, source.fingerprint] for source in sources]
    return sha256(dumps(named, separators=(",", ":")).encode()).hexdigest()


def source_of(sample_ids: NDArray[np.integer], sources: Sequence[PlanSource]) -> NDArray[np.int64]:
    """Return which of the sources each sample is of: (n,) sample ids to (n,) indices."""
    stops = np.array([source.stop_id for source in sources], np.int64)
    return np.searchsorted(stops, sample_ids, side="right").astype(np.int64, copy=False)


def with_rows(message: str, sources: Sequence[PlanSource]) -> str:
    """Return a message with, behind the id of each sample, the source that it is of and its row there.

    Of a plan with one source without a name the id is the row: the message stays as it is.
    """
    if len(sources) == 1 and sources[0].name is None:
        return message

    def with_row(number: re.Match[str]) -> str:
        sample = int(number[0])
        for source in sources:
            if source.first_id <= sample < source.stop_id:
                return f"{sample} (row {sample - source.first_id} of {source.label})"
        return number[0]

    return _NAMED_SAMPLES.sub(lambda named: re.sub(r"-?\d+", with_row, named[0]), message)


def by_source(sources: Sequence[PlanSource], given: T | Mapping[str, T], what: str, spelt: str) -> list[T]:
    """Return what was given for each source of a plan, in their order.

    Args:
        sources: of the plan.
        given: for the only source, or a mapping by name.
        what: how messages call it.
        spelt: how one is given, with ``{name}`` in it.

    Raises:
        ConfigError: sources are missing, or named otherwise.
    """
    names = [source.name for source in sources]
    if not isinstance(given, Mapping):
        if len(names) == 1:
            return [given]
        raise ConfigError(
            f"the plan is of {len(names)} sources: give {what} for each: "
            + " ".join(spelt.format(name=name) for name in names)
        )
    for name in given:
        if name not in names:
            have = ", ".join(str(name) for name in names) if names[0] is not None else "one without a name"
            raise ConfigError(f"{what} are given for {name!r}, the plan's sources are {have}; name these")
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(
            f"no {what} are given for {missing[0]!r}, a source of the plan; "
            f"add {spelt.format(name=missing[0])}"
        )
    return [given[str(name)] for name in names]
