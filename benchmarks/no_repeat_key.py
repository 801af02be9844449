"""How many more micro-batches does a key that may not repeat take?

python benchmarks/no_repeat_key.py

200,000 short texts, some 345 of them in a micro-batch of 16,384 tokens; keys at random.
"""

from typing import Any

import numpy as np

from packer.planner import PlanConfig, make_plan

NUM_SAMPLES = 200_000
VARIANTS: dict[str, dict[str, Any]] = {
    "windowed": {},
    "windowed, one shape a step": {"same_num_samples": True, "same_seqlen": True},
    "windowed, pairs": {"max_tokens": {"query": 16_384, "answer": 16_384}},
    "mixed": {"layout": "packed"},
    "best-fit": {"layout": "packed", "packing": "best-fit"},
}


def main() -> None:
    random = np.random.default_rng(0)
    query, answer = (
        np.minimum(random.lognormal(3.6, 0.6, NUM_SAMPLES).astype(np.int32) + 2, 512) for _ in range(2)
    )
    print("| packing | free | " + " | ".join(f"{n} samples a key" for n in (1, 10, 100)) + " |")
    print("|---|---|---|---|---|")
    for name, options in VARIANTS.items():
        counts = []
        for samples_of_key in (None, 1, 10, 100):
            key = random.integers(0, NUM_SAMPLES // (samples_of_key or 1), NUM_SAMPLES)
            config = PlanConfig(
                **{"max_tokens": 16_384, "no_repeat_key": "key" if samples_of_key else None} | options
            )
            plan = make_plan(query, config, metrics={"key": key, "query": query, "answer": answer})
            counts.append(plan.header["epochs"][0]["num_microbatches"])
        more = " | ".join(f"{count / counts[0] - 1:+.1%}" for count in counts[1:])
        print(f"| {name} | {counts[0]:,} | {more} |", flush=True)


if __name__ == "__main__":
    main()
