"""Where units of work run: in this process, in spawned processes, or on Ray. All give the same results."""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Any, Protocol, TypeVar

from packer.errors import ConfigError, WorkerLostError
from packer.machine import num_cores

U = TypeVar("U", contravariant=True)

Report = Callable[[float, int, int], None]
"""Takes how much of a unit is done, 0 to 1, and the rows and tokens so far; cheap enough for every batch."""

Task = Callable[[U, Report], bytes]
"""Turns a unit into a payload; pickles small, and opens what it needs where it runs."""

UnitReport = Callable[[int, float, int, int], None]
"""A ``Report`` with the number of its unit before it."""


class Executor(Protocol):
    """Runs a task over numbered units and yields (number, payload) as they finish, in any order."""

    def __call__(
        self, task: Task[U], units: Sequence[tuple[int, U]], report: UnitReport
    ) -> Iterator[tuple[int, bytes]]:
        """Run them all, and report on those that take long; the first error ends it."""


def choose_executor(workers: int | None, executor: str = "local", ray_address: str | None = None) -> Executor:
    """Return what runs units, by the options of ``analyze``.

    Raises:
        ConfigError: no worker at all, an unknown executor, or an address without Ray.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: at least one worker has to do the work")
    if executor == "ray":
        from packer.jobs.ray_executor import run_on_ray

        return partial(run_on_ray, workers=workers, address=ray_address)
    if executor != "local":
        raise ConfigError(f"--executor {executor}: there are local and ray")
    if ray_address is not None:
        raise ConfigError("--ray-address has no meaning without --executor ray; add it")
    return run_here if workers in (None, 1) else partial(run_in_processes, workers=workers)


def run_here(
    task: Task[U], units: Sequence[tuple[int, U]], report: UnitReport
) -> Iterator[tuple[int, bytes]]:
    """Run one unit after the other in this process."""
    for number, unit in units:
        yield number, task(unit, partial(report, number))


def run_in_processes(
    task: Task[U], units: Sequence[tuple[int, U]], report: UnitReport, *, workers: int
) -> Iterator[tuple[int, bytes]]:
    """Run units in spawned processes: a fork would inherit locks of threads that a tokenizer has started.

    Raises:
        WorkerLostError: a process died; what was finished is not lost.
        ConfigError: the task cannot be sent to another process.
    """
    try:
        pickled = pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"this cannot be sent to worker processes ({error}); define it at the top of a module, "
            "or use one worker"
        ) from error
    workers = min(workers, len(units))
    if workers == 1:
        yield from run_here(task, units, report)
        return
    threads = max(1, num_cores() // max(1, workers))
    context = get_context("spawn")
    boards = context.Array("d", [_NO_UNIT] * _BOARD_FIELDS * workers)
    pool = ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=_start_worker,
        initargs=(pickled, threads, boards, context.Value("i", 0)),
    )
    waiting = iter(units)
    running: dict[Future[bytes], int] = {}
    try:
        while True:
            # two units a worker in flight: none is idle, and unread payloads stay few
            for number, unit in islice(waiting, 2 * workers - len(running)):
                running[pool.submit(_run_in_worker, number, unit)] = number
            if not running:
                return
            for future in wait(running, timeout=_SECONDS_A_LOOK, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
            for number, share, num_rows, num_tokens in zip(*[iter(boards[:])] * _BOARD_FIELDS, strict=True):
                if number in running.values():
                    report(int(number), share, int(num_rows), int(num_tokens))
    except BrokenProcessPool as error:
        raise WorkerLostError(
            "a worker process died (killed, out of memory, or started from a script without "
            '`if __name__ == "__main__":`); finished units are kept, run again to go on'
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_SECONDS_A_LOOK = 0.5
_BOARD_FIELDS = 4
"""Of a worker: which unit it is at, how much of it is done, its rows and tokens so far."""
_NO_UNIT = -1.0

_task: Callable[[Any, Report], bytes]
_boards: Any
_board: slice
"""Where in the memory that all share this worker writes."""


def _start_worker(pickled_task: bytes, threads: int, boards: Any, num_started: Any) -> None:
    global _task, _boards, _board
    with num_started.get_lock():
        start = _BOARD_FIELDS * num_started.value
        num_started.value += 1
    _boards, _board = boards, slice(start, start + _BOARD_FIELDS)
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # tokenizers: N workers share the cores
    _task = pickle.loads(pickled_task)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A parent that was killed cannot stop its workers."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run_in_worker(number: int, unit: Any) -> bytes:
    def report(share: float, num_rows: int, num_tokens: int) -> None:
        _boards[_board] = [number, share, num_rows, num_tokens]

    payload = _task(unit, report)
    _boards[_board] = [_NO_UNIT, 0, 0, 0]
    return payload
