"""How long does a plan take to write, to open, to read from and to verify?

Writing is held against writing the same bytes as zeros into one file, in the same run, both flushed to disk.

    python benchmarks/plan_io.py --samples 100000000 --folder /tmp
"""

import argparse
import resource
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
from disk import write_zeros

from packer.plan import DroppedSamples, PlanFacts, PlannedEpoch, load_plan, verify_plan, write_plan
from packer.plan.sources import PlanSource

SAMPLES_PER_MICROBATCH = 16
RANKS = 8


def epoch_of(num_samples: int) -> PlannedEpoch:
    """Return an epoch of micro-batches of 16 samples on 8 ranks."""
    num_rows = num_samples // SAMPLES_PER_MICROBATCH
    num_steps = num_rows // RANKS
    ids = np.arange(num_samples, dtype=np.int32)
    np.random.default_rng(0).shuffle(
        ids.reshape(-1, 1 << 4)
    )  # rows of 16, enough to defeat nothing but order
    seqlens = np.full(num_samples, 400, np.int32)
    return PlannedEpoch(
        sample_ids=ids,
        seqlens=seqlens,
        starts=None,
        offsets=np.arange(0, num_samples + 1, SAMPLES_PER_MICROBATCH),
        padded_seqlens=np.full(num_rows, 400, np.int32),
        costs=np.full(num_rows, 400 * SAMPLES_PER_MICROBATCH),
        is_filler=np.zeros(num_rows, np.bool_),
        is_repeat=np.zeros(num_rows, np.bool_),
        step_num_samples=np.full(num_steps, SAMPLES_PER_MICROBATCH * RANKS),
        step_num_tokens=np.full(num_steps, 400 * SAMPLES_PER_MICROBATCH * RANKS),
        step_num_loss_tokens=np.full(num_steps, 399 * SAMPLES_PER_MICROBATCH * RANKS),
        step_max_seqlen=np.full(num_steps, 400, np.int32),
        lr_scales=np.ones(num_steps),
        dropped=no_drops(),
    )


def no_drops() -> DroppedSamples:
    none = np.zeros(0, np.int64)
    return DroppedSamples(sample_ids=none, seqlens=none, num_tokens=none, reasons=none.astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--no-verify", action="store_true")
    arguments = parser.parse_args()
    num_samples = arguments.samples // (SAMPLES_PER_MICROBATCH * RANKS) * (SAMPLES_PER_MICROBATCH * RANKS)
    out = arguments.folder / "plan-io"
    shutil.rmtree(out, ignore_errors=True)
    config = {
        "layout": "padded", "count": "padded", "max_tokens": 6400, "dp_size": RANKS, "grad_accum": 1,
        "lr_scaling": "none", "lr_by": "samples", "remainder": "drop", "too_long": "error",
    }  # fmt: skip
    facts = PlanFacts(
        config=config,
        sources=[PlanSource(num_samples=num_samples, num_tokens=400 * num_samples)],
        loss_tokens="seqlen - 1",
    )
    epoch = epoch_of(num_samples)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    plan = write_plan(out, facts, [epoch], dropped=no_drops())
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    del epoch
    num_bytes = sum(path.stat().st_size for path in out.rglob("*.arrow"))
    zeros = write_zeros(arguments.folder / "zeros", num_bytes)
    print(f"samples {num_samples:,}: {num_bytes / 1e9:.2f} GB")
    print(f"write {seconds:.2f} s, the same bytes as zeros {zeros:.2f} s, ratio {seconds / zeros:.2f}")
    print(f"memory grown while writing: {grown:.0f} MB")
    opens = []
    for _ in range(5):
        start = time.perf_counter()
        plan = load_plan(out)
        opens.append(time.perf_counter() - start)
    print(f"open {statistics.median(opens) * 1e3:.2f} ms")
    last = plan.epoch(0).num_microbatches - 1
    start = time.perf_counter()
    plan.epoch(0).microbatch(last // 2)
    print(f"first micro-batch {1e3 * (time.perf_counter() - start):.2f} ms")
    epoch = plan.epoch(0)
    start = time.perf_counter()
    for row in range(10_000):
        epoch.microbatch(last // 2 - row)
    print(f"a micro-batch after that {1e2 * (time.perf_counter() - start):.2f} µs")
    if not arguments.no_verify:
        start = time.perf_counter()
        verify_plan(plan)
        print(f"verify {time.perf_counter() - start:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak resident (mapped pages included) {peak:.0f} MB")
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
