"""How long a mixture of sources takes to plan, beside one source of as many samples.

    python benchmarks/mixtures.py 10_000_000 [--sources 8]

Lengths are lognormal. The mixture gives each source a share of its own, and plans as many tokens as all of
them hold, so that some are passed through more than once. Both plans stay in memory.
"""

import argparse
import resource
import time

import numpy as np

from packer.planner import PlanConfig, make_plan

MAX_TOKENS = 16_384
STEP = {"max_tokens": MAX_TOKENS, "dp_size": 8, "grad_accum": 4}


def lengths(num_samples: int, seed: int) -> np.ndarray:
    """Return lengths with a mean of about 400 tokens."""
    drawn = np.random.default_rng(seed).lognormal(5.6, 0.9, num_samples)
    return np.clip(drawn, 8, MAX_TOKENS).astype(np.int32)


def seconds_of(sources: object, config: PlanConfig, repeats: int) -> float:
    """Return how long the fastest of some runs takes."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        make_plan(sources, config)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("num_samples", type=lambda text: int(text.replace("_", "")))
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    sizes = np.random.default_rng(1).dirichlet(np.full(options.sources, 2.0)) * options.num_samples
    named = {f"source-{number}": lengths(max(1, int(size)), number) for number, size in enumerate(sizes)}
    shares = np.round(np.random.default_rng(2).dirichlet(np.full(options.sources, 2.0)), 3)
    shares[0] += 1 - shares.sum()
    mix = dict(zip(named, shares.tolist(), strict=True))
    one = np.concatenate(list(named.values()))
    small = {name: part[: 1 << 12] for name, part in named.items()}
    print(f"{len(one):,} samples, {int(one.sum()):,} tokens, {options.sources} sources")
    print("layout  packing   one source  mixture  ratio  peak GB")
    for layout, packing in (("packed", "mixed"), ("padded", "windowed"), ("packed", "best-fit")):
        plain = PlanConfig(layout=layout, packing=packing, **STEP)
        mixed = PlanConfig(
            layout=layout, packing=packing, mix=mix, total_tokens=int(one.sum(dtype=np.int64)), **STEP
        )
        warm = PlanConfig(layout=layout, packing=packing, mix=mix, total_steps=20, **STEP)
        make_plan(small, warm)  # compiles
        alone, together = seconds_of(one, plain, options.repeats), seconds_of(named, mixed, options.repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{layout:7} {packing:9} {alone:9.1f}s {together:7.1f}s {together / alone:6.2f} {peak:8.1f}")


if __name__ == "__main__":
    main()
