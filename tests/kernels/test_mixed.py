"""Mixed rows: the kernel against its naive twin, and what a row must keep whatever the bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import mixed as kernels
from packer.kernels.bitmap import bitmap_levels
from packer.kernels.limits import UNLIMITED
from packer.planner.packing import mixed as module
from packer.planner.packing.mixed import mixed
from tests import naive
from tests.kernels.limits import limits


@st.composite
def problems(draw):
    """Lengths, who they belong to, and bounds that bite."""
    capacity = draw(st.integers(1, 60))
    multiple = draw(st.sampled_from([1, 1, 1, 2, 5]))
    capacity = max(capacity // multiple, 1) * multiple
    bounds = limits(
        capacity,
        packed=True,
        segment_multiple=multiple,
        max_samples=draw(st.one_of(st.just(UNLIMITED), st.integers(1, 6))),
        max_attention=draw(st.one_of(st.just(UNLIMITED), st.integers(capacity, capacity**2))),
    )
    longest = min(capacity, int(np.sqrt(min(bounds.max_attention, 2**40))))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=40))
    owners = draw(st.one_of(st.just([]), st.lists(st.integers(-1, 5), min_size=40, max_size=40)))
    return lengths, owners, bounds


@given(problems(), st.integers(1, 12), st.sampled_from([0, 0, 3]), st.booleans())
def test_rows_equal_those_of_the_naive_twin(problem, pool, keep, by_rank):
    lengths, owners, bounds = problem
    entries = [(length, sample) for sample, length in enumerate(lengths)]
    rows, left = naive.mixed(
        entries,
        bounds,
        owners,
        pool=pool,
        keep=keep,
        tries=kernels.TRIES,
        reach=kernels.REACH,
        gap_shift=kernels.GAP_SHIFT,
    )
    packed = np.array([length << 32 | sample for length, sample in entries], np.int64)
    classes = np.unique(lengths)[::-1].astype(np.int64).copy()
    starts, sizes = np.empty((2, len(packed)), np.int64)
    leftovers = np.empty(1, np.int64)
    num_rows = kernels.fill_rows(
        packed,
        np.array([0, len(packed)]),
        classes if by_rank else classes[:0],
        max(lengths),
        bitmap_levels(len(classes) if by_rank else max(lengths)),
        np.array(owners, np.int32),
        6 if owners else 0,
        int(bounds.budgets[0]),
        bounds.segment_multiple,
        bounds.max_samples,
        bounds.max_attention,
        pool,
        keep,
        starts,
        sizes,
        leftovers,
    )
    found = [
        [(int(entry) >> 32, int(entry) & 0xFFFFFFFF) for entry in packed[start : start + size]]
        for start, size in zip(starts[:num_rows], sizes[:num_rows], strict=True)
    ]
    assert found == rows
    assert leftovers[0] == len(left)
    behind = [(int(entry) >> 32, int(entry) & 0xFFFFFFFF) for entry in packed[len(packed) - len(left) :]]
    assert behind == left


@given(problems(), st.integers(0, 3))
def test_every_sample_is_in_one_row_that_keeps_its_bounds(problem, seed):
    lengths, owners, bounds = problem
    # pieces of one sample are neighbours, as the planner cuts them
    samples = np.sort(np.array(owners[: len(lengths)])) if owners else None
    packs = mixed(np.array([lengths], np.int32), samples, bounds, key=np.uint64(seed))
    rows = [packs.pieces[s : s + z].tolist() for s, z in zip(packs.starts, packs.sizes, strict=True)]
    assert sorted(naive.flat(rows)) == list(range(len(lengths)))
    for row in rows:
        assert naive.fits([[lengths[piece] for piece in row]], bounds)
        assert samples is None or len({int(samples[piece]) for piece in row}) == len(row)
    assert packs.seqlens.tolist() == [lengths[piece] for piece in packs.pieces]


@pytest.mark.parametrize("block", [5, 64, 1000])
def test_blocks_leave_nothing_behind(monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module, "POOL", max(2, block // 5))
    lengths = np.random.default_rng(0).integers(1, 60, (1, 5000)).astype(np.int32)
    packs = mixed(lengths, None, limits(100, packed=True), key=np.uint64(1))
    rows = [packs.pieces[s : s + z].tolist() for s, z in zip(packs.starts, packs.sizes, strict=True)]
    assert sorted(naive.flat(rows)) == list(range(5000))
    assert all(lengths[0, row].sum() <= 100 for row in rows)


def test_a_giant_among_few_needs_no_table(monkeypatch):
    lengths = np.array([[2**31 - 1, 5, 7]], np.int32)
    packs = mixed(lengths, None, limits(2**31 - 1, packed=True), key=np.uint64(1))
    assert sorted(packs.sizes.tolist()) == [1, 2]
