"""One stage of a job: the same task over all units, skipping those that an earlier run has finished."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from packer.jobs.executors import Executor, Task
from packer.jobs.journal import Journal
from packer.jobs.progress import Listener, Pace

U = TypeVar("U")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage(Generic[U]):
    """A task and its units."""

    number: int
    """Its place in the journal."""
    name: str
    """What it does, for the progress display."""
    task: Task[U]
    units: Sequence[U]
    size_of: Callable[[U], int]
    """How much work a unit is."""
    count: Callable[[memoryview], tuple[int, int]]
    """Rows and tokens of a payload."""

    def run(self, journal: Journal, executor: Executor, listener: Listener | None) -> int:
        """Run what is missing in the journal; return how many units were there already."""
        missing = [(n, unit) for n, unit in enumerate(self.units) if (self.number, n) not in journal]
        total = sum(map(self.size_of, self.units))
        pace = Pace(
            self.name,
            listener,
            total=total,
            done_before=total - sum(self.size_of(unit) for _, unit in missing),
        )
        if missing:

            def report(number: int, share: float, num_rows: int, num_tokens: int) -> None:
                if share < 1:  # else it is finished in a moment
                    size = self.size_of(self.units[number])
                    pace.look_into(number, round(share * size), num_rows, num_tokens)

            for number, payload in executor(self.task, missing, report):
                journal.append(self.number, number, payload)
                num_rows, num_tokens = self.count(memoryview(payload))
                pace.advance(number, self.size_of(self.units[number]), num_rows, num_tokens)
        return len(self.units) - len(missing)
