"""Run damaged inputs in child processes, so that a crash, a hang or a full memory is a finding, not the end.

A module of subjects calls `main`; its inputs are numbered, and a number always gives the same damage.
"""

import argparse
import faulthandler
import json
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Protocol

from packer.errors import PackerError

PER_CHILD = 500
PROCESSOR_SECONDS = 20
"""Of one input, all threads together; longer is a loop that does not end, however busy the machine is."""
SECONDS = 600
"""Of one input on the clock; longer is a wait that does not end."""
BYTES = 3 << 27
"""By which one input may let the process grow: verification looks at 16 million pieces at a time, 256 MiB,
whatever a plan says of itself; the files are of some kilobytes."""
ADDRESSES = 8 << 30
"""Bytes that a child may map or allocate, touched or not."""


class WrongOutcomeError(Exception):
    """What must not come of a damaged file: a wrong value, a message that names nothing."""


class Subject(Protocol):
    """What is damaged, and what is right of it."""

    def prepare(self, place: Path) -> None:
        """Write the good files; called once in each child."""

    def attempt(self, random: Random, place: Path) -> str:
        """Damage a copy, read it, and return a word for what came of it.

        A ``PackerError`` may leave it, and is the outcome then; anything else that leaves it is a failure.
        """


def main(module: str, description: str | None, subjects: Mapping[str, Subject]) -> None:
    """Fuzz the subjects of a module as the command line says."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="for each subject")
    parser.add_argument("--seed", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", choices=list(subjects), action="append", help="one subject; repeatable")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, first, last = arguments.child
        _run_child(name, subjects[name], range(int(first), int(last)))
        return
    num_failures = 0
    for name in arguments.only or subjects:
        failures, outcomes = fuzz(module, name, arguments.inputs, arguments.seed)
        num_failures += len(failures)
        print(f"{name}: {outcomes}, {len(failures)} failures", flush=True)  # noqa: T201
        for failure in failures[:5]:
            print(failure, flush=True)  # noqa: T201
    sys.exit(bool(num_failures))


def fuzz(module: str, subject: str, inputs: int, seed: int) -> tuple[list[str], dict[str, int]]:
    """Return what went wrong, and how often each outcome came."""
    failures: list[str] = []
    outcomes: dict[str, int] = {}
    first, end = seed, seed + inputs
    while first < end:
        last = min(first + PER_CHILD, end)
        command = [sys.executable, "-m", module, "--child", subject, str(first), str(last)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if not child.stdout:
            raise RuntimeError(f"{subject}: the good files cannot be read: {child.stderr}")
        _, *lines = map(json.loads, child.stdout.splitlines())
        for line in lines:
            if "failure" in line:
                failures.append(f"{subject}, input {line['input']}: {line['failure']}")
            outcomes[line["outcome"]] = outcomes.get(line["outcome"], 0) + 1
        if child.returncode:
            failures.append(
                f"{subject}, input {first + len(lines)}: exit {child.returncode} {child.stderr[:2000]}"
            )
        first = first + len(lines) + 1 if child.returncode else last
    return failures, outcomes


def _run_child(name: str, subject: Subject, inputs: range) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # the traceback, and then the end
    memory = Path("/dev/shm")  # no time is lost to a disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        subject.prepare(Path(place))
        print(json.dumps("ready"), flush=True)  # noqa: T201
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, limit))
        for number in inputs:
            # A signal that ends the process, and a thread outside the interpreter: both end a library, too.
            signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            outcome = _attempt(subject, Random(f"{name} {number}"), Path(place))
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps({"input": number} | outcome), flush=True)  # noqa: T201


def _attempt(subject: Subject, random: Random, place: Path) -> dict[str, str]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kilobytes("VmRSS")
    try:
        outcome = subject.attempt(random, place)
    except PackerError as error:
        outcome = type(error).__name__
        if "\n" in str(error):
            return {"outcome": outcome, "failure": f"more than one line: {error}"}
    except WrongOutcomeError as error:
        return {"outcome": "wrong", "failure": str(error)}
    except BaseException:  # a panic of Rust is no Exception
        return {"outcome": "raised", "failure": traceback.format_exc(limit=-4)}
    grown = (_kilobytes("VmHWM") - before) << 10
    if grown > BYTES:
        return {"outcome": outcome, "failure": f"the process grew by {grown >> 20} MiB"}
    return {"outcome": outcome}


def _kilobytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)
