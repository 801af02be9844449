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

from packer.planner import PlanConfig, make_plan

CAPACITIES = (4096, 8192, 8193, 16_384, 32_768)


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


def compare_packs(name: str, lengths: NDArray[np.int32], capacities: tuple[int, ...]) -> None:
    for capacity in capacities:
        cut = np.minimum(lengths, capacity)
        options = {"max_tokens": capacity, "layout": "packed"}
        found = {
            packing: make_plan(cut, PlanConfig(packing=packing, **options)).header["epochs"][0]
            for packing in ("best-fit", "mixed", "next-fit")
        }
        bound, exact = found["mixed"]["figures"]["lower_bound"], exact_best_fit_decreasing(cut, capacity)
        best, mixed, uniform = (counts["num_microbatches"] for counts in found.values())
        effects = " | ".join(f"{counts['design_effect']['seqlen']:.2f}" for counts in found.values())
        print(
            f"| {name} | {capacity:,} | {bound:,} | {exact:,} | {best:,} | {mixed:,} | {uniform:,} "
            f"| {effects} |",
            flush=True,
        )


def compare_balance(lengths: NDArray[np.int32]) -> None:
    for grad_accum in (1, 4, 16):
        config = PlanConfig(
            max_tokens=32_768, layout="packed", dp_size=16, grad_accum=grad_accum, balance="flops"
        )
        counts = make_plan(lengths, config).header["epochs"][0]
        print(
            f"| 16 × {grad_accum} | {counts['figures']['rank_imbalance_before']:.2%} | "
            f"{counts['rank_imbalance']:.2%} | {counts['rank_imbalance_by_step']:.2%} | "
            f"{counts['design_effect']['seqlen']:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    options = parser.parse_args()

    print("| lengths | capacity | bound | exact | best-fit | mixed | next-fit | design effect of each | | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    compare_packs("lognormal, 1M", lognormal(1_000_000), CAPACITIES)
    for path in sorted(options.data.glob("*_lengths.parquet")):
        lengths = pq.read_table(path, columns=["length"])["length"].to_numpy().astype(np.int32)
        capacities = (*CAPACITIES, 262_144) if int(lengths.max()) > CAPACITIES[-1] else CAPACITIES
        compare_packs(path.stem.removesuffix("_lengths"), lengths, capacities)
    near = np.clip(np.random.default_rng(5).normal(4096, 512, 3000), 1, 16_384).astype(np.int32)
    compare_packs("normal, 4,096 ± 512", near, (16_384,))

    print("\n| window | padded / real − 1 | micro-batches |\n|---|---|---|")
    for window in (16, 64, 256, 1024):
        config = PlanConfig(max_tokens=16_384, dp_size=8, window=window)
        counts = make_plan(lognormal(2_000_000), config).header["epochs"][0]
        padding = counts["num_padded_tokens"] / counts["num_tokens"] - 1
        print(f"| {window} | {padding:.2%} | {counts['num_microbatches']:,} |", flush=True)

    print(
        "\n| ranks × accumulated | lost before | by slots | by steps | design effect |\n|---|---|---|---|---|"
    )
    compare_balance(lognormal(2_000_000))


if __name__ == "__main__":
    main()
