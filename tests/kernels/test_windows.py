"""The exact partition of windows against every start for every end, and what windows must keep."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import windows
from packer.kernels.limits import UNLIMITED
from packer.planner.order.orders import split_entries
from packer.planner.packing.windowed import windowed
from tests import naive
from tests.kernels.limits import limits


@dataclass
class Cut:
    groups: list[list[int]]
    left: list[int]


def partition(lengths, owners, bounds, width, charge):
    """Partition one window; return the micro-batches as positions in ``lengths``."""
    size = len(lengths)
    entries = np.array(lengths, np.int64) << 32 | np.arange(size)
    starts, sizes, left = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(1, np.int64)
    count = windows.partition_windows(
        entries,
        np.array([0, size]),
        max(lengths).bit_length(),
        bounds,
        width,
        charge,
        np.array(owners, np.int32),
        starts,
        sizes,
        left,
    )
    ids, seqlens = split_entries(entries)
    assert seqlens.tolist() == [lengths[sample] for sample in ids]
    groups = [ids[s : s + z].tolist() for s, z in zip(starts[:count], sizes[:count], strict=True)]
    rest = ids[size - left[0] :].tolist()
    assert sorted(naive.flat(groups) + rest) == list(range(size))
    return Cut(groups, rest)


@st.composite
def bounded(draw, lengths, *, min_samples=1):
    multiple = draw(st.sampled_from([1, 1, 4]))
    alone = naive.round_up(max(lengths), multiple)
    shapes = []
    if draw(st.integers(0, 3)) == 0:
        shapes = sorted({alone, *draw(st.lists(st.integers(1, alone), max_size=2))})
    return limits(
        draw(st.integers(alone, 6 * alone)),
        real=draw(st.booleans()),
        min_samples=min_samples,
        max_samples=draw(st.one_of(st.just(UNLIMITED), st.integers(min_samples, 6))),
        max_attention=draw(st.one_of(st.just(UNLIMITED), st.integers(alone**2, 4 * alone**2))),
        multiple=multiple,
        shapes=shapes,
    )


@given(st.data())
def test_partition_costs_what_the_naive_one_costs(data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=22))
    bounds = data.draw(bounded(lengths, min_samples=data.draw(st.sampled_from([1, 1, 2, 3]))))
    charge = data.draw(st.integers(0, 100))
    cut = partition(lengths, [], bounds, 1, charge)
    cost = 0
    for group in cut.groups:
        inside = [lengths[sample] for sample in group]
        assert naive.fits([inside], bounds)
        assert len(inside) >= bounds.min_samples
        cost += len(inside) * naive.round_up(max(inside), bounds.multiple, list(bounds.shapes)) + charge
    ascending = sorted(lengths)
    expected = naive.partition_cost(ascending, list(range(len(lengths))), bounds, charge)
    assert (len(cut.left), cost) == expected


@given(st.data())
def test_pieces_of_one_sample_are_kept_apart(data):
    lengths = data.draw(st.lists(st.sampled_from([3, 8, 8, 8]), min_size=1, max_size=20))
    most = len(lengths) - 1
    owners = data.draw(st.lists(st.integers(0, min(6, most)), min_size=len(lengths), max_size=len(lengths)))
    bounds = data.draw(bounded(lengths))
    width = data.draw(st.integers(1, 3))
    cut = partition(lengths, owners, bounds, width, 4)
    for group in cut.groups:
        assert len({owners[sample] for sample in group}) == len(group)
        assert naive.fits([[lengths[sample] for sample in group]], bounds)
    assert len(cut.left) == len(lengths) % width


@given(st.data())
def test_steps_of_one_shape(data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    bounds = data.draw(bounded(lengths, min_samples=data.draw(st.sampled_from([1, 2]))))
    width = data.draw(st.integers(2, 4))
    cut = partition(lengths, [], bounds, width, 10)
    assert len(cut.groups) % width == 0
    for first in range(0, len(cut.groups), width):
        step = cut.groups[first : first + width]
        assert len({len(group) for group in step}) == 1
        longest = max(lengths[sample] for group in step for sample in group)
        for group in step:
            assert naive.fits([[lengths[sample] for sample in group]], bounds, [longest])
    if bounds.min_samples == 1:
        assert len(cut.left) == len(lengths) % width


@given(st.data())
def test_best_fit_windows_equal_naive(data):
    capacity = data.draw(st.integers(1, 100))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=40))
    cuts = data.draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {0, len(lengths)}
    edges = np.array(sorted(cuts))
    size = len(lengths)
    entries = np.array(lengths, np.int64) << 32 | np.arange(size)
    starts, sizes = np.empty(size, np.int64), np.empty(size, np.int64)
    bounds = limits(capacity, packed=True)
    count = windows.best_fit_windows(
        entries,
        edges,
        max(lengths).bit_length(),
        bounds,
        *bitmap(capacity),
        starts,
        sizes,
    )
    ids, seqlens = split_entries(entries)
    packs = [ids[s : s + z].tolist() for s, z in zip(starts[:count], sizes[:count], strict=True)]
    assert sorted(naive.flat(packs)) == list(range(size))
    assert seqlens.tolist() == [lengths[sample] for sample in ids]
    for begin, end in pairwise(edges):
        inside = [pack for pack in packs if begin <= pack[0] < end]
        residuals = [capacity - sum(lengths[sample] for sample in pack) for pack in inside]
        assert sorted(residuals) == sorted(naive.best_fit_decreasing(lengths[begin:end], capacity))


def bitmap(capacity):
    from packer.kernels.bitmap import bitmap_levels

    levels = bitmap_levels(capacity)
    return levels, np.zeros(int(levels[-1]), np.uint64), np.zeros(capacity + 1, np.int32)


def test_many_windows_lose_nothing_and_pad_little():
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 1.2, 200_000), 1, 8192).astype(np.int32)
    for window, most in ((64, 0.035), (256, 0.012)):
        packed = windowed(
            lengths[np.newaxis],
            None,
            limits(16_384),
            window=window,
            width=1,
            same_seqlen=False,
            key=np.uint64(1),
        )
        assert np.array_equal(np.sort(packed.pieces), np.arange(len(lengths)))
        order = np.argsort(packed.starts)
        longest = np.maximum.reduceat(packed.seqlens, packed.starts[order])
        padded = int((longest * packed.sizes[order]).sum())
        assert padded / int(lengths.sum()) - 1 <= most
        assert (longest * packed.sizes[order] <= 16_384).all()
