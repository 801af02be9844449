"""Units of work as Ray tasks, on this machine or on a cluster that reads the same files."""

import os
import socket
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar
from uuid import uuid4

from packer.errors import MissingExtraError, PackerError, WorkerLostError
from packer.jobs.executors import Task, UnitReport

U = TypeVar("U")

_CONNECT_SECONDS = 10
_RETRIES = 5
"""How often the units of a worker or node that died are run again."""


def run_on_ray(
    task: Task[U],
    units: Sequence[tuple[int, U]],
    report: UnitReport,
    *,
    workers: int | None,
    address: str | None,
) -> Iterator[tuple[int, bytes]]:
    """Run units as tasks of a Ray that is running, or that is started for it.

    Args:
        task: as for every executor; the files must be where every node can read them.
        units: as for every executor.
        report: not called; a unit is told of when it is finished.
        workers: tasks at once; None: as many as Ray has CPUs.
        address: of a cluster; None: a Ray on this machine, started and stopped here unless it runs already.

    Raises:
        MissingExtraError: Ray is not installed.
        WorkerLostError: workers died again and again; what was finished is not lost.
    """
    ray = _import_ray()
    started_here = not ray.is_initialized()
    if started_here:
        _start(ray, workers, address)
    try:
        remote = ray.remote(max_retries=_RETRIES, num_cpus=1)(_run)
        shared = [ray.put(task)]  # in a list: a worker fetches it once, not with every unit
        at_once = 2 * (workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
        waiting = iter(units)
        running: dict[Any, int] = {}
        job = uuid4().hex
        while True:
            for number, unit in islice(waiting, at_once - len(running)):
                running[remote.remote(job, shared, unit)] = number
            if not running:
                return
            (finished,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(finished), _result(ray, finished)
    finally:
        if started_here:
            ray.shutdown()


def _start(ray: Any, workers: int | None, address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": workers, "include_dashboard": False}
    try:
        if address is not None:
            _check_reachable(address)
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise WorkerLostError(
            f"no Ray at {address or 'this machine'}: {error}; check --ray-address"
        ) from error


def _check_reachable(address: str) -> None:
    """Fail at once where Ray would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _result(ray: Any, finished: Any) -> bytes:
    try:
        payload: bytes = ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PackerError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise WorkerLostError(
            f"Ray workers died {_RETRIES + 1} times at one unit ({type(error).__name__}; out of memory?); "
            "finished units are kept, run again to go on"
        ) from error
    return payload


_tasks: dict[str, Any] = {}


def _run(job: str, shared: list[Any], unit: Any) -> bytes:
    """Runs on a worker, which keeps the task of the job it works for, and its open files with it."""
    if job not in _tasks:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # tokenizers: a task has one CPU
        _tasks.clear()
        _tasks[job] = _import_ray().get(shared[0])
    payload: bytes = _tasks[job](unit, _report_to_nobody)
    return payload


def _report_to_nobody(share: float, num_rows: int, num_tokens: int) -> None:
    """A task of Ray has no place to write to that is seen before it ends."""


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("--executor ray needs Ray; install 'microbatch-packer[ray]'") from error
    return ray
