"""The invariant: for every row, definition and format, as many ids are delivered as were counted."""

import gzip
import json
import multiprocessing
import os
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ConfigError, SourceError
from packer.samples import LengthDefinition, measure_unit, open_dataset
from packer.sources import open_source

WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "if", "é", "漢", "unknown", "\n", " "]), max_size=20)
TOKENS = st.lists(st.integers(0, 50_000), max_size=20)


@st.composite
def tables(draw):
    """Rows with null, empty and other lists; labels as long as their ids, or null."""
    ids = draw(st.lists(st.none() | TOKENS, min_size=1, max_size=12))
    labels = [
        draw(st.none() | st.lists(st.sampled_from([-100, 0, 7]), min_size=len(row), max_size=len(row)))
        if row
        else row
        for row in ids
    ]
    num_rows = len(ids)
    columns = {
        "ids": pa.array(ids, pa.list_(pa.int32())),
        "labels": pa.array(labels, pa.list_(pa.int64())),
        "target": pa.array([draw(TOKENS) for _ in range(num_rows)], pa.list_(pa.uint16())),
        "n": pa.array([len(row or []) for row in ids], pa.int32()),
        "text": pa.array([draw(st.none() | WORDS.map(" ".join)) for _ in range(num_rows)], pa.string()),
    }
    return pa.table(columns)


def write_parquet(table, path):
    pq.write_table(table, path, row_group_size=3)


def write_arrow_file(table, path):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_arrow_stream(table, path):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_jsonl(table, path):
    path.write_text("".join(json.dumps(row) + "\r\n" for row in table.to_pylist()))


def write_jsonl_gz(table, path):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())


WRITERS = {
    "a.parquet": write_parquet,
    "a.arrow": write_arrow_file,
    "b.arrow": write_arrow_stream,
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_jsonl_gz,
}


def definitions(tokenizer):
    """Every kind of definition, each with the fields that it needs beside."""
    return [
        (LengthDefinition.by_tokens("ids"), {}),
        (LengthDefinition.by_tokens("ids", labels_column="labels"), {}),
        (LengthDefinition.by_tokens({"source": "ids", "target": "target"}), {}),
        (LengthDefinition.by_length("n"), {"input_ids": "ids", "labels": "labels"}),
        (LengthDefinition.by_text("text", tokenizer=str(tokenizer)), {}),
        (LengthDefinition.by_text("text", tokenizer=str(tokenizer), special_tokens=False), {}),
    ]


def lengths_of(source, definition, target_bytes=100):
    units = source.units(list(definition.read_columns), target_bytes=target_bytes)
    measured = [m.lengths for unit in units for m in measure_unit(source, unit, definition)]
    return {metric: np.concatenate([m[metric] for m in measured]) for metric in measured[0]}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=25)
@given(table=tables(), order=st.randoms(use_true_random=False))
def test_as_many_ids_as_were_counted(tmp_path_factory, tokenizer_json, name, table, order):
    path = tmp_path_factory.mktemp("rows") / name
    WRITERS[name](table, path)
    for definition, fields in definitions(tokenizer_json):
        lengths = lengths_of(open_source([path, path]), definition)
        dataset = open_dataset([path, path], definition=definition, fields=fields)
        assert len(dataset) == 2 * table.num_rows == len(next(iter(lengths.values())))
        ids = list(range(len(dataset)))
        order.shuffle(ids)
        samples = pickle.loads(pickle.dumps(dataset)).__getitems__(ids)
        for sample_id, sample in zip(ids, samples, strict=True):
            for metric, column in definition.columns:
                key = metric if metric in sample else "input_ids"
                assert len(sample[key]) == lengths[metric][sample_id]
                assert sample[key].flags.writeable
                if definition.kind == "tokens":
                    assert sample[key].tolist() == (table[column][sample_id % table.num_rows].as_py() or [])
            if "loss_tokens" in lengths:
                assert np.count_nonzero(sample["labels"][1:] != -100) == lengths["loss_tokens"][sample_id]
            start, stop = sorted(order.choices(range(25), k=2))
            piece = dataset.read_slice(sample_id, start, stop)
            assert {key: value.tolist() for key, value in piece.items()} == {
                key: value[start:stop].tolist() for key, value in sample.items()
            }


