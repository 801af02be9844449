"""A look at an installation: what is there, and whether kernels and files do what they do everywhere else."""

import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer._version import __version__
from packer.analyzer import analyze
from packer.machine import num_cores
from packer.metrics import open_metrics
from packer.options import PlanConfig
from packer.plan import Plan, load_plan, verify_plan
from packer.planner import make_plan
from packer.wording import counted

DISTRIBUTION = "microbatch-packer"
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[.*?\])?\s*\(?(?P<bound>[^;)]*)\)?(?:.*extra\s*==\s*['\"](?P<extra>[\w-]+))?"
)
_EXTRAS_OF_DEVELOPERS = ("dev", "docs", "frameworks", "release")

SEQLENS = np.arange(1, 2001, dtype=np.int64) ** 2 % 509 + 1
"""Lengths that any machine computes alike."""
PLANS = {
    "windowed": PlanConfig(max_tokens=2048, dp_size=2, balance="flops", lr_scaling="sqrt"),
    "mixed": PlanConfig(max_tokens=2048, layout="packed", grad_accum=2),
    "best-fit": PlanConfig(max_tokens=2048, layout="packed", packing="best-fit"),
    "next-fit": PlanConfig(max_tokens=2048, order="sequential"),
}
HASHES = {
    "windowed": "1c487163bec13f67e540a08606951b561607a15e7d244434247e6ee5a24ae9c2",
    "mixed": "c0d305ab03c022555172e64342f97fc441598200c23edd9604fa2b264f59965f",
    "best-fit": "6a2b2d82fb4e60e0e78d4205e170694a884286300a32068d37d875eccd403b7e",
    "next-fit": "75f09f08fdb966789720c78c0dce40f469865da12d5035253f41df317f6d0c36",
}
"""The content hash of each plan of these lengths, on any machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that packer uses."""

    name: str
    wanted: dict[str, tuple[str, ...]]
    """Bounds on the version that packer works with, each with the extras that ask for it; none for what every
    installation has."""
    version: str | None
    """None where it is not installed."""
    is_right: bool
    """Whether it is new enough for one of them, or not there and not needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One part of the self-test."""

    name: str
    seconds: float
    problem: str | None
    """What went wrong; None where nothing did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All that there is to say of an installation."""

    packer: str
    """Its version."""
    python: str
    platform: str
    cores: int
    cache_folder: str
    """Where compiled kernels are kept."""
    cache_is_kept: bool
    """Whether they can be: else each process compiles them anew."""
    packages: tuple[Package, ...]
    checks: tuple[Check, ...]

    @property
    def is_well(self) -> bool:
        """Whether every package is right and every check passed."""
        return all(package.is_right for package in self.packages) and not any(
            check.problem for check in self.checks
        )

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON."""
        return asdict(self) | {"is_well": self.is_well}


def diagnose() -> Diagnosis:
    """Look at the versions, the machine and the cache, and run the self-test: some seconds."""
    folder, is_kept = _cache()
    return Diagnosis(
        packer=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=num_cores(),
        cache_folder=folder,
        cache_is_kept=is_kept,
        packages=tuple(_packages()),
        checks=(_check("kernels", _check_kernels), _check("files", _check_files)),
    )


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines for a person, and for a bug report."""
    machine = f"{diagnosis.platform}, {counted(diagnosis.cores, 'core')}"
    yield f"packer {diagnosis.packer}, Python {diagnosis.python}, {machine}"
    kept = "" if diagnosis.cache_is_kept else " (not writable: kernels are compiled anew in every process)"
    yield f"  compiled kernels    {diagnosis.cache_folder}{kept}"
    for package in diagnosis.packages:
        wants = "; ".join(
            f"{bound} for {', '.join(extras)}" if extras else bound
            for bound, extras in package.wanted.items()
        )
        mark = "" if package.is_right else "  <- too old, or missing: install it anew"
        yield f"  {package.name:<20}{package.version or 'not installed':<16}({wants}){mark}"
    for check in diagnosis.checks:
        result = f"in order, {check.seconds:.1f} s" if check.problem is None else f"WRONG: {check.problem}"
        yield f"  {check.name + ' checked':<20}{result}"


def _packages() -> Iterator[Package]:
    """Yield the packages that the installed distribution names, those of extras after the others."""
    bounds: dict[str, dict[str, list[str]]] = {}
    for requirement in metadata.requires(DISTRIBUTION) or []:
        found = _REQUIREMENT.match(requirement)
        if found is None or found["extra"] in _EXTRAS_OF_DEVELOPERS:
            continue
        extras = bounds.setdefault(found["name"], {}).setdefault(found["bound"].strip(), [])
        if found["extra"] is not None:
            extras.append(found["extra"])
    for name, wanted in sorted(bounds.items(), key=lambda entry: (any(entry[1].values()), entry[0])):
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        yield Package(
            name=name,
            wanted={bound: tuple(extras) for bound, extras in wanted.items()},
            version=version,
            is_right=all(wanted.values())
            if version is None
            else any(_meets(version, bound) for bound in wanted),
        )


def _meets(version: str, bound: str) -> bool:
    """Say whether a version is at or over the lower bound among comma-separated ones; there are no others."""
    least = re.search(r">=\s*([\d.]+)", bound)
    return least is None or _numbers(version) >= _numbers(least[1])


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]*\d", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def _cache() -> tuple[str, bool]:
    """Return where numba keeps compiled kernels, and whether anything can be written there."""
    import packer.kernels

    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(chosen) if chosen else Path(packer.kernels.__file__).parent / "__pycache__"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(nearest, os.W_OK):
        return str(folder), True
    users = Path.home() / ".cache" / "numba"
    nearest = next(path for path in (users, *users.parents) if path.exists())
    return str(users), os.access(nearest, os.W_OK)


def _check(name: str, run: Callable[[], str | None]) -> Check:
    start = time.perf_counter()
    try:
        problem = run()
    except Exception as error:  # whatever an installation may do
        problem = f"{type(error).__name__}: {error}"
    return Check(name=name, seconds=time.perf_counter() - start, problem=problem)


def _check_kernels() -> str | None:
    """Plan with every kind of packing; return which plan is another than everywhere else."""
    for name, config in PLANS.items():
        plan = make_plan(SEQLENS, config)
        verify_plan(plan)
        if plan.fingerprint != HASHES[name]:
            return f"the plan of {name} is {plan.fingerprint[:12]}…, elsewhere {HASHES[name][:12]}…"
    return None


def _check_files() -> str | None:
    """Measure a Parquet file, plan, read the plan back from disk; return what is not as it should be."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        offsets = np.concatenate([[0], np.cumsum(SEQLENS)]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int32)))
        pq.write_table(pa.table({"input_ids": tokens}), folder / "data.parquet")
        analyze(folder / "data.parquet", out=folder / "metrics", tokens_column="input_ids")
        if not np.array_equal(open_metrics(folder / "metrics").metric("seqlen"), SEQLENS):
            return "the lengths of a Parquet file are not those that were written"
        made: Plan = make_plan(folder / "metrics", PLANS["windowed"], out=folder / "plan")
        verify_plan(load_plan(folder / "plan"), metrics=open_metrics(folder / "metrics"))
        return None if made.fingerprint == HASHES["windowed"] else "a plan on disk is another than in memory"
