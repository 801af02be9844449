"""Samples dealt to a given number of rows, and rows that get the company they need."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels.limits import UNLIMITED
from packer.kernels.longest_first import deal_longest_first
from packer.planner.packing.best_fit import best_fit
from packer.planner.packing.company import with_company
from tests import naive
from tests.kernels.limits import limits


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=25).map(lambda rooms: sorted(rooms, reverse=True)),
    st.integers(1, 8),
    st.integers(1, 4),
    st.data(),
)
def test_rows_equal_those_of_the_naive_twin(rooms, num_rows, min_samples, data):
    bounds = limits(
        data.draw(st.integers(20, 60)),
        packed=True,
        min_samples=min_samples,
        max_samples=data.draw(st.one_of(st.just(UNLIMITED), st.integers(min_samples, 6))),
        max_attention=data.draw(st.one_of(st.just(UNLIMITED), st.integers(400, 900))),
    )
    owners = data.draw(
        st.one_of(st.just([]), st.lists(st.integers(-1, 3), min_size=len(rooms), max_size=len(rooms)))
    )
    squares = [room * room for room in rooms]
    row_of, counts = np.empty(len(rooms), np.int32), np.empty(num_rows, np.int64)
    lost = deal_longest_first(
        np.array(rooms, np.int64),
        np.array(squares, np.int64),
        np.array(owners, np.int32),
        4 if owners else 0,
        num_rows,
        bounds.min_samples,
        bounds.max_samples,
        int(bounds.budgets[0]),
        bounds.max_attention,
        row_of,
        counts,
    )
    expected = naive.deal_longest_first(rooms, squares, owners, num_rows, bounds)
    assert row_of.tolist() == expected
    assert counts.tolist() == [expected.count(row) for row in range(num_rows)]
    kept = [row for row in range(num_rows) if expected.count(row) >= min_samples]
    assert lost == sum(room for room, row in zip(rooms, expected, strict=True) if row not in kept)


def company(lengths, bounds, owners=None, seed=1):
    array = np.array([lengths], np.int32)
    packs = with_company(
        best_fit(array, bounds, key=np.uint64(seed)), array, owners, bounds, key=np.uint64(seed)
    )
    rows = [packs.pieces[s : s + z].tolist() for s, z in zip(packs.starts, packs.sizes, strict=True)]
    assert sorted(naive.flat(rows) + packs.leftover.tolist()) == list(range(len(lengths)))
    assert packs.seqlens[: packs.sizes.sum()].tolist() == [
        lengths[sample] for sample in packs.pieces[: packs.sizes.sum()]
    ]
    for row in rows:
        assert len(row) >= bounds.min_samples
        assert naive.fits([[lengths[sample] for sample in row]], bounds)
    return rows, packs.leftover.tolist()


@given(st.integers(1, 60), st.data())
def test_rows_get_enough_samples_or_none(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=40))
    company(lengths, limits(capacity, packed=True, min_samples=data.draw(st.integers(1, 4))))


def test_long_samples_share_the_short_ones():
    rows, left = company([100, 100, 1, 1, 1, 1, 1, 1], limits(128, packed=True, min_samples=4))
    assert not left
    assert len(rows) == 2


def test_what_finds_no_company_is_left_over():
    rows, left = company([9, 9, 9, 1], limits(10, packed=True, min_samples=2))
    assert len(rows) == 1
    assert len(left) == 2


def test_a_bound_on_samples_is_used_up():
    lengths = [30, 1, 1, 1, 20, 20, 8, 1, 1]  # best-fit fills rows with the long ones and strands the short
    rows, left = company(lengths, limits(40, packed=True, max_samples=3))
    assert len(rows) == 3
    assert not left
