"""Read damaged plans: each gives the plan that was written, or a PackerError.

    python -m tests.fuzz.fuzz_plan --inputs 10000 --seed 0

Two kinds of damage: ``damaged`` files, as a disk leaves them, must be noticed or harmless; ``forged`` ones,
with all hashes set to match, may say something else, but nothing may crash, hang, or take memory out of
proportion. Inputs run in child processes, so that a crash of the interpreter is a finding, not the end.
"""

import argparse
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from random import Random

import pyarrow as pa

from packer.errors import PackerError
from packer.plan import Plan, load_plan, verify_plan
from packer.plan.digest import HEADER_HASH, batch_digest, content_hash, header_hash, validate
from packer.report import html_page, summarize
from tests import plans
from tests.fuzz.mutations import mutate, mutate_json

KINDS = ("plan.json", "microbatches.arrow", "steps.arrow", "dropped.arrow")
MODES = ("damaged", "forged")
PER_CHILD = 500
SECONDS = 20
"""Of one input; longer is a hang."""
BYTES = 1 << 28
"""That one input may allocate; the files are of some kilobytes."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000, help="for each file of a plan, in each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, mode, first, last = arguments.child
        _run_child(kind, mode, range(int(first), int(last)))
        return
    failures = 0
    for kind in KINDS:
        for mode in MODES:
            found, outcomes = fuzz(kind, mode, arguments.inputs, arguments.seed)
            failures += len(found)
            print(f"{kind} {mode}: {outcomes}, {len(found)} failures", flush=True)  # noqa: T201
            for failure in found[:5]:
                print(failure)  # noqa: T201
    sys.exit(bool(failures))


def fuzz(kind: str, mode: str, inputs: int, seed: int) -> tuple[list[str], dict[str, int]]:
    """Return what went wrong, and how often each outcome came."""
    failures: list[str] = []
    outcomes: dict[str, int] = {}
    first, end = seed, seed + inputs
    while first < end:
        last = min(first + PER_CHILD, end)
        command = [sys.executable, "-m", "tests.fuzz.fuzz_plan", "--child", kind, mode, str(first), str(last)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in child.stdout.splitlines()]
        for line in lines:
            if "failure" in line:
                failures.append(f"{kind} {mode} input {line['input']}: {line['failure']}")
            outcomes[line["outcome"]] = outcomes.get(line["outcome"], 0) + 1
        if child.returncode:
            failures.append(
                f"{kind} {mode} input {first + len(lines)}: exit {child.returncode} {child.stderr[-400:]}"
            )
        first = first + len(lines) + 1 if child.returncode else last
    return failures, outcomes


def _run_child(kind: str, mode: str, inputs: range) -> None:
    makers = [plans.whole_plan, plans.cut_plan, lambda: plans.copying_plan("keep")]
    with tempfile.TemporaryDirectory() as place:
        good = []
        for number, make in enumerate(makers):
            plan = make()[0].save(Path(place) / f"good-{number}")
            good.append((plan.path, _contents(plan)))
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, limit))
        for number in inputs:
            random = Random(f"{kind} {mode} {number}")
            folder, contents = random.choice(good)
            result = {"input": number} | _try(folder, contents, kind, mode, random, Path(place) / "bad")
            print(json.dumps(result), flush=True)  # noqa: T201


def _try(folder: Path, contents: object, kind: str, mode: str, random: Random, bad: Path) -> dict[str, str]:
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(folder, bad)
    name = random.choice(sorted(str(p.relative_to(folder)) for p in folder.rglob(kind)))
    _damage(bad, name, mode, random)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        plan = load_plan(bad)
        read = _contents(plan)
        outcome = "read"
        if mode == "damaged" and read != contents:
            return {"outcome": "wrong", "failure": "a wrong value was read"}
        if mode == "forged":
            _use(plan)
    except PackerError as error:
        outcome = type(error).__name__
        if "\n" in str(error):
            return {"outcome": outcome, "failure": f"more than one line: {error}"}
    except Exception:
        return {"outcome": "raised", "failure": traceback.format_exc(limit=-3)}
    finally:
        signal.alarm(0)
    allocated = pa.default_memory_pool().max_memory()
    if allocated > BYTES:
        return {"outcome": outcome, "failure": f"{allocated} bytes were allocated"}
    return {"outcome": outcome}


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
    dropped = [[column.tolist() for column in part] for part in plan.dropped()]
    return epochs, dropped, plan.config, plan.num_samples, plan.fingerprint


def _use(plan: Plan) -> None:
    """Do with a forged plan what users do; each may refuse it for a reason of its own."""
    for use in (verify_plan, summarize, html_page):
        with suppress(PackerError):
            use(plan)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"no end after {SECONDS} s")


if __name__ == "__main__":
    main()
