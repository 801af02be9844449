"""Histograms, scatters and gathers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import counting

lengths = st.lists(st.integers(0, 12), min_size=1, max_size=50)


@given(lengths, st.data())
def test_counting_sort_is_stable_whatever_the_chunks(seqlens, data):
    array = np.array(seqlens, np.int32)
    middle = data.draw(st.integers(0, len(array)))
    counts = np.zeros((2, 13), np.int64)
    counting.count_lengths(array, 0, middle, counts[0])
    counting.count_lengths(array, middle, len(array), counts[1])
    assert counts.sum(axis=0).tolist() == [seqlens.count(value) for value in range(13)]
    total = counts.sum(axis=0)
    first = np.cumsum(total) - total
    out = np.empty(len(array), np.int32)
    # the second chunk may even be written before the first
    counting.scatter_by_length(array, middle, len(array), first + counts[0], out)
    counting.scatter_by_length(array, 0, middle, first.copy(), out)
    assert out.tolist() == sorted(range(len(array)), key=lambda sample: (seqlens[sample], sample))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.randoms())
def test_gather_segments_equals_naive(sizes, random):
    values = np.arange(sum(sizes), dtype=np.int32) * 7
    starts = np.cumsum([0, *sizes[:-1]])
    rows = list(range(len(sizes)))
    random.shuffle(rows)
    offsets = np.cumsum([0, *(sizes[row] for row in rows)])
    out = np.empty(len(values), np.int32)
    counting.gather_segments(values, starts[rows], offsets, 0, len(rows), out)
    assert out.tolist() == [v for row in rows for v in values[starts[row] : starts[row] + sizes[row]]]


@given(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_take_blocks_equals_indexing(width, order):
    values = np.arange(10 * width).reshape(10, width)
    out = np.empty((len(order), width), np.int64)
    middle = len(order) // 2
    counting.take_blocks(values, np.array(order, np.int32), middle, len(order), out)
    counting.take_blocks(values, np.array(order, np.int32), 0, middle, out)
    assert out.tolist() == values[order].tolist()
