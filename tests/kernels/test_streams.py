"""Streams merged by their shares, and the passes of one."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import streams as kernels
from tests import naive

WHOLE = 1 << kernels.WEIGHT_BITS


def merged(streams, weights, quotas, begins, end, *, by_samples=False):
    """Merge streams of lengths; return (stream, place) pairs and where phases begin."""
    entries = [length << 32 | place for lengths in streams for place, length in enumerate(lengths)]
    size = len(entries)
    places, seqlens = np.empty(size, np.int32), np.empty(size, np.int32)
    of_stream, starts = np.empty(size, np.uint16), np.empty(len(begins), np.int64)
    count = kernels.merge(
        np.array(entries, np.int64),
        np.cumsum([0, *map(len, streams)], dtype=np.int64),
        np.array(weights, np.int64),
        np.array(quotas, np.int64),
        np.array(begins, np.int64),
        np.int64(end),
        by_samples,
        places,
        seqlens,
        of_stream,
        starts,
    )
    found = list(zip(of_stream[:count].tolist(), places[:count].tolist(), strict=True))
    assert [streams[stream][place] for stream, place in found] == seqlens[:count].tolist()
    return found, starts.tolist()


@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.data())
def test_merge_equals_naive(num_streams, num_phases, by_samples, data):
    lengths = st.lists(st.integers(1, 50) | st.just(2**31 - 1), max_size=12)
    streams = [data.draw(lengths) for _ in range(num_streams)]
    weight = st.just(0) | st.integers(1, WHOLE) | st.sampled_from([1, WHOLE // 2])
    weights = [[data.draw(weight) for _ in streams] for _ in range(num_phases)]
    sizes = [data.draw(st.integers(0, 3000)) for _ in range(num_phases)]
    quotas = [[size * w // WHOLE for w in row] for size, row in zip(sizes, weights, strict=True)]
    begins = np.cumsum([0, *sizes[:-1]]).tolist()
    end = data.draw(st.just(int(kernels.NEVER)) | st.integers(0, 5000))
    found = merged(streams, weights, quotas, begins, end, by_samples=by_samples)
    unit = kernels.SAMPLE_UNITS if by_samples else None
    assert found == naive.merge(streams, weights, quotas, begins, end, unit)


@given(st.lists(st.lists(st.integers(1, 30), min_size=30, max_size=60), min_size=2, max_size=4), st.data())
def test_any_beginning_holds_every_share_to_half_a_sample_a_stream(streams, data):
    parts = [data.draw(st.integers(1, 9)) for _ in streams]
    shares = [Fraction(part, sum(parts)) for part in parts]
    found, _ = merged(streams, [[int(s * WHOLE) for s in shares]], [[0] * len(streams)], [0], kernels.NEVER)
    held, used = [0] * len(streams), [0] * len(streams)
    for stream, place in found:
        held[stream] += streams[stream][place]
        used[stream] += 1
        if any(count == len(lengths) for count, lengths in zip(used, streams, strict=True)):
            break  # a stream that has ended gives nothing
        for amount, share in zip(held, shares, strict=True):
            assert abs(amount - share * sum(held)) <= 30


def test_every_sample_comes_where_no_end_is():
    streams = [[5] * 100, [1], [2**31 - 1] * 3]
    found, _ = merged(streams, [[WHOLE - 2, 1, 1]], [[0, 0, 0]], [0], kernels.NEVER)
    assert sorted(found) == [(s, p) for s, lengths in enumerate(streams) for p in range(len(lengths))]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 100])
def test_a_pass_keeps_half_of_all_others_between_a_sample_and_itself(size):
    orders = np.empty((6, size), np.int64)
    orders[0] = np.random.default_rng(0).permutation(size)
    kernels.shuffle_passes(orders, np.uint64(3))
    assert (np.sort(orders, axis=1) == np.arange(size)).all()
    places = np.argsort(orders, axis=1)
    assert (size + places[1:] - places[:-1]).min() > size // 2 - (size < 4)
    if size == 100:
        assert (orders[1:] != orders[:-1]).mean() > 0.9


def test_what_the_newest_pass_reaches_is_cleared():
    places, streams = np.array([0, 5, 1, 0, 1, 6, 0]), np.array([0, 1, 0, 0, 0, 1, 0], np.uint16)
    is_left = np.ones(8, np.bool_)
    kernels.mark_newest(places, streams, 7, np.array([4, 0]), is_left)
    assert np.flatnonzero(is_left).tolist() == [1, 2, 3, 4, 7]


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(0, 200))
def test_count_within(lengths, tokens):
    found = kernels.count_within(np.array(lengths, np.int32), tokens)
    assert sum(lengths[:found]) <= tokens
    assert found == len(lengths) or sum(lengths[: found + 1]) > tokens
