"""The partition of samples with several lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import pairs
from tests import naive
from tests.kernels.limits import limits


@given(st.data())
def test_partition_costs_what_the_naive_one_costs(data):
    size = data.draw(st.integers(1, 16))
    lengths = [data.draw(st.lists(st.integers(1, 20), min_size=size, max_size=size)) for _ in range(2)]
    width = data.draw(st.sampled_from([1, 1, 2, 3]))
    bounds = limits(
        [data.draw(st.integers(20, 80)), data.draw(st.integers(20, 80))],
        real=data.draw(st.booleans()),
        min_samples=data.draw(st.sampled_from([1, 1, 2])),
    )
    charge = data.draw(st.integers(0, 50))
    out = np.empty(size, np.int32)
    starts, sizes, left = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(1, np.int64)
    count = pairs.partition_pairs(
        np.arange(size, dtype=np.int32),
        np.array(lengths, np.int32),
        np.array([0, size]),
        bounds,
        width,
        charge,
        out,
        starts,
        sizes,
        left,
    )
    groups = [out[s : s + z].tolist() for s, z in zip(starts[:count], sizes[:count], strict=True)]
    rest = out[size - left[0] :].tolist()
    assert sorted(naive.flat(groups) + rest) == list(range(size))
    for first in range(0, count, width):
        step = groups[first : first + width]
        assert len({len(group) for group in step}) == 1
        longest = [max(row[sample] for group in step for sample in group) for row in lengths]
        assert all(
            naive.fits([[row[s] for s in group] for row in lengths], bounds, longest) for group in step
        )
    if width == 1:
        cost = sum(len(g) * max(row[s] for s in g) for g in groups for row in lengths) + charge * len(groups)
        assert (len(rest), cost) == naive.pairs_cost(lengths, bounds, charge)
