"""Orders are pure functions of seed and epoch, the same for any number of threads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import PlanError
from packer.planner.order import orders, threads


@pytest.fixture(params=[1, 2, 5])
def many_threads(request, monkeypatch):
    """Cut work into so many chunks, and buckets small enough that there are several."""
    count = request.param
    monkeypatch.setattr(threads, "num_cores", lambda: count)
    monkeypatch.setattr(
        orders,
        "chunk_edges",
        lambda size, min_chunk=1: np.arange(count + 1, dtype=np.int64) * size // count,
    )
    monkeypatch.setattr(orders, "_BUCKET", 16)
    return count


def test_orders_do_not_depend_on_threads(many_threads):
    lengths = (np.arange(1000) * 7919 % 83 + 1).astype(np.int32)
    permutation = orders.permutation(1000, np.uint64(5))
    entries = orders.shuffled_entries(lengths, np.uint64(5))
    by_length, distinct, offsets = orders.by_length(lengths)
    assert np.array_equal(np.sort(permutation), np.arange(1000))
    assert np.array_equal(entries >> 32, lengths[entries & 0xFFFFFFFF])
    assert np.array_equal(np.sort(entries & 0xFFFFFFFF), np.arange(1000))
    assert np.array_equal(by_length, np.argsort(lengths, kind="stable"))
    assert np.array_equal(np.repeat(distinct, np.diff(offsets)), np.sort(lengths))
    # pinned: whatever the number of threads, the machine and NumPy
    assert int((permutation * np.arange(1000)).sum()) == 248_562_441
    assert int(((entries & 0xFFFFFFFF) * np.arange(1000)).sum()) == 248_562_441


@given(st.lists(st.sampled_from([0, 1, 5, 2**31 - 1]), min_size=1, max_size=30))
def test_giant_lengths_need_no_table(lengths):
    array = np.array(lengths, np.int32)
    order, distinct, offsets = orders.by_length(array)
    assert order.tolist() == np.argsort(array, kind="stable").tolist()
    assert distinct.tolist() == sorted(set(lengths))
    assert offsets.tolist() == [0, *np.cumsum([lengths.count(length) for length in sorted(set(lengths))])]
    assert [part.tolist() for part in orders.histogram(array)] == [
        distinct.tolist(),
        np.diff(offsets).tolist(),
    ]


def test_seeds_epochs_and_purposes_differ():
    keys = {
        int(orders.key_for(seed, epoch, purpose))
        for seed in (0, 1, 2**63 - 1)
        for epoch in range(3)
        for purpose in orders.Purpose
    }
    assert len(keys) == 3 * 3 * len(orders.Purpose)


@pytest.mark.parametrize("size", [0, 1, 2, 65_535, 65_536, 65_537, 131_072])
def test_permutations_at_the_edges_of_buckets(size):
    assert np.array_equal(np.sort(orders.permutation(size, np.uint64(1))), np.arange(size))


def test_positions_are_counted_in_the_narrowest_type_that_holds_them():
    assert orders.id_dtype(2**31) is np.int32
    assert orders.id_dtype(2**31 + 1) is np.int64
    with pytest.raises(PlanError, match="--sample-ids"):
        orders.id_dtype(2**32 + 1)
