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


@given(st.integers(0, 99), st.sampled_from([1, 3]))
def test_blocks_of_many_samples_keep_the_bounds_and_lose_little(seed, width):
    """Short samples: a micro-batch holds hundreds, and is cut between blocks of a few."""
    random = np.random.default_rng(seed)
    source = np.sort(random.integers(1, 40, 3000)).astype(np.int32)
    lengths = np.stack([source, np.clip(source + random.integers(-5, 6, 3000), 1, None)]).astype(np.int32)
    bounds = limits([9000, 9000])
    out = np.empty(3000, np.int32)
    starts, sizes, left = np.empty(3000, np.int64), np.empty(3000, np.int64), np.empty(1, np.int64)
    count = pairs.partition_pairs(
        np.arange(3000, dtype=np.int32),
        lengths,
        np.array([0, 3000]),
        bounds,
        width,
        2000,
        out,
        starts,
        sizes,
        left,
    )
    groups = [out[s : s + z].tolist() for s, z in zip(starts[:count], sizes[:count], strict=True)]
    assert not left[0]
    assert sorted(naive.flat(groups)) == list(range(3000))
    for group in groups:
        assert naive.fits([[row[s] for s in group] for row in lengths.tolist()], bounds)
    padded = sum(len(g) * int(row[g].max()) for g in groups for row in lengths)
    fewest = -(-int(lengths.max(axis=0).sum()) // 9000)
    assert count <= 1.3 * fewest + 2 * width
    assert padded <= 1.35 * lengths.sum()
