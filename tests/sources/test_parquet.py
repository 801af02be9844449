"""Parquet: projection, nesting, files that differ, and damage that must not pass for data."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.errors import ColumnError, SourceError
from packer.samples import LengthDefinition, check_definition, measure_unit
from packer.sources import open_source, parquet, source
from packer.sources.part import BATCH_BYTES

IDS = {"ids": None}


def read_ids(path, target_bytes=1):
    opened = open_source(path)
    units = opened.units(["ids"], target_bytes=target_bytes)
    return [row for unit in units for batch in opened.read(unit, IDS) for row in batch["ids"].to_pylist()]


def test_units_join_row_groups_by_the_bytes_of_the_columns_asked_for(tmp_path):
    table = pa.table(
        {"ids": [[n] for n in range(1000)], "big": [b"x" * 1000 + bytes([n % 256]) for n in range(1000)]}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, use_dictionary=False)
    opened = open_source(tmp_path / "a.parquet")
    assert len(opened.units(["ids"], target_bytes=1)) == 10
    assert len(opened.units(["ids"], target_bytes=1 << 20)) == 1
    assert len(opened.units(["big"], target_bytes=150_000)) == 5
    assert [unit.first_row for unit in opened.units(["big"], target_bytes=150_000)] == [0, 200, 400, 600, 800]


def test_only_the_columns_asked_for_are_read(tmp_path):
    nested = [{"ids": [1], "other": "x"}, None]
    pq.write_table(pa.table({"ids": [[1], [2]], "idsx": [1, 2], "s": nested}), tmp_path / "a.parquet")
    opened = open_source(tmp_path / "a.parquet")
    [batch] = opened.read(opened.units()[0], {"ids": None, "s.ids": None})
    assert batch.schema.names == ["ids", "s"]
    assert batch.schema.field("s").type == pa.struct([("ids", pa.list_(pa.field("element", pa.int64())))])


def test_every_row_at_random(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_OPEN_FILES", 2)
    for number in range(4):
        rows = [None if n % 7 == 3 else [number, *range(n)] for n in range(50)]
        pq.write_table(pa.table({"ids": rows}), tmp_path / f"{number}.parquet", row_group_size=8)
    opened = pickle.loads(pickle.dumps(open_source(tmp_path)))
    rows = np.random.default_rng(0).permutation(200)
    taken = [batch["ids"][0].as_py() for batch in opened.rows(rows, IDS)]
    assert taken == [None if row % 50 % 7 == 3 else [row // 50, *range(row % 50)] for row in rows.tolist()]


@pytest.mark.parametrize("write_checksum", [True, False])
def test_a_file_cut_at_any_byte_is_an_error(tmp_path, write_checksum):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"ids": [list(range(n)) for n in range(60)]}), path, write_page_checksum=write_checksum
    )
    content = path.read_bytes()
    for size in [*range(0, len(content), 11), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(SourceError, match=r"a\.parquet"):
            read_ids(path)


def test_a_flipped_byte_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [[n * 7919 % 10_007 for n in range(50)] for _ in range(60)]
    pq.write_table(pa.table({"ids": rows}), path, write_page_checksum=True, use_dictionary=False)
    content = path.read_bytes()
    data = pq.read_metadata(path).row_group(0).column(0)
    for at in range(data.data_page_offset + 200, data.data_page_offset + data.total_compressed_size, 41):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(SourceError, match=r"a\.parquet, row group 0"):
            read_ids(path)


def rows_or_errors(path, column):
    """Flip some bits of every byte in a file's data; return all that is read, an error as None."""
    content = path.read_bytes()
    chunk = pq.read_metadata(path).row_group(0).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    for at in range(start, start + chunk.total_compressed_size):
        for bit in (0, 1, 6):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            try:
                source = open_source(path)
                yield [
                    row
                    for unit in source.units()
                    for batch in source.read(unit, {column: None})
                    for row in batch[column].to_pylist()
                ]
            except SourceError:
                yield None


def test_lists_that_a_damaged_page_cuts_otherwise_are_noticed_where_values_are_left(tmp_path):
    rows = [[n] * (n % 4) for n in range(1, 16)]
    pq.write_table(pa.table({"ids": rows}), tmp_path / "a.parquet", compression="none")
    num_values = sum(max(len(row), 1) for row in rows)
    outcomes = list(rows_or_errors(tmp_path / "a.parquet", "ids"))
    assert None in outcomes
    assert all(sum(max(len(row or []), 1) for row in read) == num_values for read in outcomes if read)


