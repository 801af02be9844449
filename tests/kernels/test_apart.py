"""No row holds two pieces of one sample."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.planner.packing.apart import keep_apart
from packer.planner.packing.best_fit import best_fit
from tests import naive
from tests.kernels.limits import limits


def rows(packs):
    return [packs.pieces[s : s + z].tolist() for s, z in zip(packs.starts, packs.sizes, strict=True)]


@given(st.integers(1, 40), st.data())
def test_pieces_of_one_sample_are_separated(limit, data):
    seqlens = data.draw(st.lists(st.integers(1, 4 * limit), min_size=1, max_size=12))
    capacity = data.draw(st.integers(limit, 4 * limit))
    pieces = [(sample, min(limit, n - at)) for sample, n in enumerate(seqlens) for at in range(0, n, limit)]
    owners = np.array([sample for sample, _ in pieces], np.int32)
    lengths = np.array([[length for _, length in pieces]], np.int32)
    bounds = limits(capacity, packed=True)
    packs = keep_apart(best_fit(lengths, bounds, key=np.uint64(1)), lengths, owners, bounds, np.uint64(2))
    packed = rows(packs)
    assert sorted(naive.flat(packed) + packs.leftover.tolist()) == list(range(len(pieces)))
    for row in packed:
        assert len({int(owners[piece]) for piece in row}) == len(row)
        assert naive.fits([lengths[0, row].tolist()], bounds)
    for start, size in zip(packs.starts, packs.sizes, strict=True):
        inside = slice(start, start + size)
        assert packs.seqlens[inside].tolist() == lengths[0, packs.pieces[inside]].tolist()
    assert not len(packs.leftover)