def test_special_tokens_count_and_truncation_does_not(tmp_path, tokenizer_json):
    pq.write_table(pa.table({"text": ["a bb ccc if é 漢 x", "", None]}), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    with_special = LengthDefinition.by_text("text", tokenizer=str(tokenizer_json))
    assert lengths_of(source, with_special)["seqlen"].tolist() == [9, 2, 0]
    without = LengthDefinition.by_text("text", tokenizer=str(tokenizer_json.parent), special_tokens=False)
    assert lengths_of(source, without)["seqlen"].tolist() == [7, 0, 0]
    assert open_dataset(source, definition=with_special)[0]["input_ids"].tolist() == [
        1,
        4,
        5,
        6,
        7,
        8,
        9,
        0,
        2,
    ]


def test_another_tokenizer_is_refused(tmp_path, tokenizer_json):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    definition = LengthDefinition.by_text("text", tokenizer=str(tokenizer_json))
    other = tmp_path / "tokenizer.json"
    other.write_text(tokenizer_json.read_text() + " ")
    with pytest.raises(ConfigError, match="is not the one that the lengths were taken with"):
        open_dataset(tmp_path / "a.parquet", definition=definition, tokenizer=str(other))


def test_a_definition_survives_the_manifest(tokenizer_json):
    for definition, _ in definitions(tokenizer_json):
        assert LengthDefinition.from_json(json.loads(json.dumps(definition.to_json()))) == definition


def test_a_dataset_in_a_line(tmp_path):
    pq.write_table(pa.table({"ids": [[1], [2]], "labels": [[1], [2]]}), tmp_path / "x.parquet")
    dataset = open_dataset(
        tmp_path / "x.parquet", definition=LengthDefinition.by_tokens("ids", labels_column="labels")
    )
    assert repr(dataset) == "Dataset(2 samples of tokens, with input_ids, labels)"


def test_rows_outside_are_an_index_error(tmp_path):
    pq.write_table(pa.table({"ids": [[1]]}), tmp_path / "a.parquet")
    dataset = open_dataset(tmp_path / "a.parquet", definition=LengthDefinition.by_tokens("ids"))
    assert [sample["input_ids"].tolist() for sample in dataset] == [[1]]
    for outside in (-1, 1):
        with pytest.raises(IndexError):
            dataset[outside]


def test_a_field_of_another_length_names_the_row(tmp_path):
    pq.write_table(pa.table({"ids": [[1, 2], [3]], "mask": [[1, 1], [1, 1]]}), tmp_path / "a.parquet")
    dataset = open_dataset(
        tmp_path / "a.parquet", definition=LengthDefinition.by_tokens("ids"), fields=["mask"]
    )
    assert dataset[0]["mask"].tolist() == [1, 1]
    with pytest.raises(SourceError, match=r"a\.parquet, row group 0, row 1: .*2 elements beside 1 tokens"):
        dataset[1]


def test_a_null_among_ids_is_an_error_not_a_number(tmp_path):
    pq.write_table(pa.table({"ids": [[1, 2], [None]]}), tmp_path / "a.parquet")
    dataset = open_dataset(tmp_path / "a.parquet", definition=LengthDefinition.by_tokens("ids"))
    with pytest.raises(SourceError, match=r"row 1: .*null among its elements"):
        dataset[1]


def _first_ids(dataset):
    return dataset[0]["input_ids"].tolist()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow", "a.jsonl"])
def test_a_forked_process_reads_on(tmp_path, name):
    WRITERS[name](pa.table({"ids": [[1, 2], [3]]}), tmp_path / name)
    dataset = open_dataset(tmp_path / name, definition=LengthDefinition.by_tokens("ids"))
    assert _first_ids(dataset) == [1, 2]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_first_ids, (dataset,)).get(timeout=60) == [1, 2]
    assert dataset[1]["input_ids"].tolist() == [3]


def test_a_relative_path_stays_what_it_meant_when_it_was_opened(tmp_path, tokenizer_json, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    shutil.copy(tokenizer_json, folder / "tokenizer.json")
    pq.write_table(pa.table({"text": ["a b c", "d"]}), folder / "rows.parquet")
    monkeypatch.chdir(folder)
    definition = LengthDefinition.by_text("text", tokenizer="tokenizer.json")
    opened = [open_dataset(name, definition=definition) for name in ("rows.parquet", ["*.parquet"])]
    expected = opened[0][0]["input_ids"].tolist()
    monkeypatch.chdir(tmp_path)
    for dataset in (*opened, *pickle.loads(pickle.dumps(opened))):
        assert dataset[0]["input_ids"].tolist() == expected
