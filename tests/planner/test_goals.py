"""How good plans are: never worse than exact best-fit-decreasing, ranks that finish together."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.packing_quality import exact_best_fit_decreasing
from packer.planner import PlanConfig, make_plan

LOGNORMAL = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 60_000), 1, 8192).astype(np.int32)


def lengths_of(name):
    """Return lognormal lengths, or those of a request trace."""
    if name == "lognormal":
        return LOGNORMAL
    path = Path(__file__).parents[2] / "benchmarks" / "data" / f"{name}_lengths.parquet"
    return pq.read_table(path)["length"].to_numpy()


@pytest.mark.parametrize("capacity", [4096, 8192, 8193, 32768])
@pytest.mark.parametrize("name", ["lognormal", "azure_llm_2023", "mooncake"])
def test_never_more_packs_than_exact_best_fit_decreasing(name, capacity):
    lengths = np.minimum(lengths_of(name), capacity)
    config = PlanConfig(max_tokens=capacity, layout="packed", packing="best-fit")
    plan = make_plan(lengths, config)
    counts = plan.header["epochs"][0]
    assert counts["num_microbatches"] <= exact_best_fit_decreasing(lengths, capacity)
    bound = counts["figures"]["lower_bound"]
    assert bound <= counts["num_microbatches"] <= bound * 1.0003 + 1


@pytest.mark.parametrize("packing", ["best-fit", "windowed"])
def test_a_minimum_of_samples_costs_next_to_nothing(packing):
    """Eleven samples fill a row on average; that each has four takes no more rows and hardly drops any."""
    options = {"max_tokens": 8192, "layout": "packed", "packing": packing}
    free = make_plan(LOGNORMAL, PlanConfig(**options)).header["epochs"][0]
    bound = make_plan(LOGNORMAL, PlanConfig(min_samples=4, **options)).header["epochs"][0]
    assert bound["num_microbatches"] <= free["num_microbatches"] * 1.01
    assert bound["dropped"].get("min_samples", {"num_samples": 0})["num_samples"] <= 60


def test_flops_balance():
    """Lognormal lengths, rows of 32,768, 16 ranks × 16 micro-batches: the ranks lose half a percent."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 600_000), 1, 8192).astype(np.int32)
    options = {"max_tokens": 32_768, "layout": "packed", "dp_size": 16, "grad_accum": 16}
    plan = make_plan(lengths, PlanConfig(balance="flops", hidden_size=4096, **options))
    counts, epoch = plan.header["epochs"][0], plan.epoch(0)
    costs = np.array([epoch.microbatch(row).cost for row in range(epoch.num_microbatches)])
    slots = costs.reshape(-1, 16)
    lost = slots.max(axis=1).sum() * 16 / slots.sum() - 1
    assert counts["rank_imbalance"] == pytest.approx(lost)
    assert lost <= 0.005
    assert counts["rank_imbalance_by_step"] <= 1e-3
    assert counts["design_effect"]["seqlen"] <= 0.95
