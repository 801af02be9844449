"""Best-fit-decreasing on the histogram against best-fit-decreasing sample by sample."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels.limits import UNLIMITED
from packer.planner.order.orders import histogram
from packer.planner.packing.best_fit import best_fit, decide_patterns
from tests import naive
from tests.kernels.limits import limits


def rows(packs):
    return [packs.pieces[s : s + z].tolist() for s, z in zip(packs.starts, packs.sizes, strict=True)]


@st.composite
def problems(draw, *, most=60):
    capacity = draw(st.integers(1, 200))
    return capacity, draw(st.lists(st.integers(1, capacity), min_size=1, max_size=most))


@given(problems(), st.sampled_from([1, 2, 7]))
def test_decision_equals_naive(problem, multiple):
    capacity, seqlens = problem
    capacity *= multiple
    bounds = limits(capacity, packed=True, segment_multiple=multiple)
    distinct, counts = histogram(np.array(seqlens, np.int32))
    packs, offsets, classes = decide_patterns(distinct[::-1].copy(), counts[::-1].copy(), bounds)
    longest_first = distinct[::-1]
    patterns = [longest_first[classes[a:b]].tolist() for a, b in pairwise(offsets)]
    used = Counter()
    residuals = []
    for pattern, many in zip(patterns, packs.tolist(), strict=True):
        used.update({length: many * times for length, times in Counter(pattern).items()})
        rooms = sum(naive.round_up(length, multiple) for length in pattern)
        residuals += [capacity - rooms] * many
    assert used == Counter(seqlens)
    naive_residuals = naive.best_fit_decreasing(
        [naive.round_up(length, multiple) for length in seqlens], capacity
    )
    assert sorted(residuals) == sorted(naive_residuals)


@given(
    problems(),
    st.one_of(st.just(UNLIMITED), st.integers(1, 4)),
    st.one_of(st.just(UNLIMITED), st.integers(0, 3)),
)
def test_packs_hold_every_sample_once_within_bounds(problem, max_samples, attention):
    capacity, seqlens = problem
    max_attention = attention if attention == UNLIMITED else max(seqlens) ** 2 * (1 + attention)
    bounds = limits(capacity, packed=True, max_samples=max_samples, max_attention=max_attention)
    packs = best_fit(np.array([seqlens], np.int32), bounds, key=np.uint64(1))
    packed = rows(packs)
    assert sorted(naive.flat(packed)) == list(range(len(seqlens)))
    assert all(naive.fits([[seqlens[sample] for sample in pack]], bounds) for pack in packed)
    assert packs.seqlens.tolist() == [seqlens[sample] for sample in packs.pieces]
    # any fit: of the packs that only room limits, no two could be one
    if max_samples == max_attention == UNLIMITED:
        filled = sorted(sum(seqlens[sample] for sample in pack) for pack in packed)
        assert len(filled) < 2 or filled[0] + filled[1] > capacity


@pytest.mark.parametrize("capacity", [64, 65, 4096, 4097, 2**31 - 1])
def test_capacities_around_the_words_of_the_bitmap(capacity):
    seqlens = [capacity, capacity - 1, 1, capacity // 2, capacity - capacity // 2, 1, 1]
    packs = best_fit(np.array([seqlens], np.int32), limits(capacity, packed=True), key=np.uint64(1))
    assert len(packs) == len(naive.best_fit_decreasing(seqlens, capacity))


def test_ids_and_packs_come_in_random_order():
    seqlens = np.full((1, 64), 3, np.int32)
    first, second = (best_fit(seqlens, limits(6, packed=True), key=np.uint64(key)) for key in (1, 2))
    assert first.pieces.tolist() != second.pieces.tolist()
    assert first.pieces.tolist() != sorted(first.pieces.tolist())
