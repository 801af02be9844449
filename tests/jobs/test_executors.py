"""The same results wherever units run; a death is an error, not a hang."""

import os
import signal
import time
from pathlib import Path

import pytest

from packer.errors import ConfigError, SourceError, WorkerLostError
from packer.jobs.executors import Report, choose_executor, run_here, run_in_processes

UNITS = list(enumerate(range(10, 30)))


def double(unit: int, report: Report) -> bytes:
    return str(unit * 2).encode()


def fail_at_15(unit: int, report: Report) -> bytes:
    if unit == 15:
        raise SourceError("unit 15 is bad")
    return double(unit, report)


def die_at_15(unit: int, report: Report) -> bytes:
    if unit == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    return double(unit, report)


def wait_for_a_file(path: Path, report: Report) -> bytes:
    """Go on only once the report was heard."""
    report(0.25, 3, 40)
    while not path.exists():
        time.sleep(0.01)
    return path.name.encode()


def to_nobody(number: int, share: float, num_rows: int, num_tokens: int) -> None:
    pass


def test_processes_do_what_one_does():
    assert sorted(run_in_processes(double, UNITS, to_nobody, workers=2)) == list(
        run_here(double, UNITS, to_nobody)
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_unit_arrives_as_it_was(workers):
    with pytest.raises(SourceError, match="unit 15 is bad"):
        list(choose_executor(workers)(fail_at_15, UNITS, to_nobody))


def test_a_killed_worker_is_an_error():
    with pytest.raises(WorkerLostError, match="a worker process died"):
        list(run_in_processes(die_at_15, UNITS, to_nobody, workers=2))


def test_a_task_that_cannot_travel():
    with pytest.raises(ConfigError, match="top of a module"):
        list(run_in_processes(lambda unit, report: b"", UNITS, to_nobody, workers=2))


def test_no_worker_is_no_executor():
    with pytest.raises(ConfigError, match="--workers 0"):
        choose_executor(0)


def test_a_unit_that_takes_long_is_reported_on_from_another_process(tmp_path):
    heard = []

    def report(*what):
        heard.append(what)
        (tmp_path / str(what[0])).touch()

    units = [(number, tmp_path / str(number)) for number in range(3)]
    finished = dict(run_in_processes(wait_for_a_file, units, report, workers=2))
    assert finished == {0: b"0", 1: b"1", 2: b"2"}
    assert set(heard) == {(0, 0.25, 3, 40), (1, 0.25, 3, 40), (2, 0.25, 3, 40)}
