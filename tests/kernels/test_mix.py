"""Classes of lengths, what micro-batches hold of them, and the design effect of steps."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import mix as kernels
from tests import naive

lengths = st.lists(st.integers(0, 40) | st.integers(0, 2**31 - 1), min_size=1, max_size=30)
NO_SOURCES = np.empty(0, np.uint8)
NO_FILLERS = np.empty(0, np.bool_)


def classes_of(seqlens):
    distinct, counts = np.unique(np.array(seqlens, np.int64), return_counts=True)
    return kernels.length_classes(distinct, counts)


@given(lengths)
def test_length_classes_equal_naive(seqlens):
    bounds, tokens = classes_of(seqlens)
    expected = naive.length_classes(seqlens)
    assert {length: int(np.searchsorted(bounds, length)) for length in expected} == expected
    assert tokens.tolist() == naive.tokens_by_class([(expected[s], s) for s in seqlens], len(bounds))


def test_a_billion_of_the_longest_samples_have_classes():
    distinct = np.array([1, 2**30, 2**31 - 1])
    counts = np.array([10, 6 * 10**8, 4 * 10**8])
    bounds, tokens = kernels.length_classes(distinct, counts)
    assert bounds.tolist() == distinct.tolist()
    assert tokens.tolist() == (distinct * counts).tolist()


def test_a_length_that_would_fill_several_classes_is_one():
    bounds, tokens = classes_of([1] * 16 + [100] * 8 + [300] * 4)
    assert bounds.tolist() == [1, 100, 300]
    assert tokens.tolist() == [16, 800, 1200]


def test_no_lengths_have_no_classes():
    bounds, tokens = kernels.length_classes(np.empty(0, np.int64), np.empty(0, np.int64))
    assert len(bounds) == len(tokens) == 0


@given(st.lists(lengths, min_size=1, max_size=8), st.integers(1, 3), st.data())
def test_tokens_by_class_equals_naive_whatever_the_chunks(microbatches, num_sources, data):
    seqlens = naive.flat(microbatches)
    owners = data.draw(
        st.lists(st.integers(0, num_sources - 1), min_size=len(seqlens), max_size=len(seqlens))
    )
    bounds, _ = classes_of(seqlens)
    of_length = naive.length_classes(seqlens)
    sizes = np.array([len(microbatch) for microbatch in microbatches])
    starts = np.cumsum(sizes) - sizes
    sources = np.array(owners, np.uint8) if num_sources > 1 else NO_SOURCES
    middle = data.draw(st.integers(0, len(sizes)))
    width = len(bounds) * num_sources
    parts = []
    for first, last in [(0, middle), (middle, len(sizes))]:
        out = np.full((last - first, width), -1, np.int64)
        kernels.tokens_by_class(np.array(seqlens, np.int32), sources, bounds, starts, sizes, first, last, out)
        parts += out.tolist()
    pairs = [
        (of_length[s] * num_sources + (o if num_sources > 1 else 0), s)
        for s, o in zip(seqlens, owners, strict=True)
    ]
    assert parts == [
        naive.tokens_by_class(pairs[start : start + size], width)
        for start, size in zip(starts, sizes, strict=True)
    ]


def design_effect(rows, is_filler, step_size, *, sources=NO_SOURCES, bounds=None, middle=0):
    """Sum up in two chunks."""
    seqlens = np.array(naive.flat(rows), np.int32)
    bounds = classes_of(seqlens)[0] if bounds is None else bounds
    num_classes = len(bounds) * (int(sources.max()) + 1 if len(sources) else 1)
    offsets = np.cumsum([0, *map(len, rows)])
    tokens, squares = np.zeros(num_classes, np.int64), np.zeros((num_classes, 2), np.uint64)
    concentration = np.zeros(2, np.uint64)
    num_steps = len(rows) // step_size
    for first, last in [(0, middle), (middle, num_steps)]:
        kernels.sum_steps(
            seqlens,
            sources,
            bounds,
            offsets,
            np.array(is_filler, np.bool_) if any(is_filler) else NO_FILLERS,
            step_size,
            first,
            last,
            tokens,
            squares,
            concentration,
        )
    return kernels.design_effect([kernels.StepSums(tokens, squares, concentration, num_steps)])


@given(st.integers(1, 3), st.integers(0, 6), st.data())
def test_design_effect_equals_its_definition(step_size, num_steps, data):
    some = st.lists(st.integers(1, 40) | st.integers(1, 2**31 - 1), min_size=1, max_size=5)
    rows = data.draw(st.lists(some, min_size=step_size * num_steps, max_size=step_size * num_steps))
    is_filler = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    of_length = naive.length_classes(naive.flat(rows))
    pairs = [
        [] if filler else [(of_length[s], s) for s in row]
        for row, filler in zip(rows, is_filler, strict=True)
    ]
    steps = [naive.flat(pairs[t * step_size : (t + 1) * step_size]) for t in range(num_steps)]
    expected = naive.design_effect(steps)
    found = design_effect(rows, is_filler, step_size, middle=data.draw(st.integers(0, num_steps)))
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-6))


@given(st.lists(st.integers(0, 2**20) | st.integers(0, 2**57), max_size=20))
def test_concentration_is_exact_to_32_bits(row):
    found = np.array([7, 2**32 - 1], np.uint64)
    kernels._add_concentration(np.array(row, np.int64), found)
    added = (int(found[0]) << 32) + int(found[1]) - (8 * 2**32 - 1)
    exact = Fraction(sum(part * part for part in row) * 2**32, sum(row) or 1)
    assert 0 <= exact - added < max(1, len(row))


def test_sources_and_joint_classes_have_a_design_effect():
    rows = [[5, 5], [7, 7], [5, 7], [5, 7]]
    apart = np.array([0, 0, 1, 1, 0, 1, 0, 1], np.uint8)
    no_filler = [False] * 4
    by_length = design_effect(rows, no_filler, 1)
    by_source = design_effect(rows, no_filler, 1, sources=apart, bounds=np.array([7]))
    jointly = design_effect(rows, no_filler, 1, sources=apart)
    # here the source is the length: three ways to say the same
    assert by_length == by_source == jointly
    assert by_length == pytest.approx(naive.design_effect([[(s, s) for s in row] for row in rows]))


def test_steps_of_one_mix_have_no_design_effect():
    assert design_effect([[3, 11, 4]] * 7, [False] * 7, 1) == 0.0
    assert design_effect([[3, 11, 4]] * 7, [False] * 7, 7) is None
    assert design_effect([[3, 3]] * 7, [False] * 7, 1) is None


def test_random_steps_have_a_design_effect_of_about_one():
    drawn = np.random.default_rng(0).lognormal(3, 1, (800, 30)).astype(int) + 1
    assert design_effect(drawn.tolist(), [False] * 800, 1) == pytest.approx(1, abs=0.1)
    sorted_rows = np.sort(drawn, axis=None).reshape(drawn.shape)
    assert design_effect(sorted_rows.tolist(), [False] * 800, 1) > 8
