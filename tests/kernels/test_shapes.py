"""The choice of few shapes against all choices."""

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
