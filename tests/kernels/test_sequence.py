"""Steps in the order in which sources stay nearest to their shares."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from packer.kernels import sequence as kernels
from tests import naive


def in_sequence(deviations, first=0, sums=None):
    order = np.full(len(deviations), -1, np.int64)
    sums = np.zeros(deviations.shape[1], np.int64) if sums is None else sums
    kernels.sequence(deviations, first, len(deviations), sums, order)
    return order


@given(st.integers(1, 3), st.integers(0, 150), st.data())
def test_sequence_equals_naive(num_sources, num_steps, data):
    values = st.integers(-5000, 5000) | st.sampled_from([-(1 << 20), 1 << 20])
    deviations = data.draw(arrays(np.int64, (num_steps, num_sources), elements=values))
    first = data.draw(st.integers(0, num_steps))
    found = in_sequence(deviations, first)
    expected = naive.sequence(deviations[first:].tolist(), kernels.REACH)
    assert found[first:].tolist() == [first + step for step in expected]
    assert (found[:first] == -1).all()


def test_running_totals_stay_near_nothing_and_no_step_waits_for_long():
    rng = np.random.default_rng(0)
    deviations = (rng.standard_normal((4000, 3)) * 4096).astype(np.int64)
    deviations -= deviations.mean(axis=0).astype(np.int64)
    order = in_sequence(deviations)
    assert sorted(order) == list(range(4000))
    assert np.abs(order - np.arange(4000)).max() < 500
    sums = np.abs(np.cumsum(deviations[order], axis=0)).max(axis=0)
    assert (sums < 0.25 * np.abs(np.cumsum(deviations, axis=0)).max(axis=0)).all()


def test_deviations_are_in_units_of_what_is_tolerated():
    held = np.array([[300, 100], [0, 400]])
    out = np.empty_like(held)
    for share_bits in (10, 20):
        shares = np.array([3, 1]) * (1 << share_bits) // 4
        kernels.deviations_of(held, shares, share_bits, np.array([300, 100]), 0, 2, out)
        assert out.tolist() == [[0, 0], [-4096, 3 * 4096]]


def test_what_steps_hold_and_the_longest_of_each_source():
    seqlens, sources = np.array([5, 7, 2, 9], np.int32), np.array([0, 1, 1, 0], np.uint16)
    starts, sizes, rows = np.array([0, 2, 3]), np.array([2, 1, 1]), np.array([2, 0])
    held, longest = np.empty((1, 2), np.int64), np.zeros(2, np.int64)
    kernels.hold(seqlens, sources, starts, sizes, rows, 2, 0, 1, 0, held)
    assert held.tolist() == [[14, 7]]
    kernels.hold(seqlens, sources, starts, sizes, rows, 2, 0, 1, 10, held)
    assert held.tolist() == [[20, 10]]
    kernels.longest_of(seqlens, sources, starts, sizes, rows, 0, 2, longest)
    assert longest.tolist() == [9, 7]
