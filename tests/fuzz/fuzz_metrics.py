"""Read damaged metrics directories: each gives the values that are in it, or a PackerError.

    python -m tests.fuzz.fuzz_metrics --inputs 10000

``damaged`` files of our own directories, as a disk leaves them, must be noticed by ``packer plan`` or be
harmless; DeepSpeed's directories have no hashes, so their values must be what NumPy reads; a ``forged``
manifest, with its hash set to match, may say something else, but nothing may crash, or be read elsewhere.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import packer
from packer.analyzer import verify_source
from packer.errors import PackerError
from packer.metrics import Metrics
from packer.metrics.manifest import MANIFEST_HASH, fingerprint_of, manifest_hash
from packer.mmididx import DEEPSPEED_DTYPES
from packer.planner import PlanConfig, make_plan
from tests.fuzz.children import WrongOutcomeError, main
from tests.fuzz.formats import ROWS
from tests.fuzz.fuzz_sources import naming
from tests.fuzz.mutations import mutate, mutate_json, mutate_json_text

CONFIG = PlanConfig(max_tokens=64, seed=1)
LENGTHS = [len(ids or []) for ids in ROWS["ids"]]


@dataclass
class OwnFile:
    """One file of a directory that packer wrote."""

    pattern: str
    contents: Any = None

    def prepare(self, place: Path) -> None:
        table = pa.table({name: ROWS[name] for name in ("ids", "labels")})
        pq.write_table(table, place / "data.parquet")
        packer.analyze(
            place / "data.parquet",
            out=place / "good",
            tokens_column="ids",
            labels_column="labels",
            curriculum_files=True,
        )
        self.contents = _contents(place / "good")

    def attempt(self, random: Random, place: Path) -> str:
        bad = _copy(place)
        path = random.choice(sorted(bad.rglob(self.pattern)))
        as_text = path.suffix == ".json" and random.random() < 0.7
        path.write_bytes((mutate_json_text if as_text else mutate)(path.read_bytes(), random))
        with naming(bad):
            if _contents(bad) != self.contents:
                raise WrongOutcomeError("what was damaged was read")
        return "read"


class ForgedManifest(OwnFile):
    """A manifest that was changed, hashes and all."""

    def attempt(self, random: Random, place: Path) -> str:
        bad = _copy(place)
        path = bad / "manifest.json"
        content = mutate_json(json.loads(path.read_bytes()), random)
        if isinstance(content, dict):
            with suppress(AttributeError, TypeError, KeyError):
                content["fingerprint"] = fingerprint_of(
                    {name: digest["sha256"] for name, digest in content["files"].items()}
                )
            with suppress(ValueError):  # NaN is no JSON, and has no hash
                content[MANIFEST_HASH] = manifest_hash(content)
        path.write_text(json.dumps(content))
        with opening_only(place, bad):
            with naming(bad):
                metrics = packer.open_metrics(bad)
            refused = 0
            for use in (_plan, _read_samples, _fingerprint, _read_all):
                try:
                    use(metrics, place)
                except PackerError:
                    refused += 1
        return f"{refused} uses refused"


@dataclass
class ForeignFile:
    """One file of a directory that DeepSpeed's analyzer wrote."""

    suffix: str
    values: list[int] = field(default_factory=lambda: [length % 100 for length in LENGTHS])

    def prepare(self, place: Path) -> None:
        for code, dtype in DEEPSPEED_DTYPES.items():
            prefix = _prefix(place / f"good-{code}")
            prefix.parent.mkdir(parents=True)
            count = len(self.values)
            head = b"MMIDIDX\0\0" + np.array(1, "<u8").tobytes() + bytes([code])
            head += np.array([count, 3], "<u8").tobytes()
            pointers = np.arange(count, dtype="<i8") * dtype.itemsize
            documents = np.array([0, count, count], "<i8")
            body = np.ones(count, "<i4").tobytes() + pointers.tobytes() + documents.tobytes()
            prefix.with_name(f"{prefix.name}.idx").write_bytes(head + body)
            np.array(self.values, dtype).tofile(prefix.with_name(f"{prefix.name}.bin"))

    def attempt(self, random: Random, place: Path) -> str:
        bad = _copy(place, f"good-{random.choice(sorted(DEEPSPEED_DTYPES))}")
        path = _prefix(bad).with_name(f"{_prefix(bad).name}.{self.suffix}")
        path.write_bytes(mutate(path.read_bytes(), random))
        with naming(bad):
            metrics = packer.open_metrics(bad)
            values = metrics.metric("seqlen").tolist()
        data = _prefix(bad).with_name(f"{_prefix(bad).name}.bin").read_bytes()
        readings = [
            np.frombuffer(data, dtype).tolist()
            for dtype in DEEPSPEED_DTYPES.values()
            if len(data) == dtype.itemsize * len(values)
        ]
        if values not in readings or len(values) != metrics.num_samples:
            raise WrongOutcomeError(f"values {values}, where the file holds {readings}")
        # A plan of damaged lengths may be of any size, so none is made of lengths that nobody would measure.
        if all(0 <= value < 1000 for value in values):
            make_plan(bad, PlanConfig(max_tokens=1000))
        else:
            with suppress(PackerError):
                make_plan(bad, PlanConfig(max_tokens=1000, too_long="drop"))
        return "read"


