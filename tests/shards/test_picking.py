"""The inner loop of the shuffle, against a plain twin."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import SourceError
from packer.shards import picking
from packer.shards.picking import Cut, pick_rows

SCHEMA = pa.schema(
    {
        "ids": pa.list_(pa.int16()),
        "weights": pa.list_(pa.float64()),
        "flags": pa.list_(pa.bool_()),
        "text": pa.string(),
        "nested": pa.struct({"a": pa.list_(pa.int32())}),
        "number": pa.int64(),
    }
)

rows = st.fixed_dictionaries(
    {
        "ids": st.none() | st.lists(st.integers(0, 99), max_size=6),
        "weights": st.none() | st.lists(st.none() | st.floats(0, 1), max_size=3),
        "flags": st.none() | st.lists(st.booleans(), max_size=3),
        "text": st.none() | st.text(max_size=3),
        "nested": st.none() | st.fixed_dictionaries({"a": st.lists(st.integers(0, 9), max_size=2)}),
        "number": st.none() | st.integers(0, 9),
    }
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[pa.RecordBatch], list[tuple[int, int]]]:
    """Batches that are slices of others, and places in them, any number of times."""
    batches = []
    for content in draw(st.lists(st.lists(rows, min_size=1, max_size=5), min_size=1, max_size=3)):
        whole = pa.RecordBatch.from_pylist(content, schema=SCHEMA)
        batches.append(whole.slice(draw(st.integers(0, len(content) - 1))))
    places = [(owner, row) for owner, batch in enumerate(batches) for row in range(batch.num_rows)]
    return batches, draw(st.lists(st.sampled_from(places), max_size=8))


@given(problems(), st.integers(1, 3))
def test_rows_come_in_the_order_asked_for(
    problem: tuple[list[pa.RecordBatch], list[tuple[int, int]]], at_once: int
) -> None:
    batches, places = problem
    owners, index = (np.array(column, np.int64) for column in zip(*places, strict=True)) if places else _NONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picking, "_AT_ONCE", at_once)
        picked = pick_rows(batches, owners, index)
    picked.validate(full=True)
    assert picked.schema == SCHEMA
    assert picked.to_pylist() == [batches[owner].slice(row, 1).to_pylist()[0] for owner, row in places]


_NONE = (np.zeros(0, np.int64), np.zeros(0, np.int64))


@given(problems(), st.data())
def test_lists_as_long_as_the_sample_are_cut(problem: Any, data: st.DataObject) -> None:
    batches, places = problem
    owners, index = (np.array(column, np.int64) for column in zip(*places, strict=True)) if places else _NONE
    plain = [batches[owner].slice(row, 1).to_pylist()[0] for owner, row in places]
    whole = [len(row["ids"] or []) for row in plain]
    starts = [data.draw(st.integers(0, length)) for length in whole]
    lengths = [data.draw(st.integers(0, n - start)) for n, start in zip(whole, starts, strict=True)]
    cut = Cut(*(np.array(values, np.int64) for values in (starts, lengths, whole)))
    picked = pick_rows(batches, owners, index, cut=cut).to_pylist()
    for row, expected, start, length, n in zip(picked, plain, starts, lengths, whole, strict=True):
        assert row["ids"] == (None if expected["ids"] is None else expected["ids"][start : start + length])
        weights = expected["weights"]
        is_cut = weights is not None and len(weights) == n
        assert row["weights"] == (weights[start : start + length] if is_cut else weights)
        assert [row[name] for name in ("text", "nested", "number", "flags")] == [
            expected[name] for name in ("text", "nested", "number", "flags")
        ]


def test_more_numbers_than_a_record_batch_holds() -> None:
    values = pa.array(np.zeros(1 << 20, np.int8))
    lists = pa.ListArray.from_arrays(pa.array([0, 1 << 20], pa.int32()), values)
    batch = pa.RecordBatch.from_arrays([lists], ["ids"])
    many = np.zeros(2049, np.int64)
    with pytest.raises(SourceError, match=r"'ids' holds 1,048,576 numbers in a row.*--keep-columns"):
        pick_rows([batch], many, many)
