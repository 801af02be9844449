"""The same results wherever units run; a death is an error, not a hang."""

import os
import signal

import pytest

from packer.analyzer.executors import choose_executor, run_here, run_in_processes
from packer.errors import ConfigError, SourceError, WorkerLostError

UNITS = list(enumerate(range(10, 30)))


def double(unit: int) -> bytes:
    return str(unit * 2).encode()


def fail_at_15(unit: int) -> bytes:
    if unit == 15:
        raise SourceError("unit 15 is bad")
    return double(unit)


def die_at_15(unit: int) -> bytes:
    if unit == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    return double(unit)


def test_processes_do_what_one_does():
    assert sorted(run_in_processes(double, UNITS, workers=2)) == list(run_here(double, UNITS))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_unit_arrives_as_it_was(workers):
    with pytest.raises(SourceError, match="unit 15 is bad"):
        list(choose_executor(workers)(fail_at_15, UNITS))


def test_a_killed_worker_is_an_error():
    with pytest.raises(WorkerLostError, match="a worker process died"):
        list(run_in_processes(die_at_15, UNITS, workers=2))


def test_a_task_that_cannot_travel():
    with pytest.raises(ConfigError, match="top of a module"):
        list(run_in_processes(lambda unit: b"", UNITS, workers=2))


def test_no_worker_is_no_executor():
    with pytest.raises(ConfigError, match="--workers 0"):
        choose_executor(0)