def _prefix(folder: Path) -> Path:
    return folder / "seqlen" / "seqlen_sample_to_metric"


def _copy(place: Path, good: str = "good") -> Path:
    shutil.rmtree(place / "bad", ignore_errors=True)
    shutil.copytree(place / good, place / "bad")
    return place / "bad"


def _contents(folder: Path) -> Any:
    """Return all that is used of a directory of ours."""
    metrics = packer.open_metrics(folder)
    metrics.check_files()
    values = {name: metrics.metric(name).tolist() for name in metrics.names}
    blocks = metrics.blocks
    listed = (blocks.firsts.tolist(), blocks.num_bytes.tolist()) if blocks else None
    return values, listed, metrics.manifest, metrics.fingerprint, make_plan(folder, CONFIG).fingerprint


def _plan(metrics: Metrics, place: Path) -> None:
    out = place / "plan"
    shutil.rmtree(out, ignore_errors=True)
    plan = make_plan(metrics, CONFIG, out=out)
    packer.verify_plan(out, metrics=metrics)
    verify_source(plan, place / "data.parquet", metrics=metrics)


def _read_samples(metrics: Metrics, place: Path) -> None:
    dataset = packer.open_dataset(place / "data.parquet", metrics=metrics)
    dataset.__getitems__(range(len(dataset)))


def _fingerprint(metrics: Metrics, place: Path) -> None:
    metrics.check_files()


def _read_all(metrics: Metrics, place: Path) -> None:
    for name in metrics.names:
        metrics.metric(name).tolist()


_watched: list[Callable[[str], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes | os.PathLike):
        _watched[-1](os.path.realpath(os.fsdecode(arguments[0])))


@contextmanager
def opening_only(*folders: Path) -> Iterator[None]:
    """Check that no file outside the folders is opened, those of Python and of the system left out."""
    allowed = (*map(os.path.realpath, (*folders, sys.prefix, sys.base_prefix, ".")), "/proc", "/sys", "/dev")
    opened: list[str] = []
    _watched.append(opened.append)
    try:
        yield
    finally:
        _watched.pop()
    outside = [path for path in opened if not path.startswith(allowed)]
    if outside:
        raise WrongOutcomeError(f"opened outside of the directory: {outside}")


sys.addaudithook(_audit)

SUBJECTS = {
    "own .bin": OwnFile("*.bin"),
    "own .idx": OwnFile("*.idx"),
    "curriculum files": OwnFile("*_index_to_*"),
    "blocks": OwnFile("blocks.arrow"),
    "manifest.json": OwnFile("manifest.json"),
    "forged manifest.json": ForgedManifest("manifest.json"),
    "DeepSpeed's .bin": ForeignFile("bin"),
    "DeepSpeed's .idx": ForeignFile("idx"),
}

if __name__ == "__main__":
    main("tests.fuzz.fuzz_metrics", __doc__, SUBJECTS)
