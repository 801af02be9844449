"""How good are the plans: packs over exact best-fit-decreasing, padding, and balance of the ranks?

python benchmarks/packing_quality.py      (--data: another folder of lengths)
"""

import argparse
import bisect
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packer.plan import Plan
from packer.planner import PlanConfig, make_plan

CAPACITIES = (4096, 8192, 8193, 32_768)


def lognormal(size: int) -> NDArray[np.int32]:
    return np.clip(np.random.default_rng(0).lognormal(6, 1.2, size), 1, 8192).astype(np.int32)


def exact_best_fit_decreasing(lengths: NDArray[np.int32], capacity: int) -> int:
    """Return the number of packs, sample by sample, with nothing but a sorted list of residuals."""
    residuals: list[int] = []
    many: Counter[int] = Counter()
    packs = 0
    for length in np.sort(lengths)[::-1].tolist():
        at = bisect.bisect_left(residuals, length)
        if at == len(residuals):
            packs += 1
            rest = capacity - length
        else:
            rest = residuals[at] - length
            many[residuals[at]] -= 1
            if not many[residuals[at]]:
                del residuals[at]
        if not many[rest]:
            bisect.insort(residuals, rest)
        many[rest] += 1
    return packs


def compare_packs(name: str, lengths: NDArray[np.int32]) -> None:
    for capacity in CAPACITIES:
        cut = np.minimum(lengths, capacity)
        counts = make_plan(cut, PlanConfig(max_tokens=capacity, layout="packed")).header["epochs"][0]
        bound, packs = counts["figures"]["lower_bound"], counts["num_microbatches"]
        exact = exact_best_fit_decreasing(cut, capacity)
        print(
            f"| {name} | {capacity:,} | {bound:,} | {exact:,} | {packs:,} | {packs / bound - 1:.1e} |",
            flush=True,
        )


def costs(plan: Plan, ranks: int) -> NDArray[np.int64]:
    epoch = plan.epoch(0)
    return np.array([epoch.microbatch(row).cost for row in range(epoch.num_microbatches)]).reshape(-1, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    options = parser.parse_args()

    print("| lengths | capacity | bound | exact best-fit-decreasing | packs | over the bound |")
    print("|---|---|---|---|---|---|")
    compare_packs("lognormal, 1M", lognormal(1_000_000))
    for path in sorted(options.data.glob("*_lengths.parquet")):
        lengths = pq.read_table(path, columns=["length"])["length"].to_numpy().astype(np.int32)
        compare_packs(path.stem.removesuffix("_lengths"), lengths)

    print("\n| window | padded / real − 1 | micro-batches |\n|---|---|---|")
    for window in (16, 64, 256, 1024):
        config = PlanConfig(max_tokens=16_384, dp_size=8, window=window)
        counts = make_plan(lognormal(2_000_000), config).header["epochs"][0]
        padding = counts["num_padded_tokens"] / counts["num_tokens"] - 1
        print(f"| {window} | {padding:.2%} | {counts['num_microbatches']:,} |", flush=True)

    print("\n| balance steps | slots: max / mean − 1 | before | ranks over the epoch |\n|---|---|---|---|")
    for steps in (1, 4, 16, 64):
        config = PlanConfig(
            max_tokens=32_768,
            layout="packed",
            dp_size=16,
            balance="flops",
            hidden_size=4096,
            balance_steps=steps,
        )
        plan = make_plan(lognormal(2_000_000), config)
        before = plan.header["epochs"][0]["figures"]["rank_imbalance_before"]
        slots = costs(plan, 16)
        after = (slots.max(axis=1) / slots.mean(axis=1) - 1).mean()
        ranks = slots.sum(axis=0)
        print(f"| {steps} | {after:.3%} | {before:.2%} | {ranks.max() / ranks.mean() - 1:.1e} |", flush=True)


if __name__ == "__main__":
    main()
