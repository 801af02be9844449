"""Repairs of packed rows: enough samples in each, no two pieces of one sample in any."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import repair as kernels
from packer.planner.packing.best_fit import best_fit
from packer.planner.packing.repair import separate, top_up
from tests import naive
from tests.kernels.limits import limits


def rows(packs):
    return [packs.pieces[s : s + z].tolist() for s, z in zip(packs.starts, packs.sizes, strict=True)]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30)), min_size=1, max_size=6),
    st.lists(st.integers(1, 15), max_size=12).map(sorted),
)
def test_top_up_equals_naive(short, spare):
    needs, free = (np.array(column, np.int64) for column in zip(*short, strict=True))
    takers = np.empty(len(spare), np.int64)
    squares = np.zeros(len(spare), np.int64)
    kernels.top_up(needs, free, np.zeros_like(free), np.array(spare, np.int64), squares, takers)
    expected = np.full(len(spare), -1)
    for pack, chosen in enumerate(naive.top_up(needs.tolist(), free.tolist(), spare)):
        expected[chosen] = pack
    assert takers.tolist() == expected.tolist()


@given(st.integers(1, 60), st.data())
def test_rows_get_enough_samples_or_none(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=40))
    bounds = limits(capacity, packed=True, min_samples=data.draw(st.integers(2, 4)))
    packs = top_up(best_fit(np.array([lengths], np.int32), bounds, key=np.uint64(1)), bounds)
    packed = rows(packs)
    assert sorted(naive.flat(packed) + packs.leftover.tolist()) == list(range(len(lengths)))
    for row in packed:
        assert len(row) >= bounds.min_samples
        assert naive.fits([[lengths[sample] for sample in row]], bounds)
    assert packs.seqlens.tolist() == [lengths[sample] for sample in packs.pieces]


def test_a_short_row_takes_the_smallest_samples_of_others():
    bounds = limits(10, packed=True, min_samples=2)
    lengths = [9, 4, 3, 1, 1, 1]  # best-fit: 9+1, 4+3+1+1
    packs = top_up(best_fit(np.array([lengths], np.int32), bounds, key=np.uint64(1)), bounds)
    assert not len(packs.leftover)
    short = limits(10, packed=True, min_samples=3)
    assert len(top_up(best_fit(np.array([lengths], np.int32), short, key=np.uint64(1)), short).leftover)


@given(st.integers(1, 40), st.data())
def test_pieces_of_one_sample_are_separated(limit, data):
    seqlens = data.draw(st.lists(st.integers(1, 4 * limit), min_size=1, max_size=12))
    capacity = data.draw(st.integers(limit, 4 * limit))
    pieces = [(sample, min(limit, n - at)) for sample, n in enumerate(seqlens) for at in range(0, n, limit)]
    owners = np.array([sample for sample, _ in pieces], np.int32)
    lengths = np.array([[length for _, length in pieces]], np.int32)
    bounds = limits(capacity, packed=True, min_samples=data.draw(st.sampled_from([1, 1, 2])))
    packs = top_up(best_fit(lengths, bounds, key=np.uint64(1)), bounds)
    packs = separate(packs, owners, bounds, np.uint64(2))
    packed = rows(packs)
    assert sorted(naive.flat(packed) + packs.leftover.tolist()) == list(range(len(pieces)))
    for row in packed:
        assert len({int(owners[piece]) for piece in row}) == len(row) >= bounds.min_samples
        assert naive.fits([lengths[0, row].tolist()], bounds)
    for start, size in zip(packs.starts, packs.sizes, strict=True):
        inside = slice(start, start + size)
        assert packs.seqlens[inside].tolist() == lengths[0, packs.pieces[inside]].tolist()
    if bounds.min_samples == 1:
        assert not len(packs.leftover)
