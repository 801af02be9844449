"""Lengths of list arrays of every Arrow kind, sliced, with garbage under their nulls, against ``len``."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.arrays import to_arrow
from packer.errors import ColumnError
from packer.samples import LengthDefinition, encode, measure
from packer.samples.ragged import RowError, ragged

DEFINITION = LengthDefinition.by_tokens("ids")
KINDS = ["list", "large_list", "list_view", "large_list_view", "fixed_size_list"]


@st.composite
def arrays(draw, kind):
    """Return (array, the same rows as Python lists): a slice, garbage under its nulls, views in any order."""
    num_rows = draw(st.integers(0, 12))
    size = draw(st.integers(1, 4))
    lengths = [size if kind == "fixed_size_list" else draw(st.integers(0, 5)) for _ in range(num_rows)]
    before = draw(st.integers(0, 3))  # values that no row names
    starts = before + np.cumsum([0, *lengths])
    values = np.arange(starts[-1] + 3, dtype=draw(st.sampled_from([np.int32, np.int64, np.uint16])))
    nulls = np.array(draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)), np.bool_)
    mask = pa.array(nulls) if nulls.any() else None
    if kind == "fixed_size_list":
        values = values[: num_rows * size]
        starts = np.arange(num_rows) * size
        array = pa.FixedSizeListArray.from_arrays(pa.array(values), size, mask=mask)
    elif kind in ("list", "large_list"):
        wide = np.int64 if kind == "large_list" else np.int32
        cls = pa.LargeListArray if kind == "large_list" else pa.ListArray
        array = cls.from_arrays(pa.array(starts.astype(wide)), pa.array(values), mask=mask)
    else:
        wide = np.int64 if kind == "large_list_view" else np.int32
        cls = pa.LargeListViewArray if kind == "large_list_view" else pa.ListViewArray
        starts = np.array(draw(st.permutations(starts[:-1].tolist())), np.int64)
        lengths = [min(length, len(values) - start) for length, start in zip(lengths, starts, strict=True)]
        array = cls.from_arrays(
            pa.array(starts.astype(wide)), pa.array(np.array(lengths, wide)), pa.array(values), mask=mask
        )
    rows = [
        None if null else values[start : start + length].tolist()
        for start, length, null in zip(starts, lengths, nulls, strict=False)
    ]
    start, stop = sorted((draw(st.integers(0, num_rows)), draw(st.integers(0, num_rows))))
    return array[start:stop], rows[start:stop]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_lengths_and_ids_equal_plain_lists(kind, data):
    array, rows = data.draw(arrays(kind))
    batch = pa.record_batch({"ids": array})
    measured = measure(batch, DEFINITION)
    assert measured.lengths["seqlen"].tolist() == [len(row or []) for row in rows]
    assert measured.num_null == sum(row is None for row in rows)
    assert measured.num_empty == sum(row == [] for row in rows)
    ids, lengths, _ = encode(batch, DEFINITION)
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]] == [row or [] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_nested_structs_by_dotted_path(kind, data):
    array, rows = data.draw(arrays(kind))
    nulls = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    inner = pa.StructArray.from_arrays([array], names=["ids"], mask=pa.array(nulls, pa.bool_()))
    batch = pa.record_batch({"sample": pa.StructArray.from_arrays([inner], names=["turn"])})
    expected = [0 if null else len(row or []) for row, null in zip(rows, nulls, strict=True)]
    definition = LengthDefinition.by_tokens("sample.turn.ids")
    assert measure(batch, definition).lengths["seqlen"].tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_labels_in_their_own_layout(kind, data):
    array, rows = data.draw(arrays(kind))
    ignored = [
        [-100 if value % 3 == 0 else value for value in row] if row is not None else None for row in rows
    ]
    batch = pa.record_batch({"ids": array, "labels": pa.array(ignored, pa.list_(pa.int64()))})
    for shift in (True, False):
        definition = LengthDefinition.by_tokens("ids", labels_column="labels", shift=shift)
        expected = [sum(label != -100 for label in (row or [])[int(shift) :]) for row in ignored]
        assert measure(batch, definition).lengths["loss_tokens"].tolist() == expected


@pytest.mark.skipif(
    int(pa.__version__.split(".")[0]) < 20, reason="this pyarrow writes no null that lies over elements"
)
@pytest.mark.parametrize("kind", ["list", "large_list", "fixed_size_list"])
@given(data=st.data())
def test_through_parquet(tmp_path_factory, kind, data):
    array, rows = data.draw(arrays(kind))
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    pq.write_table(pa.table({"ids": array}), path, row_group_size=5, data_page_size=64)
    lengths = [
        length
        for batch in pq.ParquetFile(path).iter_batches()
        for length in measure(batch, DEFINITION).lengths["seqlen"].tolist()
    ]
    assert lengths == [len(row or []) for row in rows]


def test_totals_beyond_32_bits():
    sizes = np.array([2**31 - 1, 2**31 - 1, 5], np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]))
    values = to_arrow(np.zeros(int(sizes.sum()), np.int8))  # no page of them is touched
    array = pa.LargeListArray.from_arrays(offsets, values)
    lengths = measure(pa.record_batch({"ids": array}), DEFINITION).lengths["seqlen"]
    assert lengths.tolist() == sizes.tolist()
    assert lengths.sum() == 2**32 + 3
    assert ragged(array.slice(2), column="ids").starts.tolist() == [2**32 - 2]


def test_a_column_of_nulls_has_no_lengths():
    measured = measure(pa.record_batch({"ids": pa.nulls(3)}), DEFINITION)
    assert (measured.lengths["seqlen"].tolist(), measured.num_null, measured.num_empty) == ([0, 0, 0], 3, 0)


def test_a_map_is_no_list_of_tokens():
    array = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(ColumnError, match="not a list"):
        measure(pa.record_batch({"ids": array}), DEFINITION)


@given(st.lists(st.none() | st.integers(0, 2**32)), st.sampled_from(["int8", "uint16", "int64", "uint64"]))
def test_length_columns(values, alias):
    fitting = [None if value is None else value % 2**7 for value in values]
    array = pa.array([None, *fitting], pa.type_for_alias(alias)).slice(1)
    measured = measure(pa.record_batch({"n": array}), LengthDefinition.by_length("n"))
    assert measured.lengths["seqlen"].tolist() == [value or 0 for value in fitting]
    assert measured.num_null == fitting.count(None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_null_element_is_refused_where_a_row_holds_it(kind):
    array = pa.array([[1, 2], None, [3, 4]], _list_type(kind))
    assert measure(pa.record_batch({"ids": array}), DEFINITION).lengths["seqlen"].tolist() == [2, 0, 2]
    array = pa.array([[1, 2], None, [3, None]], _list_type(kind))
    with pytest.raises(RowError, match="'ids' holds a null among its elements") as caught:
        measure(pa.record_batch({"ids": array}), DEFINITION)
    assert caught.value.row == 2
    sliced = pa.record_batch({"ids": array.slice(0, 2)})
    assert measure(sliced, DEFINITION).lengths["seqlen"].tolist() == [2, 0]


def _list_type(kind):
    if kind == "fixed_size_list":
        return pa.list_(pa.int64(), 2)
    return getattr(pa, "list_" if kind == "list" else kind)(pa.int64())
