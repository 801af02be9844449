"""Read damaged plans: each gives the plan that was written, or a PackerError.

    python -m tests.fuzz.fuzz_plan --inputs 10000 --seed 0

Two kinds of damage: ``damaged`` files, as a disk leaves them, must be noticed or harmless; ``forged`` ones,
with all hashes set to match, may say something else, but nothing may crash, hang, or take memory out of
proportion. Inputs run in child processes, so that a crash of the interpreter is a finding, not the end.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa

from packer.errors import PackerError
from packer.plan import Plan, load_plan, verify_plan
from packer.plan.digest import HEADER_HASH, batch_digest, content_hash, header_hash, validate
from packer.report import html_page, summarize
from tests import plans
from tests.fuzz.children import WrongOutcomeError, main
from tests.fuzz.mutations import mutate, mutate_json

KINDS = ("plan.json", "microbatches.arrow", "steps.arrow", "dropped.arrow")
MODES = ("damaged", "forged")


@dataclass
class PlanFile:
    """One file of a plan, damaged, or forged."""

    kind: str
    mode: str
    good: list[tuple[Path, object]] = field(default_factory=list)
    """Plans on disk, each with all that a reader gives out."""

    def prepare(self, place: Path) -> None:
        makers = [plans.whole_plan, plans.cut_plan, lambda: plans.copying_plan("keep")]
        for number, make in enumerate(makers):
            plan = make()[0].save(place / f"good-{number}")
            self.good.append((place / f"good-{number}", _contents(plan)))

    def attempt(self, random: Random, place: Path) -> str:
        folder, contents = random.choice(self.good)
        bad = place / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(folder, bad)
        name = random.choice(sorted(str(p.relative_to(folder)) for p in folder.rglob(self.kind)))
        _damage(bad, name, self.mode, random)
        plan = load_plan(bad)
        read = _contents(plan)
        if self.mode == "damaged" and read != contents:
            raise WrongOutcomeError("a wrong value was read")
        if self.mode == "forged":
            _use(plan)
        return "read"


SUBJECTS = {f"{kind} {mode}": PlanFile(kind, mode) for kind in KINDS for mode in MODES}


def _damage(folder: Path, name: str, mode: str, random: Random) -> None:
    path = folder / name
    header = json.loads((folder / "plan.json").read_text())
    if mode == "damaged":
        path.write_bytes(mutate(path.read_bytes(), random))
        return
    if name == "plan.json":
        header = mutate_json(header, random)
    else:
        path.write_bytes(mutate(path.read_bytes(), random))
        _match_hashes(header, name, path)
    if isinstance(header, dict):
        header[HEADER_HASH] = header_hash(header)
    (folder / "plan.json").write_text(json.dumps(header))


def _match_hashes(header: dict, name: str, path: Path) -> None:
    """Let the header say of a damaged file what can be said of it."""
    entry = header["files"][name]
    entry["size"] = path.stat().st_size
    try:
        reader = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            validate(batch)
        entry["batch_digests"] = [batch_digest(batch) for batch in batches]
        entry["num_rows"] = sum(batch.num_rows for batch in batches)
    except Exception:
        return
    header["content_hash"] = content_hash({n: e["batch_digests"] for n, e in header["files"].items()})


def _contents(plan: Plan) -> object:
    """Return all that a reader gives out."""
    epochs = []
    for number in range(plan.num_epochs):
        epoch = plan.epoch(number)
        rows = [epoch.microbatch(row) for row in range(epoch.num_microbatches)]
        plain = [tuple(v.tolist() if hasattr(v, "tolist") else v for v in row) for row in rows]
        epochs.append((plain, [epoch.step(step) for step in range(epoch.num_steps)]))
    dropped = [[np.array(column).tolist() for column in part] for part in plan.dropped()]
    return epochs, dropped, plan.config, plan.num_samples, plan.fingerprint


def _use(plan: Plan) -> None:
    """Do with a forged plan what users do; each may refuse it for a reason of its own."""
    for use in (verify_plan, summarize, html_page):
        with suppress(PackerError):
            use(plan)


if __name__ == "__main__":
    main("tests.fuzz.fuzz_plan", __doc__, SUBJECTS)
