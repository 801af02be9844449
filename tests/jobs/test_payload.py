"""Arrays survive the way through bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from packer.jobs.payload import pack_arrays, unpack_arrays

arrays = hnp.arrays(st.sampled_from(["<i4", "<i8", "<u2", "|u1"]), st.integers(0, 20))


@given(st.dictionaries(st.text(max_size=5), arrays, max_size=4), st.integers(0, 20))
def test_arrays_come_back(named, cut):
    packed = pack_arrays({name: [array[:cut], array[cut:]] for name, array in named.items()})
    unpacked = unpack_arrays(memoryview(packed))
    assert packed == pack_arrays({name: [array] for name, array in named.items()})
    assert list(unpacked) == list(named)
    for name, array in named.items():
        assert unpacked[name].dtype == array.dtype
        assert unpacked[name].tolist() == array.tolist()


def test_arrays_are_views():
    buffer = memoryview(pack_arrays({"a": [np.arange(1000)]}))
    assert np.shares_memory(unpack_arrays(buffer)["a"], np.frombuffer(buffer, np.uint8))
