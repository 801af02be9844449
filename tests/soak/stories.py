"""Tell random stories of a loader, of all that breaks a run off, and hold every batch against the plan.

    python -m tests.soak.stories --stories 200 --kills 40

In a story the training loop leaves steps, breaks off, survives errors of the data set or of ``collate``, asks
again, is interrupted, loads states, takes a new loader; workers, 0 to 3, are killed. Every batch must be the
plan's for its place, and what is not given up comes once and in order. Afterwards nothing may be left behind:
no process, descriptor or shared memory.
"""

import argparse
import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pytest

from packer.errors import PlanError, SourceError, WorkerLostError
from packer.plan import Plan
from packer.runtime import Batch, PlanLoader, Step, count_loss_tokens
from tests.runtime.replays import make_plan

EPOCHS = 2
STEPS = 6
GRAD_ACCUM = 3
PER_MICROBATCH = 2
NUM_SAMPLES = STEPS * GRAD_ACCUM * PER_MICROBATCH

Place = tuple[int, int, int]


class Hazards:
    """Sample n is made of n; a file named after it, or after the collation of it, makes it fail once."""

    def __init__(self, folder: Path, seqlen: int = 8) -> None:
        self.folder = folder
        self.seqlen = seqlen

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        for kind, error in (("error", ValueError("hazard")), ("interrupt", KeyboardInterrupt())):
            marker = self.folder / f"{kind}-{sample_id}"
            if marker.exists():
                marker.unlink()
                raise error
        return {"input_ids": np.full(self.seqlen, sample_id)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with nothing_left_behind():
        told = [tell(arguments.seed + number) for number in range(arguments.stories)]
    print(f"{arguments.stories} stories, {sum(told)} batches, none wrong")  # noqa: T201
    with nothing_left_behind():
        missed = sum(kill_and_go_on(arguments.seed + number) for number in range(arguments.kills))
    print(f"{arguments.kills} of {arguments.kills} killed runs went on, {missed} with new workers")  # noqa: T201


def tell(seed: int) -> int:
    """Tell one story; return how many batches it saw.

    Raises:
        AssertionError: one was not the planned one, or came twice, or never.
    """
    with TemporaryDirectory() as name:
        return _Story(Random(seed), Path(name)).tell()


def kill_and_go_on(seed: int) -> bool:
    """Kill a worker at any moment of a run, go on as the documentation says; return whether it was missed.

    Raises:
        AssertionError: the micro-batches were not, in order, those of the plan.
    """
    random = Random(seed)
    seqlen = random.choice([8, 3000])  # what goes through the pipe, or through shared memory
    plan = _plan(seqlen)
    with TemporaryDirectory() as name:
        loader = PlanLoader(
            plan,
            Hazards(Path(name), seqlen),
            num_workers=random.randint(1, 3),
            prefetch_factor=random.choice([1, 2, 4]),
            persistent_workers=random.random() < 0.5,
        )
        seen: list[list[int]] = []
        kill_at = random.randrange(EPOCHS * STEPS * GRAD_ACCUM - 4)
        recoveries = 0
        while loader.epoch < EPOCHS:
            try:
                for batch in loader.microbatches():
                    seen.append(batch.sample_ids.tolist())
                    assert (batch["input_ids"][:, 0].numpy() == batch.sample_ids).all()
                    if len(seen) == kill_at:
                        time.sleep(random.choice([0, 0.001, 0.02]))
                        kill_one(random)
            except WorkerLostError:
                recoveries += 1
                loader.load_state_dict(loader.state_dict(), resume="microbatch")
        loader.close()
    rows = [plan.epoch(epoch).microbatch(row) for epoch in range(EPOCHS) for row in range(STEPS * GRAD_ACCUM)]
    assert seen == [row.sample_ids.tolist() for row in rows]
    assert recoveries <= 1
    return bool(recoveries)  # what it was to read may have been there already


def kill_one(random: Random) -> None:
    """Kill a worker, if there is one, as the system does where memory is short."""
    workers = multiprocessing.active_children()
    if workers:
        random.choice(workers).kill()


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Hold processes, descriptors and shared memory after the block against those before it."""
    before = _held()
    yield
    deadline = time.monotonic() + 20
    while (after := _held()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert after == before


def _held() -> tuple[set[int], int, set[str]]:
    gc.collect()
    own = psutil.Process()
    shared = {name for name in os.listdir("/dev/shm") if f"_{own.pid}_" in name}
    children = {child.pid for child in own.children(recursive=True)}
    return children, len(os.listdir("/proc/self/fd")), shared


class _Story:
    """One run, what it expects next, and the hazards that it has laid out."""

    def __init__(self, random: Random, folder: Path) -> None:
        self._random = random
        self._folder = folder
        self._plan = _plan(8)
        self._num_workers = random.randint(0, 3)
        self._boldness = random.choice([0.02, 0.1, 0.3])
        self._next: Place = (0, 0, 0)
        self._given_up: set[Place] = set()
        self._seen: list[Place] = []
        self._loader = self._new_loader()

    def tell(self) -> int:
        turns = 0
        while self._next[0] < EPOCHS:
            turns += 1
            assert turns < 400, "the story does not end"
            try:
                self._play()
            except WorkerLostError:
                self._go_on()
            except KeyboardInterrupt:
                self._go_on()
        assert list(self._loader) == []  # a finished loader has no steps
        self._loader.close()
        everything = [
            (epoch, step, accum)
            for epoch in range(EPOCHS)
            for step in range(STEPS)
            for accum in range(GRAD_ACCUM)
        ]
        assert sorted({*self._seen, *self._given_up}) == everything
        return len(self._seen)

    def _play(self) -> None:
        """Play until the epoch ends, or something breaks the loop off."""
        for step in self._loader:
            epoch, index, first = self._next
            assert (step.epoch, step.index) == (epoch, index)
            if self._dares():
                self._lay_a_hazard()
            if self._dares() and first == 0:
                self._count(step)
            while len(step):
                if self._dares():
                    kill_one(self._random)
                batch = self._take(step)
                if batch is None or (self._dares() and self._random.random() < 0.5):
                    self._give_up(step)  # the loop goes on with the next step
                    break
                if self._dares():
                    self._go_on()
                    return
            else:
                assert next(step, None) is None
            assert bool(step)
            self._next = (epoch, index + 1, 0) if index + 1 < STEPS else (epoch + 1, 0, 0)

    def _take(self, step: Step) -> Batch | None:
        """Take the next micro-batch; None where it cannot be had."""
        try:
            batch = next(step)
        except (SourceError, PlanError) as error:
            if not (isinstance(error, SourceError) or "could not be made" in str(error)):
                raise  # it is as it was when the step's loss tokens were counted
            for _ in range(self._random.randrange(3)):  # asked again, there is no other in its place
                with pytest.raises(PlanError, match="could not be made"):
                    next(step)
            return None
        except KeyboardInterrupt:
            if self._random.random() < 0.5:
                raise
            return self._take(step)  # the very same, if nothing else is wrong with it
        self._check(batch, step)
        return batch

    def _check(self, batch: Batch, step: Step) -> None:
        assert batch.accum == self._next[2]
        row = self._plan.epoch(step.epoch).microbatch(step.index * GRAD_ACCUM + batch.accum)
        assert batch.sample_ids.tolist() == row.sample_ids.tolist()
        assert (batch["input_ids"].numpy() == row.sample_ids[:, None]).all()
        assert batch.step is step.info
        self._seen.append(self._next)
        self._next = (*self._next[:2], batch.accum + 1)
        state = self._loader.state_dict()
        assert (state["epoch"], state["step"], state["microbatch"]) == self._next

    def _count(self, step: Step) -> None:
        with suppress(SourceError):
            assert count_loss_tokens(step) == step.num_loss_tokens

    def _give_up(self, step: Step) -> None:
        self._given_up |= {(step.epoch, step.index, accum) for accum in range(self._next[2], GRAD_ACCUM)}

    def _lay_a_hazard(self) -> None:
        kinds = ["error"] if self._num_workers else ["error", "interrupt"]
        (self._folder / f"{self._random.choice(kinds)}-{self._random.randrange(NUM_SAMPLES)}").touch()

    def _go_on(self) -> None:
        """Load the state, as a run does that starts again, in this loader or in another one."""
        state = self._loader.state_dict()
        if self._random.random() < 0.5:
            self._loader.close()
            self._num_workers = self._random.randint(0, 3)
            self._loader = self._new_loader()
        resume = self._random.choice(["step", "microbatch"])
        self._loader.load_state_dict(state, resume=resume)  # type: ignore[arg-type]
        epoch, step, accum = state["epoch"], state["step"], state["microbatch"]
        if resume == "step":
            accum = 0
        if accum == GRAD_ACCUM:
            step, accum = step + 1, 0
        self._next = (epoch + 1, 0, 0) if step == STEPS else (epoch, step, accum)

    def _new_loader(self) -> PlanLoader:
        is_kept = self._num_workers > 0 and self._random.random() < 0.5
        return PlanLoader(
            self._plan,
            Hazards(self._folder),
            num_workers=self._num_workers,
            persistent_workers=is_kept,
            prefetch_factor=self._random.choice([1, 2, 5]) if self._num_workers else None,
        )

    def _dares(self) -> bool:
        return self._random.random() < self._boldness


def _plan(seqlen: int) -> Plan:
    return make_plan(
        [seqlen] * NUM_SAMPLES,
        steps=STEPS,
        epochs=EPOCHS,
        grad_accum=GRAD_ACCUM,
        per_microbatch=PER_MICROBATCH,
    )


if __name__ == "__main__":
    main()
