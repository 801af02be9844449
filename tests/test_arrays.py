"""Arrow arrays as NumPy arrays and back, against pyarrow's own conversions."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.arrays import to_arrow, to_numpy, validity

DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]


@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_equal_those_of_pyarrow(dtype, data):
    values = np.array(data.draw(st.lists(st.integers(0, 100), max_size=20)), dtype)
    start, stop = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))
    array = to_arrow(values[::2])
    assert array.equals(pa.array(values[::2].copy()))
    taken = to_numpy(array[start:stop])
    assert taken.dtype == dtype
    assert taken.tolist() == values[::2][start:stop].tolist()


@given(st.lists(st.sampled_from([True, False, None]), max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_booleans_are_unpacked_from_any_bit(values, start, stop):
    array = pa.array(values, pa.bool_())[start:stop]
    assert to_numpy(array.is_valid()).tolist() == [value is not None for value in values[start:stop]]
    assert to_numpy(array.fill_null(False)).tolist() == [value is True for value in values[start:stop]]
    assert validity(array).tolist() == [value is not None for value in values[start:stop]]


@given(st.lists(st.booleans(), max_size=40))
def test_booleans_are_packed_into_bits(values):
    array = to_arrow(np.array(values, np.bool_))
    array.validate(full=True)
    assert array.equals(pa.array(values, pa.bool_()))


def test_a_worker_imports_nothing_that_it_does_not_need(tmp_path):
    program = f"""
        import sys
        import numpy as np, pyarrow as pa, pyarrow.parquet as pq
        from packer.analyzer.tasks import MeasureUnit
        from packer.arrays import to_arrow
        from packer.samples import LengthDefinition
        from packer.sources import open_source
        lists = pa.ListArray.from_arrays(to_arrow(np.array([0, 2, 5], np.int32)), to_arrow(np.arange(5)))
        pq.write_table(pa.Table.from_arrays([lists], ["ids"]), {str(tmp_path / "d.parquet")!r})
        source = open_source({str(tmp_path / "d.parquet")!r})
        MeasureUnit(source, LengthDefinition.by_tokens("ids"))(source.units(["ids"])[0], lambda *_: None)
        print(*{{name.partition(".")[0] for name in sys.modules}})
    """
    program = "\n".join(line.strip() for line in program.splitlines())
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"pandas", "numba", "torch", "fsspec", "rich", "click", "tokenizers", "transformers", "ray"}
    assert "pyarrow" in run.stdout.split()
    assert not heavy & set(run.stdout.split())
