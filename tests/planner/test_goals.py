"""How good plans are: never worse than exact best-fit-decreasing, ranks that finish together."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.packing_quality import exact_best_fit_decreasing
from packer.errors import SampleTooLongError
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


@pytest.mark.parametrize("packing", ["mixed", "best-fit", "windowed"])
def test_a_minimum_of_samples_drops_nothing(packing):
    """Eleven samples fill a row on average; that each has four takes hardly more rows."""
    lengths = np.minimum(LOGNORMAL, 8000)
    options = {"max_tokens": 8192, "layout": "packed", "packing": packing, "remainder": "keep"}
    free = make_plan(lengths, PlanConfig(**options)).header["epochs"][0]
    bound = make_plan(lengths, PlanConfig(min_samples=4, **options)).header["epochs"][0]
    assert bound["num_microbatches"] <= free["num_microbatches"] * 1.02
    assert not bound["dropped"]


@pytest.mark.parametrize("packing", ["mixed", "best-fit"])
def test_bounds_on_samples_take_few_rows(packing):
    azure = lengths_of("azure_llm_2023")
    options = {"max_tokens": 16_384, "layout": "packed", "packing": packing}
    least = make_plan(azure, PlanConfig(min_samples=8, **options)).header["epochs"][0]
    assert least["num_samples"] == len(azure)
    assert least["num_microbatches"] <= 2_800
    most = make_plan(azure, PlanConfig(max_samples=8, **options)).header["epochs"][0]
    assert most["num_microbatches"] == -(-len(azure) // 8)
    # no row was left over, and none takes more samples than it may
    assert most["num_samples"] == len(azure)


def test_a_sample_that_never_finds_company_is_too_long():
    azure = lengths_of("azure_llm_2023")
    options = {"max_tokens": 16_384, "min_samples": 8}
    with pytest.raises(SampleTooLongError, match="--min-samples 8 with the shortest others"):
        make_plan(azure, PlanConfig(**options))
    cut = make_plan(azure, PlanConfig(too_long="split", remainder="keep", **options)).header["epochs"][0]
    left = cut["dropped"].get("min_samples", {"num_samples": 0})["num_samples"]
    assert left < 8  # fewer than a micro-batch
    dropped = make_plan(azure, PlanConfig(too_long="drop", **options)).header["dropped"]
    assert dropped["too_long"]["num_samples"] == np.count_nonzero(azure > 2048)


MIXES = [
    ("azure_llm_2023", 8192),
    ("azure_llm_2023", 16_384),
    ("azure_llm_2023", 32_768),
    ("mooncake", 4096),
    ("mooncake", 32_768),
    ("mooncake", 262_144),
    ("lognormal", 8192),
]


@pytest.mark.parametrize(("name", "capacity"), MIXES)
def test_mixed_rows_are_full_and_each_a_mix(name, capacity):
    lengths = np.minimum(lengths_of(name)[:100_000], capacity)
    fewest = exact_best_fit_decreasing(lengths, capacity)
    options = {"max_tokens": capacity, "layout": "packed"}
    mixed = make_plan(lengths, PlanConfig(**options)).header["epochs"][0]
    more = 1.005 if len(lengths) < 2 * fewest else 1.001
    assert mixed["num_microbatches"] <= max(more * fewest, fewest + 2)
    uniform = make_plan(lengths, PlanConfig(packing="next-fit", **options)).header["epochs"][0]
    assert mixed["design_effect"]["seqlen"] <= 1.1 * uniform["design_effect"]["seqlen"]
    for grad_accum in (4, 8):
        dealt = make_plan(lengths, PlanConfig(grad_accum=grad_accum, **options)).header["epochs"][0]
        assert dealt["design_effect"]["seqlen"] <= 0.95


@pytest.mark.parametrize(
    ("name", "capacity", "goals"),
    [("azure_llm_2023", 16_384, (2.5, 0.5, 0.3)), ("mooncake", 32_768, (0.65, 0.3, 0.15))],
)
def test_padded_micro_batches_are_dealt_to_like_steps(name, capacity, goals):
    lengths = np.minimum(lengths_of(name), capacity)
    for grad_accum, goal in zip((8, 16, 32), goals, strict=True):
        plan = make_plan(lengths, PlanConfig(max_tokens=capacity, grad_accum=grad_accum))
        assert plan.header["epochs"][0]["design_effect"]["seqlen"] <= goal


def test_lengths_near_a_fraction_of_the_row():
    """Four fill a row on average: best-fit-decreasing takes 6 % over the bound, and 1 % is possible."""
    lengths = np.clip(np.random.default_rng(5).normal(4096, 512, 3000), 1, 16_384).astype(np.int32)
    counts = make_plan(lengths, PlanConfig(max_tokens=16_384, layout="packed")).header["epochs"][0]
    assert counts["num_microbatches"] <= 1.03 * counts["figures"]["lower_bound"]


@pytest.mark.parametrize(("name", "capacity"), MIXES[:3])
def test_mates_are_others_in_every_epoch(name, capacity):
    lengths = np.minimum(lengths_of(name), capacity)
    plan = make_plan(lengths, PlanConfig(max_tokens=capacity, layout="packed", epochs=2, remainder="keep"))
    rows = []
    for number in range(2):
        row_of, epoch = np.empty(len(lengths), np.int64), plan.epoch(number)
        for row in range(epoch.num_microbatches):
            row_of[epoch.microbatch(row).sample_ids] = row
        rows.append(row_of)
    sizes = np.bincount(rows[0])
    again = np.unique(np.stack(rows), axis=1, return_counts=True)[1]
    pairs, met_again = (sizes * (sizes - 1)).sum(), (again * (again - 1)).sum()
    chance = pairs / (len(lengths) * (len(lengths) - 1))
    assert met_again / pairs <= 3 * chance


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
