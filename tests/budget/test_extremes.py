"""Extremes of a plan, against a plain search of all its micro-batches."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packer
from packer.budget import Extreme, find_extremes
from packer.budget.extremes import typical
from packer.plan import MicroBatch, Plan
from tests import plans

LENGTHS = st.lists(st.integers(1, 40), min_size=8, max_size=60)


def rows_of(plan: Plan) -> list[tuple[int, int, MicroBatch]]:
    return [
        (epoch, row, plan.epoch(epoch).microbatch(row))
        for epoch in range(plan.num_epochs)
        for row in range(plan.epoch(epoch).num_microbatches)
    ]


def naive_area(plan: Plan, row: MicroBatch) -> int:
    return row.padded_seqlen * (1 if plan.layout == "packed" else len(row.seqlens))


def naive_attention(plan: Plan, row: MicroBatch) -> int:
    if plan.layout == "packed":
        return sum(seqlen**2 for seqlen in row.seqlens.tolist())
    return len(row.seqlens) * row.padded_seqlen**2


@given(LENGTHS, st.sampled_from(["padded", "packed"]), st.integers(1, 3))
def test_nothing_in_a_plan_is_larger_than_its_extremes(lengths: list[int], layout: Any, epochs: int) -> None:
    config = packer.PlanConfig(max_tokens=80, layout=layout, epochs=epochs, window=2)
    plan = packer.make_plan(lengths, config)
    extremes = find_extremes(plan)
    rows = [row for _, _, row in rows_of(plan)]
    areas = [naive_area(plan, row) for row in rows]
    assert max(extreme.area for extreme in extremes) == max(areas)
    assert extremes[0].area == min(areas)
    assert max(extreme.attention for extreme in extremes) == max(naive_attention(plan, row) for row in rows)
    assert max(extreme.seqlen for extreme in extremes) == max(row.padded_seqlen for row in rows)
    assert max(extreme.num_samples for extreme in extremes) == max(row.num_samples for row in rows)
    assert [extreme.area for extreme in extremes] == sorted(extreme.area for extreme in extremes)


@given(LENGTHS, st.sampled_from(["padded", "packed"]))
def test_an_extreme_says_what_its_row_is(lengths: list[int], layout: Any) -> None:
    plan = packer.make_plan(lengths, packer.PlanConfig(max_tokens=80, layout=layout, epochs=2))
    extremes = find_extremes(plan)
    for extreme in [*extremes, *typical(plan, 3)]:
        row = plan.epoch(extreme.epoch).microbatch(extreme.row)
        assert (extreme.seqlen, extreme.num_samples) == (row.padded_seqlen, row.num_samples)
        assert extreme.tokens == row.num_tokens
        assert extreme.area == naive_area(plan, row)
        assert extreme.attention == naive_attention(plan, row)
    names = [name for extreme in extremes for name in extreme.names]
    assert sorted(set(names)) == ["largest tensor", "longest", "most attention", "most samples", "smallest"]


def test_among_equal_tensors_the_one_with_the_most_attention_is_the_largest() -> None:
    rows = [[8, 8], [15, 1], [4, 12]]
    pieces = iter(range(6))
    planned = [plans.Row(pieces=[(next(pieces), n) for n in row], padded_seqlen=16) for row in rows]
    lengths = [n for row in rows for n in row]
    plan = plans.plan_in_memory(
        plans.facts(lengths, layout="packed"),
        [plans.epoch(planned, layout="packed")],
        dropped=plans.drops(),
    )
    (largest,) = [extreme for extreme in find_extremes(plan) if "largest tensor" in extreme.names]
    assert largest.row == 1


def test_a_plan_that_asks_for_few_shapes_shows_each() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    plan = packer.make_plan(lengths, packer.PlanConfig(max_tokens=64, max_samples=2, num_shapes=3))
    shapes = {(row.num_samples, row.padded_seqlen) for _, _, row in rows_of(plan)}
    assert {(extreme.num_rows, extreme.seqlen) for extreme in find_extremes(plan)} == shapes
    assert len(shapes) > 2


def test_of_pairs_the_largest_tensor_of_each_is_an_extreme() -> None:
    random = np.random.default_rng(0)
    source, target = random.integers(1, 30, 100), random.integers(1, 30, 100)
    config = packer.PlanConfig(max_tokens={"source": 90, "target": 120})
    plan = packer.make_plan(source, config, metrics={"source": source, "target": target})
    extremes = find_extremes(plan)
    for metric in ("source", "target"):
        (largest,) = [extreme for extreme in extremes if f"largest {metric}" in extreme.names]
        found = plan.epoch(0).microbatch(largest.row)
        areas = [row.num_samples * row.padded_seqlens[metric] for _, _, row in rows_of(plan)]
        assert found.num_samples * found.padded_seqlens[metric] == max(areas)


@pytest.mark.parametrize("most", [1, 4, 1000])
def test_typical_micro_batches_are_spread_over_all_sizes(most: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    plan = packer.make_plan(lengths, packer.PlanConfig(max_tokens=100))
    found: list[Extreme] = typical(plan, most)
    areas = [naive_area(plan, row) for _, _, row in rows_of(plan)]
    assert len({extreme.row for extreme in found}) == len(found) == min(most, len(areas))
    below = [sum(area <= extreme.area for area in areas) / len(areas) for extreme in found]
    assert all(share >= (place + 0.5) / len(found) - 0.01 for place, share in enumerate(below))
