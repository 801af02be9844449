"""The choice of few shapes against all choices."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.planner.order.orders import histogram
from packer.planner.shape import choose_shapes
from tests import naive


@given(st.lists(st.integers(1, 40), min_size=1, max_size=14), st.integers(1, 5), st.sampled_from([1, 4]))
def test_shapes_cost_what_the_best_choice_costs(lengths, num_shapes, multiple):
    shapes = choose_shapes(*histogram(np.array(lengths, np.int32)), num_shapes=num_shapes, multiple=multiple)
    assert 1 <= len(shapes) <= num_shapes
    assert (shapes % multiple == 0).all()
    assert shapes.tolist() == sorted(set(shapes.tolist()))
    cost = sum(naive.round_up(length, shapes=shapes.tolist()) for length in lengths)
    assert cost == naive.shapes_cost(lengths, num_shapes, multiple)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(1, 4), st.integers(40, 200))
def test_shapes_count_what_a_micro_batch_holds(lengths, num_shapes, budget):
    shapes = choose_shapes(
        *histogram(np.array(lengths, np.int32)), num_shapes=num_shapes, multiple=1, budget=budget
    )

    def cost(chosen):
        padded = [naive.round_up(length, shapes=chosen) for length in lengths]
        return sum((shape << 10) + (budget << 10) // 4 // (budget // shape) for shape in padded)

    distinct = sorted(set(lengths))
    choices = [
        [*others, distinct[-1]]
        for count in range(num_shapes)
        for others in combinations(distinct[:-1], count)
    ]
    assert cost(shapes.tolist()) == min(map(cost, choices))
