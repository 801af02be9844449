"""The bound below which no packing can go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.planner.order.orders import histogram
from packer.planner.packing.lower_bound import lower_bound
from tests import naive
from tests.kernels.limits import limits


@given(st.integers(1, 40), st.data())
def test_bound_equals_naive_and_is_one(capacity, data):
    rooms = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=30))
    bound = lower_bound(*histogram(np.array(rooms, np.int32)), limits(capacity, packed=True))
    assert bound == naive.lower_bound(rooms, capacity)
    assert bound <= len(naive.best_fit_decreasing(rooms, capacity))


def test_samples_of_two_thirds_cannot_share():
    lengths, counts = np.array([66]), np.array([10])
    assert lower_bound(lengths, counts, limits(100, packed=True)) == 10


def test_padding_of_segments_and_max_samples_count():
    lengths, counts = np.array([1]), np.array([64])
    assert lower_bound(lengths, counts, limits(64, packed=True)) == 1
    assert lower_bound(lengths, counts, limits(64, packed=True, segment_multiple=8)) == 8
    assert lower_bound(lengths, counts, limits(64, packed=True, max_samples=2)) == 32