def test_a_damaged_page_that_names_texts_which_are_not_there(tmp_path):
    texts = ["abc"[n % 3] for n in range(20)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="none")
    outcomes = list(rows_or_errors(tmp_path / "a.parquet", "text"))
    assert None in outcomes
    assert all(len(read) == 20 for read in outcomes if read)


def test_a_column_that_is_null_in_the_first_file(tmp_path):
    pq.write_table(pa.table({"ids": pa.nulls(3)}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"ids": [[1, 2]]}), tmp_path / "2.parquet")
    opened = open_source(tmp_path)
    definition = LengthDefinition.by_tokens("ids")
    check_definition(opened, definition)
    measured = [m for unit in opened.units() for m in measure_unit(opened, unit, definition)]
    assert np.concatenate([m.lengths["seqlen"] for m in measured]).tolist() == [0, 0, 0, 2]
    assert opened.field("ids").type == pa.list_(pa.field("element", pa.int64()))


def test_a_column_that_one_file_lacks_names_that_file(tmp_path):
    pq.write_table(pa.table({"ids": [[1]]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"tokens": [[1]]}), tmp_path / "2.parquet")
    with pytest.raises(ColumnError, match=r"2\.parquet has no column 'ids'; it has: tokens"):
        check_definition(open_source(tmp_path), LengthDefinition.by_tokens("ids"))


def test_of_many_columns_ten_are_listed(tmp_path):
    pq.write_table(pa.table({f"column {n}": [n] for n in range(40)}), tmp_path / "1.parquet")
    with pytest.raises(ColumnError, match=r"'ids'; it has: column 0, .*, column 9 and 30 more$"):
        check_definition(open_source(tmp_path), LengthDefinition.by_tokens("ids"))
    with pytest.raises(ColumnError, match=r"'colum 7'; did you mean 'column 7'\? It has: column 0, "):
        check_definition(open_source(tmp_path), LengthDefinition.by_tokens("colum 7"))


def test_files_of_different_list_kinds(tmp_path):
    pq.write_table(pa.table({"ids": pa.array([[1, 2]], pa.large_list(pa.int32()))}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"ids": pa.array([[3, 4]], pa.list_(pa.uint16(), 2))}), tmp_path / "2.parquet")
    assert read_ids(tmp_path) == [[1, 2], [3, 4]]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([[1]]), pa.array([[1, 2]])], names=["ids", "ids"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match="several columns named 'ids'"):
        check_definition(open_source(tmp_path), LengthDefinition.by_tokens("ids"))


def test_batches_stay_small_where_a_short_file_says_much(tmp_path):
    which = pa.array([0, 1] * 2100, pa.int32())
    texts = pa.DictionaryArray.from_arrays(which, ["x" * 500_000, "y" * 500_000])  # 2 GiB of text
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    tokens = pa.ListArray.from_arrays(
        np.arange(0, 20_000_001, 1000, dtype=np.int32), np.zeros(20_000_000, np.int32)
    )
    pq.write_table(pa.table({"ids": tokens}), tmp_path / "b.parquet")
    for name, column, num_rows in [("a.parquet", "text", 4200), ("b.parquet", "ids", 20_000)]:
        assert (tmp_path / name).stat().st_size < 1 << 20
        opened = open_source(tmp_path / name)
        [unit] = opened.units([column])
        sizes = [(batch.num_rows, batch.nbytes) for batch in opened.read(unit, {column: None})]
        assert sum(rows for rows, _ in sizes) == num_rows
        assert max(nbytes for _, nbytes in sizes) <= BATCH_BYTES


def test_the_cache_is_bounded_in_bytes(tmp_path):
    rows = [list(range(1000))] * 100
    pq.write_table(pa.table({"ids": rows}), tmp_path / "a.parquet", row_group_size=10)
    opened = open_source(tmp_path / "a.parquet")
    opened._cache._limit = 300_000
    decoded = []
    group = parquet.ParquetPart._decode_group
    opened.parts[0]._decode_group = lambda *args: decoded.append(args[0]) or group(opened.parts[0], *args)
    for row in (0, 1, 15, 2, 25, 35, 45, 3):
        assert opened.rows([row], IDS)[0]["ids"][0].as_py() == rows[row]
    assert decoded == [0, 1, 2, 3, 4, 0]
    assert opened._cache._num_bytes <= 300_000
