"""The generator: its stream, its uniformity, its permutations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import rng
from tests import naive

keys = st.integers(0, 2**64 - 1)


@given(keys, keys, st.integers(0, 2**32))
def test_derive_key_equals_naive(seed, epoch, purpose):
    derived = int(rng.derive_key(np.uint64(seed), np.uint64(epoch), np.uint64(purpose)))
    assert derived == naive.derive_key(seed, epoch, purpose)


def test_stream_is_the_published_one():
    # The first outputs of SplitMix64 for the seed 1234567, as its authors' reference program prints them.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [naive.draw(1234567, counter) for counter in range(4)] == known


@given(keys, st.integers(0, 2**40), st.one_of(st.integers(1, 100), st.integers(2**31 - 2, 2**62)))
def test_below_equals_naive(key, counter, bound):
    drawn = int(rng.below(np.uint64(key), counter, bound))
    assert drawn == naive.below(key, counter, bound)
    assert 0 <= drawn < bound


def test_below_is_unbiased_where_the_range_is_no_divisor():
    # 3/4 of 2^32: without rejection every third result would come twice as often.
    bound = 3 << 30
    draws = np.array([rng.below(np.uint64(9), counter, bound) for counter in range(30_000)])
    thirds = np.bincount(draws % 3, minlength=3)
    assert np.abs(thirds - 10_000).max() < 400


@given(keys, st.lists(st.integers(0, 9), max_size=40))
def test_shuffle_equals_naive(key, values):
    array = np.array(values, np.int32)
    rng.shuffle(array, 0, len(array), np.uint64(key))
    assert array.tolist() == naive.shuffle(values, key)


@given(keys, st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_draw_to_end_equals_naive(key, values, data):
    size = data.draw(st.integers(0, len(values)))
    count = data.draw(st.integers(0, size))
    array = np.array(values, np.int32)
    rng.draw_to_end(array, size, count, np.uint64(key))
    assert array.tolist() == naive.draw_to_end(values, size, count, key)


@given(keys, st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=6))
def test_shuffle_segments_equals_naive(key, segments):
    array = np.array(naive.flat(segments), np.int32)
    offsets = np.cumsum([0, *map(len, segments)])
    rng.shuffle_segments(array, offsets, 0, len(segments), np.uint64(key))
    expected = [naive.shuffle(segment, naive.subkey(key, s)) for s, segment in enumerate(segments)]
    assert array.tolist() == naive.flat(expected)


@given(keys, st.integers(0, 60), st.integers(0, 60), st.sampled_from([2, 8, 64]))
def test_buckets_equal_naive(key, start, length, num_buckets):
    stop, shift = start + length, np.uint64(64 - (num_buckets.bit_length() - 1))
    expected = naive.buckets(range(start, stop), num_buckets, key)
    counts = np.zeros(num_buckets, np.int64)
    rng.count_buckets(start, stop, shift, np.uint64(key), counts)
    assert counts.tolist() == [len(bucket) for bucket in expected]
    out = np.empty(length, np.int64)
    rng.scatter_buckets(start, stop, shift, np.uint64(key), np.cumsum(counts) - counts, out)
    assert out.tolist() == naive.flat(expected)
    seqlens = np.arange(stop, dtype=np.int32) * 3
    rng.scatter_entries(seqlens, start, stop, shift, np.uint64(key), np.cumsum(counts) - counts, out)
    assert out.tolist() == [value * 3 << 32 | value for value in naive.flat(expected)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_permutation_is_equally_likely(size):
    seen = {}
    trials = 24 * 400
    for key in range(trials):
        array = np.arange(size)
        rng.shuffle(array, 0, size, np.uint64(naive.derive_key(key, 0, 0)))
        seen[tuple(array)] = seen.get(tuple(array), 0) + 1
    expected = trials / len(seen)
    assert len(seen) == [1, 2, 6, 24][size - 1]
    # chi-square with 23 degrees of freedom exceeds 60 once in 30,000 runs; the keys are fixed
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 60
