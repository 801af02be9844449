"""Micro-batches dealt to steps by what they hold of each class."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import deal as kernels
from tests import naive

amounts = st.just(0) | st.integers(0, 9) | st.integers(0, 2**31 - 1)


def dealt(hist, step_size, edges, targets, key=1, spans=None, scales=None):
    edges = np.array(edges, np.int64)
    hist = np.asarray(hist, np.int64)
    order = np.full(len(hist), -1, np.int64)
    for first, last in spans or [(0, len(edges) - 1)]:
        inside = hist[edges[first] : edges[last]]
        scale = np.full(hist.shape[1], 16) if scales is None else np.array(scales, np.int64)
        target = np.array(targets, np.int64)
        kernels.deal(inside, step_size, edges, first, last, target, scale, np.uint64(key), order)
    return order


def squares(hist, order, step_size):
    """Return Σ_t Σ_k (h_tk − W_t p_k)² over the whole steps."""
    steps = (
        hist[order[: len(order) // step_size * step_size]].reshape(-1, step_size, hist.shape[1]).sum(axis=1)
    )
    shares = hist.sum(axis=0) / hist.sum()
    return ((steps - steps.sum(axis=1, keepdims=True) * shares) ** 2).sum()


@given(st.integers(1, 4), st.integers(1, 18), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.data())
def test_deal_equals_naive_whatever_the_chunks(step_size, num_classes, windows, data):
    rest = data.draw(st.integers(0, step_size - 1))
    edges = np.cumsum([0, *(many * step_size for many in windows)])
    edges[-1] += rest
    row = st.lists(amounts, min_size=num_classes, max_size=num_classes)
    hist = data.draw(st.lists(row, min_size=int(edges[-1]), max_size=int(edges[-1])))
    targets = data.draw(st.lists(amounts, min_size=num_classes, max_size=num_classes))
    key = data.draw(st.integers(0, 2**64 - 1))
    scale = st.just(16) | st.integers(1, 256)
    scales = data.draw(st.lists(scale, min_size=num_classes, max_size=num_classes))
    middle = data.draw(st.integers(0, len(windows)))
    order = dealt(
        np.array(hist, np.int64).reshape(len(hist), num_classes),
        step_size,
        edges,
        targets,
        key,
        [(0, middle), (middle, len(windows))],
        scales,
    )
    expected = []
    for window, (start, stop) in enumerate(pairwise(edges)):
        inside = naive.deal(
            hist[start:stop], step_size, targets, scales, naive.subkey(key, window), sweeps=kernels.SWEEPS
        )
        expected += [start + m for m in inside]
    assert order.tolist() == expected


@pytest.mark.parametrize("step_size", [1, 2, 5, 8])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 41])
def test_dealing_is_a_permutation_that_leaves_what_fills_no_step_at_the_end(step_size, count):
    hist = np.random.default_rng(count).integers(0, 1000, (count, 3))
    order = dealt(hist, step_size, [0, count], [1, 1, 1])
    assert sorted(order) == list(range(count))
    whole = count // step_size * step_size
    assert order[whole:].tolist() == list(range(whole, count))


def test_steps_of_micro_batches_of_one_class_each_hold_every_class():
    hist = np.repeat(np.eye(8, dtype=np.int64) * 1000, 64, axis=0)
    hist = hist[np.random.default_rng(0).permutation(512)]
    order = dealt(hist, 8, [0, 512], hist.sum(axis=0))
    assert (hist[order].reshape(64, 8, 8).sum(axis=1) == 1000).all()
    # places in a step, and steps, come at random
    assert len(set(hist[order].argmax(axis=1).reshape(64, 8)[:, 0])) == 8


def test_the_exchange_comes_nearer_than_strata_alone(monkeypatch):
    rng = np.random.default_rng(0)
    hist = rng.multinomial(1000, rng.dirichlet(np.full(16, 0.1)), 512) * rng.integers(1, 3, (512, 1))
    order = dealt(hist, 8, [0, 512], hist.sum(axis=0))
    strata = naive.deal(hist.tolist(), 8, hist.sum(axis=0).tolist(), [16] * 16, 1, sweeps=0)
    at_random = squares(hist, rng.permutation(512), 8)
    assert squares(hist, order, 8) < 0.5 * squares(hist, np.array(strata), 8) < 0.5 * at_random


def test_a_scaled_class_comes_nearer_to_its_share():
    rng = np.random.default_rng(0)
    hist = rng.multinomial(1000, [0.5, 0.48, 0.02], 512) + rng.multinomial(3, [0.1, 0.1, 0.8], 512) * 30
    off = [
        hist[dealt(hist, 8, [0, 512], hist.sum(axis=0), scales=scales)]
        .reshape(64, 8, 3)
        .sum(axis=1)[:, 2]
        .std()
        for scales in ([16, 16, 16], [16, 16, 256])
    ]
    assert off[1] < 0.8 * off[0]


def test_huge_windows_and_tokens_do_not_overflow():
    hist = np.random.default_rng(0).integers(2**40, 2**42, (4096, 2))
    order = dealt(hist, 1024, [0, 4096], [2**61, 2**61 - 1])
    assert squares(hist, order, 1024) < 1e-2 * squares(hist, np.arange(4096), 1024)


@given(st.integers(0, 5000), st.integers(1, 40))
def test_windows_hold_whole_steps_and_enough_of_them(num_microbatches, step_size):
    edges = kernels.window_edges(num_microbatches, step_size)
    steps = np.diff(edges) // step_size
    assert edges[0] == 0
    assert edges[-1] == num_microbatches
    assert (edges[:-1] % step_size == 0).all()
    assert steps.sum() == num_microbatches // step_size
    assert len(steps) == 1 or (steps.min() >= kernels.MIN_STEPS and steps.max() < 2 * kernels.MIN_STEPS)
