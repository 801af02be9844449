"""Lengths against plain Python ``len``, for every kind of list array that Arrow has."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.errors import ColumnError, SourceError
from packer.samples import LengthDefinition, check_definition, measure, measure_unit
from packer.sources import open_source


def test_lengths_of_a_parquet_list_column(tmp_path):
    rows = [[1, 2, 3], None, [], [4]] * 100
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet", row_group_size=64)
    source = open_source(tmp_path / "a.parquet")
    definition = LengthDefinition.by_tokens("input_ids")
    units = source.units(list(definition.read_columns), target_bytes=1)
    measured = [m for unit in units for m in measure_unit(source, unit, definition)]
    assert len(units) == 7
    assert np.concatenate([m.lengths["seqlen"] for m in measured]).tolist() == [3, 0, 0, 1] * 100
    assert sum(m.num_null for m in measured) == sum(m.num_empty for m in measured) == 100


def test_loss_tokens_shift():
    batch = pa.record_batch({"ids": [[1, 2, 3], [1], [], None], "labels": [[5, -100, 7], [9], [], None]})
    shifted = measure(batch, LengthDefinition.by_tokens("ids", labels_column="labels"))
    assert shifted.lengths["loss_tokens"].tolist() == [1, 0, 0, 0]
    plain = measure(batch, LengthDefinition.by_tokens("ids", labels_column="labels", shift=False))
    assert plain.lengths["loss_tokens"].tolist() == [2, 1, 0, 0]


def test_negative_length_names_the_row(tmp_path):
    pq.write_table(pa.table({"n": [4, -1]}), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    definition = LengthDefinition.by_length("n")
    with pytest.raises(SourceError, match=r"a.parquet, row group 0, row 1: .* length -1"):
        list(measure_unit(source, source.units()[0], definition))


def test_missing_column_lists_the_columns(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1]], "text": ["a"]}), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match=r"did you mean 'input_ids'.*input_ids, text"):
        check_definition(source, LengthDefinition.by_tokens("input_id"))
    with pytest.raises(ColumnError, match="'text' is of type string; name a list of integers"):
        check_definition(source, LengthDefinition.by_tokens("text"))
