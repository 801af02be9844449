"""Load a million steps with workers, saving and restoring all the while: nothing grows, every batch is right.

    python -m tests.soak.soak_loader --steps 1000000

At random moments the run is cut off, within a step or between two, and goes on: with a new loader on the same
or another topology, with the same loader put back to an older state, or in another epoch. Every micro-batch
is held against the plan. After each such turn, memory, descriptors, shared memory, threads and children are
noted.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from packer.plan import Plan, PlannedEpoch, PlanSource, load_plan, write_plan
from packer.runtime import PlanLoader
from tests import plans

EPOCHS = 4
STEPS = 40_000
"""Of an epoch."""
PER_STEP = 2
"""Micro-batches: two ranks with one each, or one rank with two."""
PER_MICROBATCH = 2
NUM_SAMPLES = STEPS * PER_STEP * PER_MICROBATCH
TURN = 4_000
"""Steps between two interruptions, on average."""
GROWTH = 24 << 20
"""Bytes that the allocators may keep more at the end than after a fifth of the run."""


class Tokens:
    """Sample n has 1 + n % 3 tokens, all of them n."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return {"input_ids": np.full(1 + sample_id % 3, sample_id)}


@dataclass(frozen=True)
class Usage:
    """What the run and its workers hold at one moment."""

    steps: int
    anonymous: int
    """Bytes of this process that no file backs."""
    pss: int
    """Bytes of this process and its workers, shared pages in part."""
    descriptors: int
    threads: int
    children: int
    shared_files: int
    """Files of ours in /dev/shm."""
    zombies: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.monotonic()
    usages = soak(arguments.steps, arguments.seed, tell=True)
    print(f"{arguments.steps} steps exact, {len(usages)} interruptions, {time.monotonic() - start:.0f} s")  # noqa: T201
    problems = grown(usages)
    for problem in problems:
        print(problem)  # noqa: T201
    sys.exit(bool(problems))


def soak(num_steps: int, seed: int, *, tell: bool = False) -> list[Usage]:
    """Play so many steps and return what was held after each turn.

    Raises:
        AssertionError: a micro-batch is not the planned one.
    """
    random = Random(seed)
    usages: list[Usage] = []
    others = {child.pid for child in psutil.Process().children(recursive=True)}  # of tests before this one
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "plan"
        write_plan(path, *_facts_and_epochs(), dropped=plans.drops())
        played = 0
        run = _Run(path, random)
        while played < num_steps:
            played += run.turn(min(1 + int(random.expovariate(1 / TURN)), num_steps - played))
            usages.append(_usage(played, others))
            if tell and len(usages) % 25 == 0:
                print(json.dumps(asdict(usages[-1])), flush=True)  # noqa: T201
        del run
        gc.collect()
        usages.append(_usage(played, others))
    return usages


