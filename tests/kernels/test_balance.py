"""Sums of micro-batches, columns of equal cost, and how uneven the ranks are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import balance as kernels
from tests import naive


@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(1, 9)
)
def test_measure_equals_naive(microbatches, multiple):
    seqlens = np.array(naive.flat(microbatches), np.int32)
    sizes = np.array([len(microbatch) for microbatch in microbatches])
    starts = np.cumsum(sizes) - sizes
    tokens, longest, rooms, costs = np.empty((4, len(sizes)), np.int64)
    kernels.measure(seqlens, starts, sizes, 0, len(sizes), multiple, 12, tokens, longest, rooms, costs)
    assert tokens.tolist() == [sum(m) for m in microbatches]
    assert longest.tolist() == [max(m) for m in microbatches]
    if multiple > 1:
        assert rooms.tolist() == [sum(naive.round_up(length, multiple) for length in m) for m in microbatches]
    assert costs.tolist() == [sum(12 * length + length**2 for length in m) for m in microbatches]
    # what is not wanted is the array of tokens itself
    kernels.measure(seqlens, starts, sizes, 0, len(sizes), 1, 12, rooms, longest, rooms, rooms)
    assert rooms.tolist() == tokens.tolist()


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_balance_equals_naive(dp_size, columns, data):
    count = dp_size * sum(columns)
    costs = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    keys = [data.draw(st.integers(0, 2**64 - 1)) for _ in columns]
    rows = np.arange(count)
    edges = np.cumsum([0, *columns]) * dp_size
    loads = np.zeros(dp_size, np.int64)
    kernels.balance(np.array(costs, np.int64), rows, edges, dp_size, np.array(keys, np.uint64), loads)
    expected, naive_loads = [], [0] * dp_size
    for first, many, key in zip(edges, columns, keys, strict=False):
        inside = costs[first : first + many * dp_size]
        expected += [first + place for place in naive.balance(inside, many, key, naive_loads)]
    assert rows.tolist() == expected
    assert loads.tolist() == naive_loads


@given(st.integers(1, 4), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_imbalance_equals_naive(dp_size, costs):
    costs = costs * dp_size
    slots = [costs[first : first + dp_size] for first in range(0, len(costs), dp_size)]
    expected = sum(max(slot) / (sum(slot) / dp_size) - 1 for slot in slots) / len(slots)
    measured = kernels.imbalance(np.array(costs, np.int64), np.arange(len(costs)), dp_size)
    assert measured == pytest.approx(expected, abs=1e-9)
