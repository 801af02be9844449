"""Next-fit against the naive search for the largest group."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels.limits import UNLIMITED
from packer.planner.packing.next_fit import next_fit
from tests import naive
from tests.kernels.limits import limits


@st.composite
def problems(draw):
    num_lengths = draw(st.sampled_from([1, 1, 2]))
    size = draw(st.integers(1, 24))
    packed = num_lengths == 1 and draw(st.booleans())
    lengths = [draw(st.lists(st.integers(1, 20), min_size=size, max_size=size)) for _ in range(num_lengths)]
    multiple = draw(st.sampled_from([1, 4]))
    alone = max(naive.round_up(length, multiple) for row in lengths for length in row)
    bounds = limits(
        [draw(st.integers(alone, 5 * alone)) for _ in range(num_lengths)],
        packed=packed,
        real=not packed and draw(st.booleans()),
        min_samples=draw(st.integers(1, 3)),
        max_samples=draw(st.one_of(st.just(UNLIMITED), st.integers(3, 5))),
        max_attention=draw(st.one_of(st.just(UNLIMITED), st.integers(alone**2, 4 * alone**2))),
        multiple=multiple,
        segment_multiple=multiple if packed else 1,
    )
    owners = sorted(draw(st.lists(st.integers(0, size), min_size=size, max_size=size)))
    if draw(st.booleans()):
        owners = list(range(size))
    width = draw(st.integers(1, 4)) if not packed else 1
    return lengths, owners, bounds, width, draw(st.booleans())


@given(problems())
def test_next_fit_equals_naive(problem):
    lengths, owners, bounds, width, same_seqlen = problem
    packed = next_fit(
        np.array(lengths, np.int32),
        None if owners == list(range(len(owners))) else np.array(owners, np.int32),
        bounds,
        order="sequential",
        width=width,
        same_seqlen=same_seqlen,
        key=np.uint64(0),
    )
    groups = naive.next_fit(lengths, owners, bounds, width, same_seqlen)
    expected = [batch for group in groups for batch in group]
    assert [
        packed.pieces[s : s + z].tolist() for s, z in zip(packed.starts, packed.sizes, strict=True)
    ] == expected
    assert sorted(packed.leftover.tolist()) == sorted(set(range(len(owners))) - set(naive.flat(expected)))
    assert packed.in_steps == (width > 1)


def test_orders():
    lengths = np.array([[5, 3, 5, 1]], np.int32)
    packed = {
        order: next_fit(
            lengths, None, limits(1000), order=order, width=1, same_seqlen=False, key=np.uint64(3)
        )
        for order in ("sequential", "seqlen", "random")
    }
    assert packed["sequential"].pieces.tolist() == [0, 1, 2, 3]
    assert packed["seqlen"].pieces.tolist() == [3, 1, 0, 2]
    assert sorted(packed["random"].pieces.tolist()) == [0, 1, 2, 3]
    for each in packed.values():
        assert each.seqlens.tolist() == lengths[0, each.pieces].tolist()


def test_buffers_of_groups_are_refilled(monkeypatch):
    monkeypatch.setattr("packer.planner.packing.next_fit._GROUPS_AT_ONCE", 3)
    packed = next_fit(
        np.full((1, 10), 4, np.int32),
        None,
        limits(4),
        order="sequential",
        width=1,
        same_seqlen=False,
        key=np.uint64(0),
    )
    assert packed.starts.tolist() == list(range(10))
