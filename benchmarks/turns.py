"""Contenders that take turns in one run, each in a process of its own, so that none profits from another."""

import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping


def take_turns(contenders: Mapping[str, str], *, turns: int) -> dict[str, float]:
    """Run Python programs in turn; print and return each one's median seconds, start-up included."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, program in contenders.items():
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(program)], check=True, stdout=subprocess.DEVNULL
            )
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = next(iter(medians.values()))
    for name, median in medians.items():
        listed = ", ".join(f"{value:.2f}" for value in seconds[name])
        print(f"{name:32} {median:8.2f} s  {median / first:6.3f}×  ({listed})", flush=True)
    return medians
