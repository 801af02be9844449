"""Contenders that take turns in one run, each in a process of its own, so that none profits from another."""

import resource
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping


def take_turns(contenders: Mapping[str, str], *, turns: int, limit: float | None = None) -> dict[str, float]:
    """Run Python programs in turn, start-up included; print and return each one's median wall seconds.

    Beside them stands the processor time of all its processes, which a busy machine changes less. A program
    that takes more than ``limit`` seconds is stopped, and left out from then on.
    """
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name in list(wall):
            start, used = time.perf_counter(), _cpu_of_children()
            command = [sys.executable, "-c", textwrap.dedent(contenders[name])]
            try:
                run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
            except subprocess.TimeoutExpired:
                print(f"{name:32} more than {limit} s", flush=True)
                del wall[name], cpu[name]
                continue
            if run.returncode:
                sys.exit(f"{name} failed:\n{run.stderr}")
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(_cpu_of_children() - used)
    medians = {name: statistics.median(values) for name, values in wall.items()}
    first, first_cpu = medians[next(iter(wall))], statistics.median(cpu[next(iter(cpu))])
    for name, median in medians.items():
        median_cpu = statistics.median(cpu[name])
        print(
            f"{name:32} {median:7.2f} s {median / first:6.2f}×   processor {median_cpu:7.2f} s "
            f"{median_cpu / first_cpu:6.2f}×   ({', '.join(f'{value:.2f}' for value in wall[name])})",
            flush=True,
        )
    return medians


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
