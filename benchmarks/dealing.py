"""How near does dealing bring steps to the epoch's mix, at what cost, and what does balance keep of it?

Micro-batches as the planner packs them, one a step; then dealt to steps of several. A design effect of 1 is
that of random samples. Time lost: Σ slot maxima · ranks / Σ cost − 1, cost 12·H·L + L², H = 4096.

    python benchmarks/dealing.py      (--lengths: an .npy file of more lengths, cut into pieces of 4,096)
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packer.kernels import balance, deal, mix
from packer.plan.counts import time_lost
from packer.planner import PlanConfig, make_plan
from packer.planner.order.threads import chunk_edges, run_chunks

NO_SOURCES = np.empty(0, np.int32)
NO_FILLERS = np.empty(0, np.bool_)
HIDDEN_SIZE = 4096


class Packed(NamedTuple):
    """M micro-batches in random order."""

    seqlens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    bounds: NDArray[np.int64]
    targets: NDArray[np.int64]
    distinct: tuple[NDArray[np.int64], NDArray[np.int64]]

    def histogram(self) -> NDArray[np.int64]:
        """Return (M, K) tokens by class."""
        starts, sizes = self.offsets[:-1], np.diff(self.offsets)
        out = np.empty((len(sizes), len(self.bounds)), np.int64)
        run_chunks(
            lambda _, first, last: mix.tokens_by_class(
                self.seqlens, NO_SOURCES, self.bounds, starts, sizes, first, last, out[first:last]
            ),
            chunk_edges(len(sizes), min_chunk=1 << 14),
        )
        return out

    def costs(self) -> NDArray[np.int64]:
        """Return (M,) 12·H·L + L²."""
        lengths = self.seqlens.astype(np.int64)
        return np.add.reduceat((12 * HIDDEN_SIZE + lengths) * lengths, self.offsets[:-1])

    def design_effect(self, order: NDArray[np.int64], step_size: int) -> float:
        """Return that of whole steps."""
        num_steps = len(order) // step_size
        rows = order[: num_steps * step_size]
        pieces = [self.seqlens[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        offsets = np.cumsum([0, *map(len, pieces)])
        tokens, squares = np.zeros(len(self.bounds), np.int64), np.zeros((len(self.bounds), 2), np.uint64)
        ratio = np.zeros(2, np.uint64)
        mix.sum_steps(
            np.concatenate(pieces),
            NO_SOURCES,
            self.bounds,
            offsets,
            NO_FILLERS,
            step_size,
            0,
            num_steps,
            tokens,
            squares,
            ratio,
        )
        effect = mix.design_effect(tokens, squares, ratio, num_steps)
        assert effect is not None
        return effect


def pack(lengths: NDArray[np.int32], config: PlanConfig) -> Packed:
    batches = list(make_plan(lengths, config).epoch(0).microbatches())
    sizes = np.concatenate([np.diff(batch.offsets) for batch in batches])
    distinct, counts = np.unique(lengths, return_counts=True)
    bounds, targets = mix.length_classes(distinct.astype(np.int64), counts)
    return Packed(
        seqlens=np.concatenate([batch.seqlens for batch in batches]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        bounds=bounds,
        targets=targets,
        distinct=(distinct.astype(np.int64), counts),
    )


def dealt(packed: Packed, hist: NDArray[np.int64], step_size: int) -> NDArray[np.int64]:
    edges = deal.window_edges(len(hist), step_size)
    order = np.empty(len(hist), np.int64)
    run_chunks(
        lambda _, first, last: deal.deal(
            hist[edges[first] : edges[last]],
            step_size,
            edges,
            first,
            last,
            packed.targets,
            np.uint64(1),
            order,
        ),
        chunk_edges(len(edges) - 1, min_chunk=2),
    )
    return order


def mixes(name: str, packed: Packed) -> None:
    hist = packed.histogram()
    at_random = packed.design_effect(np.arange(len(hist)), 8)
    effects = [packed.design_effect(dealt(packed, hist, size), size) for size in (2, 4, 8, 16, 32)]
    print(
        f"| {name} | {len(hist):,} | {at_random:.2f} |",
        *(f"{effect:.2f} |" for effect in effects),
        flush=True,
    )


def balanced(name: str, packed: Packed) -> None:
    hist, costs = packed.histogram(), packed.costs()
    for ranks, accum in ((8, 1), (8, 4), (32, 1)):
        size = ranks * accum
        edges, num_steps = deal.window_edges(len(hist), size), len(hist) // size
        order = dealt(packed, hist, size)
        before = _lost(costs, order, size, ranks)
        slots = order.copy()
        balance.even_out_slots(costs, size, ranks, 0, num_steps, np.uint64(1), slots)
        inside = _lost(costs, slots, size, ranks)
        spread = balance.SPREAD_SHARE * mix.random_spread(*packed.distinct, packed.bounds, num_steps)
        between = order.copy()
        balance.even_out_steps(
            hist, costs, size, ranks, edges, 0, len(edges) - 1, packed.targets, spread, np.uint64(1), between
        )
        balance.even_out_slots(costs, size, ranks, 0, num_steps, np.uint64(1), between)
        after = _lost(costs, between, size, ranks)
        effects = f"{packed.design_effect(order, size):.2f} → {packed.design_effect(between, size):.2f}"
        print(
            f"| {name} | {ranks} × {accum} | {before} | {inside} | {after} | {effects} |",
            flush=True,
        )


def _lost(costs: NDArray[np.int64], order: NDArray[np.int64], step_size: int, ranks: int) -> str:
    rows = order[: len(order) // step_size * step_size]
    by_slots, by_steps = time_lost(costs[rows], ranks, step_size // ranks)
    return f"{by_slots:.1%}, {by_steps:.1%}"


def fastest(work: Callable[[], Any], turns: int = 7) -> float:
    """Return milliseconds."""
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds) * 1e3


def speed(lengths: NDArray[np.int32]) -> None:
    drawn = lengths[np.random.default_rng(0).integers(0, len(lengths), 1_000_000)]
    config = PlanConfig(max_tokens=16_384)
    packed = pack(drawn, config)
    hist = packed.histogram()
    planning, counting = fastest(lambda: make_plan(drawn, config)), fastest(packed.histogram)
    print(f"1M lengths, windowed, 16k, {len(hist):,} micro-batches: planned in {planning:.0f} ms")
    for size in (8, 32):
        dealing = fastest(lambda size=size: dealt(packed, hist, size))  # type: ignore[misc]
        added = (counting + dealing) / planning
        print(
            f"E = {size}: classes counted in {counting:.1f} ms, dealt in {dealing:.1f} ms: {added:.0%} more"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--lengths", type=Path)
    options = parser.parse_args()
    azure, mooncake = (
        pq.read_table(options.data / f"{name}_lengths.parquet", columns=["length"])["length"]
        .to_numpy()
        .astype(np.int32)
        for name in ("azure_llm_2023", "mooncake")
    )
    lognormal = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 100_000), 1, 8192).astype(np.int32)
    sets = {
        "Azure, 16k": (azure, 16_384),
        "Mooncake cut at 32k": (np.minimum(mooncake, 32_768), 32_768),
        "lognormal, 8k": (lognormal, 8192),
    }
    if options.lengths:
        more = np.load(options.lengths)
        rest = more % 4096
        pieces = np.concatenate([np.full(int((more // 4096).sum()), 4096), rest[rest > 0]]).astype(np.int32)
        sets[f"{options.lengths.stem}, pieces of 4k"] = (pieces, 4096)
    every = {}
    for name, (lengths, budget) in sets.items():
        every[f"{name}, padded"] = pack(lengths, PlanConfig(max_tokens=budget))
        packed = PlanConfig(max_tokens=budget, layout="packed", packing="next-fit")
        every[f"{name}, packed at random"] = pack(lengths, packed)
        every[f"{name}, best-fit"] = pack(
            lengths, PlanConfig(max_tokens=budget, layout="packed", packing="best-fit")
        )
    print("| micro-batches | number | at random | dealt, E = 2 | 4 | 8 | 16 | 32 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, packed_set in every.items():
        mixes(name, packed_set)
    print("\nTime lost, by slots and by steps; cost 12·H·L + L²:\n")
    print("| micro-batches | ranks × accumulated | dealt | slots of like cost | exchanged | design effect |")
    print("|---|---|---|---|---|---|")
    for name, packed_set in every.items():
        balanced(name, packed_set)
    print()
    speed(azure)


if __name__ == "__main__":
    main()