def grown(usages: list[Usage]) -> list[str]:
    """Say what did not stay as it was; ``usages`` end with one after the last loader is gone."""
    *turns, end = usages
    early, late = turns[len(turns) // 5 : len(turns) // 2], turns[-len(turns) // 4 :]
    problems = []
    for name in ("anonymous", "pss"):
        before, after = (np.median([getattr(usage, name) for usage in part]) for part in (early, late))
        if after - before > GROWTH:
            problems.append(f"{name} grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
    for name in ("descriptors", "threads", "shared_files"):
        before, after = (max(getattr(usage, name) for usage in part) for part in (early, late))
        if after > before + 2:
            problems.append(f"{name} grew from {before} to {after}")
    if any(usage.zombies for usage in usages):
        problems.append("children that ended are not waited for")
    if end.children or end.shared_files:
        problems.append(f"{end.children} children and {end.shared_files} shared files outlive the loader")
    return problems


class _Run:
    """One training run that is interrupted again and again; knows where it must go on."""

    def __init__(self, path: Path, random: Random) -> None:
        self._path = path
        self._random = random
        self._plan = load_plan(path)
        self._ids = [_planned_ids(self._plan, epoch) for epoch in range(EPOCHS)]
        self._saved: list[dict[str, Any]] = []
        self._new_loader()
        self._expected = (0, 0, 0)

    def turn(self, num_steps: int) -> int:
        """Play so many steps, then interrupt; return how many were played."""
        played = 0
        while played < num_steps:
            played += self._play(num_steps - played)
        self._interrupt()
        return played

    def _play(self, most: int) -> int:
        """Play steps of one epoch, the last one perhaps in part, and hold each against the plan."""
        loader = self._loader
        if self._expected[0] == EPOCHS:
            loader.set_epoch(0)
            self._expected = (0, 0, 0)
        epoch, step, microbatch = self._expected
        played = 0
        for played_step in loader:
            assert played_step.index == step
            is_last = played + 1 == most
            leave_after = self._random.randrange(1, loader.grad_accum + 1) if is_last else loader.grad_accum
            for batch in played_step:
                self._check(batch, epoch, step, microbatch)
                microbatch += 1
                if microbatch >= leave_after:
                    break
            played += 1
            if is_last:
                self._expected = (epoch, step, microbatch)
                self._state = loader.state_dict()
                return played
            step, microbatch = step + 1, 0
        assert step == STEPS
        self._expected = (epoch + 1, 0, 0)
        self._state = loader.state_dict()
        return played

    def _check(self, batch: Any, epoch: int, step: int, microbatch: int) -> None:
        loader = self._loader
        row = step * PER_STEP + microbatch * loader.dp_size + loader.dp_rank
        ids = self._ids[epoch][row]
        tokens = batch["input_ids"].numpy()
        assert (batch.sample_ids == ids).all(), (epoch, step, microbatch, batch.sample_ids, ids)
        assert (tokens.max(axis=1) == ids).all(), (epoch, step, microbatch, tokens, ids)

    def _interrupt(self) -> None:
        if self._random.random() < 0.1:
            self._saved.append(self._state)
        choice = self._random.random()
        if choice < 0.6:
            self._go_on(self._state, new=True)
        elif choice < 0.8:
            self._go_on(self._state, new=False)
        elif choice < 0.9 and self._saved:
            self._go_on(self._random.choice(self._saved[-5:]), new=False)
        else:
            epoch = self._random.randrange(EPOCHS)
            self._go_on(self._state, new=False)
            if epoch != self._loader.epoch:
                self._loader.set_epoch(epoch)
                self._expected = (epoch, 0, 0)

    def _go_on(self, state: dict[str, Any], *, new: bool) -> None:
        """Load a state, as a run does that starts again; go on at the step, or at the micro-batch."""
        state = json.loads(json.dumps(state))
        if new:
            self._new_loader()
        same = (state["dp_size"], state["grad_accum"]) == (self._loader.dp_size, self._loader.grad_accum)
        within = same and self._random.random() < 0.5
        self._loader.load_state_dict(state, resume="microbatch" if within else "step")
        epoch, step, microbatch = state["epoch"], state["step"], state["microbatch"] if within else 0
        if microbatch == self._loader.grad_accum:
            step, microbatch = step + 1, 0
        self._expected = (epoch + 1, 0, 0) if step == STEPS else (epoch, step, microbatch)

    def _new_loader(self) -> None:
        self._loader = None
        dp_size = self._random.choice((1, PER_STEP))
        num_workers = self._random.choice((0, 1, 2, 2))
        self._loader = PlanLoader(
            load_plan(self._path),
            Tokens(),
            dp_rank=self._random.randrange(dp_size),
            dp_size=dp_size,
            num_workers=num_workers,
            persistent_workers=num_workers > 0 and self._random.random() < 0.5,
            prefetch_factor=self._random.choice((2, 8)) if num_workers else None,
        )


def _facts_and_epochs() -> tuple[Any, Iterator[PlannedEpoch]]:
    rows = STEPS * PER_STEP

    def epoch(number: int) -> PlannedEpoch:
        ids = np.random.default_rng(number).permutation(NUM_SAMPLES).astype(np.int32)
        seqlens = (1 + ids % 3).astype(np.int32)
        longest = seqlens.reshape(rows, PER_MICROBATCH).max(axis=1)
        in_steps = seqlens.reshape(STEPS, -1)
        return PlannedEpoch(
            sample_ids=ids,
            seqlens=seqlens,
            starts=None,
            offsets=np.arange(0, NUM_SAMPLES + 1, PER_MICROBATCH),
            padded_seqlens=longest,
            costs=longest.astype(np.int64),
            is_filler=np.zeros(rows, np.bool_),
            is_repeat=np.zeros(rows, np.bool_),
            step_num_samples=np.full(STEPS, PER_STEP * PER_MICROBATCH),
            step_num_tokens=in_steps.sum(axis=1, dtype=np.int64),
            step_num_loss_tokens=(in_steps - 1).sum(axis=1, dtype=np.int64),
            step_max_seqlen=in_steps.max(axis=1),
            lr_scales=np.ones(STEPS),
            dropped=plans.drops(),
        )

    num_tokens = int((1 + np.arange(NUM_SAMPLES) % 3).sum())
    facts = replace(
        plans.facts([1], epochs=EPOCHS, dp_size=PER_STEP),
        sources=[PlanSource(num_samples=NUM_SAMPLES, num_tokens=num_tokens)],
    )
    return facts, map(epoch, range(EPOCHS))


def _planned_ids(plan: Plan, epoch: int) -> np.ndarray[Any, Any]:
    """(micro-batches, samples) of one epoch."""
    tables = plan.epoch(epoch).microbatches()
    return np.concatenate([table.sample_ids for table in tables]).reshape(-1, PER_MICROBATCH)


def _usage(steps: int, others: set[int]) -> Usage:
    gc.collect()
    own = psutil.Process()
    children = [child for child in own.children(recursive=True) if child.pid not in others]
    zombies = [child for child in children if _status(child) == psutil.STATUS_ZOMBIE]
    alive = [child.pid for child in children if child not in zombies]
    shared = [name for name in os.listdir("/dev/shm") if f"_{own.pid}_" in name]
    return Usage(
        steps=steps,
        anonymous=_rollup(own.pid, "Anonymous"),
        pss=sum(_rollup(pid, "Pss") for pid in (own.pid, *alive)),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        children=len(alive),
        shared_files=len(shared),
        zombies=len(zombies),
    )


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"


def _rollup(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
