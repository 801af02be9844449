"""How does packing grow with the number of samples, in time and in memory?

Everything is held against one counting scatter of the ids, in one thread, in the same run. Memory is
anonymous memory (RssAnon), at its peak.

    python benchmarks/packing_scale.py --sizes 10000000 100000000 --folder /tmp
    python benchmarks/packing_scale.py --sizes 1000000000 --packings best-fit --folder /tmp
"""

import argparse
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from disk import write_zeros
from numpy.typing import NDArray

from packer.kernels import counting
from packer.planner import PlanConfig, make_plan
from packer.planner.choose.limits import limits_for
from packer.planner.packing.pack import pack

CONFIGS = {
    "best-fit": PlanConfig(max_tokens=8192, layout="packed"),
    "windowed": PlanConfig(max_tokens=16_384),
    "windowed packed": PlanConfig(max_tokens=8192, layout="packed", packing="windowed"),
    "windowed pipeline": PlanConfig(max_tokens=16_384, dp_size=8, same_num_samples=True, same_seqlen=True),
    "next-fit": PlanConfig(max_tokens=16_384, packing="next-fit"),
}


def lengths_on_disk(size: int, folder: Path) -> NDArray[np.int32]:
    """Write lognormal lengths, and map them as a metric file is mapped."""
    path = folder / f"lengths-{size}.bin"
    with path.open("wb") as stream:
        for first in range(0, size, 10_000_000):
            drawn = np.random.default_rng(first).lognormal(6, 1.2, min(10_000_000, size - first))
            np.clip(drawn, 1, 8192).astype(np.int32).tofile(stream)
    return np.memmap(path, np.int32, "r")


def anonymous_gib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("no RssAnon in /proc/self/status")


@contextmanager
def peak_memory(seen: list[float]) -> Iterator[None]:
    """Append the highest anonymous memory while the block runs."""
    stop = threading.Event()
    peak = [0.0]

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], anonymous_gib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        seen.append(peak[0])


def timed(work: Callable[[], Any], turns: int) -> tuple[float, float]:
    """Return the median seconds and the highest memory."""
    seconds, memory = [], []
    for _ in range(turns):
        start = time.perf_counter()
        with peak_memory(memory):
            work()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2], max(memory)


def scatter(lengths: NDArray[np.int32]) -> None:
    counts = np.zeros(8193, np.int64)
    counting.count_lengths(lengths, 0, len(lengths), counts)
    cursors = np.cumsum(counts) - counts
    counting.scatter_by_length(lengths, 0, len(lengths), cursors, np.empty(len(lengths), np.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--packings", nargs="+", default=list(CONFIGS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    print("| samples | what | s | × scatter | GiB |\n|---|---|---|---|---|")
    for size in options.sizes:
        turns = options.turns if size < 10**9 else 1
        lengths = lengths_on_disk(size, options.folder)
        few = np.ascontiguousarray(lengths[:1000])
        few.flags.writeable = False  # as a memory map is, so that the same kernels are compiled
        scatter(few)
        base, memory = timed(partial(scatter, lengths), turns)
        print(f"| {size:,} | counting scatter | {base:.2f} | 1.0 | {memory:.2f} |", flush=True)
        for name in options.packings:
            config = CONFIGS[name]
            bounds = limits_for(config)
            pack(few[np.newaxis], None, bounds, config, np.uint64(1))
            work = partial(pack, lengths[np.newaxis], None, bounds, config, np.uint64(1))
            median, memory = timed(work, turns)
            seconds.setdefault(name, []).append(median)
            print(f"| {size:,} | {name} | {median:.2f} | {median / base:.1f} | {memory:.2f} |", flush=True)
            out = options.folder / "packing-scale-plan"
            make_plan(few, config, out=out, overwrite=True)
            median, memory = timed(partial(make_plan, lengths, config, out=out, overwrite=True), 1)
            written = sum(file.stat().st_size for file in out.rglob("*"))
            shutil.rmtree(out)
            zeros = write_zeros(options.folder / "zeros", written)
            print(
                f"| {size:,} | {name}: published plan | {median:.2f} | {(median - zeros) / base:.1f} + "
                f"{zeros:.2f} s to write {written / 2**30:.2f} GiB | {memory:.2f} |",
                flush=True,
            )
        Path(lengths.filename).unlink()
    if len(options.sizes) > 1:
        decades = math.log(options.sizes[-1] / options.sizes[0])
        for name, values in seconds.items():
            print(f"slope of {name}: {math.log(values[-1] / values[0]) / decades:.3f}")


if __name__ == "__main__":
    main()
