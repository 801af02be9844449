"""How fast does best-fit pack, beside lightbinpack, TRL and DeepSpeed?

Kernel: lengths as the packer likes them to packs as it gives them. End to end ("arrays"): an int32 array of
lengths to one array of sample ids and the offsets of the packs; ours takes and gives these anyway. All take
turns in one run; compilation is done before and reported apart. TRL's table has one byte a token, so that it
copies as little as it can. DeepSpeed does not fit best but next. Needs trl, and matplotlib for the figure.

    python benchmarks/packing_peers.py --sizes 1000 10000 100000 1000000 --figure benchmarks/packing_peers.svg
"""

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightbinpack
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.kernels.limits import Limits
from packer.planner import PlanConfig, make_plan
from packer.planner.choose.limits import limits_for
from packer.planner.packing.best_fit import best_fit

CAPACITY = 8192
SLOW = {"TRL": 1_000_000, "DeepSpeed next-fit": 4_000}


def lognormal(size: int) -> NDArray[np.int32]:
    return np.clip(np.random.default_rng(0).lognormal(6, 1.2, size), 1, CAPACITY).astype(np.int32)


def limits() -> Limits:
    return limits_for(PlanConfig(max_tokens=CAPACITY, layout="packed"))


def flattened(packs: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    ids = np.fromiter(itertools.chain.from_iterable(packs), np.int32)
    return ids, np.cumsum(np.fromiter(map(len, packs), np.int64, len(packs)))


def from_array_to_arrays(pack: Callable[..., Any], lengths: NDArray[np.int32]) -> Any:
    return flattened(pack(lengths.tolist(), CAPACITY))


def contenders(lengths: NDArray[np.int32]) -> dict[str, Callable[[], Any]]:
    """Return each packer as a function of nothing, its natural input at hand."""
    as_list = lengths.tolist()
    row, bounds, key = lengths[np.newaxis], limits(), np.uint64(1)
    everyone: dict[str, Callable[[], Any]] = {
        "packer best-fit": lambda: best_fit(row, bounds, key=key),
        "packer make_plan": lambda: make_plan(lengths, PlanConfig(max_tokens=CAPACITY, layout="packed")),
    }
    for name in ("obfd", "obfdp"):
        pack = getattr(lightbinpack, name)
        everyone[f"lightbinpack {name}"] = partial(pack, as_list, CAPACITY)
        everyone[f"lightbinpack {name}, arrays"] = partial(from_array_to_arrays, pack, lengths)
    if importlib.util.find_spec("trl") and len(lengths) <= SLOW["TRL"]:
        from trl.data_utils import _pack_bfd

        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        tokens = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], np.uint8)))
        table = pa.table({"input_ids": tokens})
        everyone["TRL"] = lambda: _pack_bfd(table, CAPACITY)
    if len(lengths) <= SLOW["DeepSpeed next-fit"]:
        from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as deepspeed

        everyone["DeepSpeed next-fit"] = lambda: deepspeed.batch_by_seqlens(as_list, CAPACITY)
    return everyone


def measure(size: int, turns: int) -> dict[str, float]:
    everyone = contenders(lognormal(size))
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    for turn in range(turns):
        for name, pack in everyone.items():
            if turn and name in SLOW:
                continue  # once is enough
            start = time.perf_counter()
            pack()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["packer best-fit"]
        print(f"| {size:,} | {name} | {median * 1e3:,.2f} | {ratio:,.1f} |", flush=True)
    return medians


def draw(results: dict[int, dict[str, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "packer"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in sorted({name for medians in results.values() for name in medians}):
        points = [(size, medians[name]) for size, medians in results.items() if name in medians]
        axes.loglog(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="samples", ylabel="seconds", title=f"Packing, lognormal lengths, capacity {CAPACITY:,}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--figure")
    options = parser.parse_args()
    start = time.perf_counter()
    small = lognormal(1000)
    best_fit(small[np.newaxis], limits(), key=np.uint64(1))
    make_plan(small, PlanConfig(max_tokens=CAPACITY, layout="packed"))
    print(f"compiled, or loaded from the cache, in {time.perf_counter() - start:.1f} s")
    print("| samples | packer | ms | ratio |\n|---|---|---|---|")
    results = {size: measure(size, options.turns) for size in options.sizes}
    if options.figure:
        draw(results, options.figure)


if __name__ == "__main__":
    main()
