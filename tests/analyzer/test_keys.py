"""Keys: equal numbers for equal values, over files, types and workers, in bounded memory."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import packer
from cli.main import cli
from packer.analyzer import keys
from packer.analyzer.keys import hash_values, numbered
from packer.errors import ColumnError, ConfigError, SourceError
from packer.metrics import open_metrics

VALUES = ["a", "b", None, "a", "", "é", "b", None, "a", "0"]


def first_places(values):
    """Number values by where each occurs first: the same for two lists that are equal but for a renaming."""
    places = {}
    return [-1 if value is None else places.setdefault(value, len(places)) for value in values]


def analyzed(source, tmp_path, **options):
    options = {"length_column": "n", "key_columns": "key"} | options
    result = packer.analyze(source, out=tmp_path / "metrics", overwrite=True, **options)
    metrics = open_metrics(tmp_path / "metrics")
    metrics.check_files()
    return result, metrics.metric("key")


def same(codes, values):
    assert first_places([None if code < 0 else code for code in codes.tolist()]) == first_places(values)
    assert sorted(set(codes[codes >= 0].tolist())) == list(range(len({*values} - {None})))


TEXTS = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.dictionary(pa.int8(), pa.string()),
]


@pytest.mark.parametrize("kind", TEXTS, ids=str)
def test_texts_have_equal_codes_where_they_are_equal(tmp_path, kind):
    column = pa.array(VALUES, pa.string()).cast(kind)
    table = pa.table({"key": column, "n": np.arange(len(VALUES))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    result, codes = analyzed(tmp_path / "a.parquet", tmp_path)
    same(codes, VALUES)
    assert codes.dtype == np.int32
    summary = result.manifest.keys["key"]
    assert (summary.origin, summary.num_values, summary.max_count, summary.num_nulls) == ("key", 5, 3, 2)


def test_files_of_several_types_and_formats_are_one_set_of_values(tmp_path):
    """The same text in Parquet, Arrow and JSON, and integers of any width, are one key; "1" and 1 are two."""
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"key": ["x", "1"], "n": [1, 1]}), data / "0.parquet")
    table = pa.table({"key": pa.array([b"1", b"y"]), "n": [1, 1]})
    with pa.ipc.new_file(data / "1.arrow", table.schema) as writer:
        writer.write_table(table)
    pq.write_table(pa.table({"key": pa.array([1, 200], pa.uint8()), "n": [1, 1]}), data / "2.parquet")
    (data / "4.jsonl").write_text(
        '{"key": "x", "n": 1}\n{"key": 1, "n": 1}\n{"n": 1}\n{"key": "y", "n": 1}\n'
    )
    files = [data / name for name in ("0.parquet", "1.arrow", "2.parquet", "4.jsonl")]
    _, codes = analyzed(files, tmp_path)
    same(codes, ["x", "1", "1", "y", 1, 200, "x", 1, None, "y"])


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64()])
def test_integers_of_any_width_and_sign(kind):
    small = hash_values(pa.array([-1, 0, 5, None, 127], kind)).reshape(-1, 16)
    wide = hash_values(pa.array([-1, 0, 5, None, 127], pa.int64())).reshape(-1, 16)
    assert (small == wide).all()
    assert not small[3].any()
    assert len({row.tobytes() for row in small}) == 5


def test_an_unsigned_integer_over_the_signed_ones_is_no_negative_one():
    large = hash_values(pa.array([2**64 - 1, 5], pa.uint64())).reshape(-1, 16)
    signed = hash_values(pa.array([-1, 5])).reshape(-1, 16)
    as_json = hash_values(pa.array([str(2**64 - 1), "5"]), is_json=True).reshape(-1, 16)
    assert (large[0] != signed[0]).any()
    assert (large[1] == signed[1]).all()
    assert (large == as_json).all()


def test_any_number_of_workers_and_units_gives_the_same_codes(tmp_path, monkeypatch):
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 200)
    values = [f"key {n % 37}" for n in range(500)]
    pq.write_table(pa.table({"key": values, "n": np.arange(500)}), tmp_path / "a.parquet", row_group_size=20)
    hashes = {
        analyzed(tmp_path / "a.parquet", tmp_path, workers=workers)[0].manifest.fingerprint
        for workers in (1, 2)
    }
    assert len(hashes) == 1
    same(open_metrics(tmp_path / "metrics").metric("key"), values)


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=60), st.integers(1, 9))
def test_buckets_and_chunks_of_any_size_number_every_value_once(tmp_path_factory, values, size):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(keys, "_ROWS_OF_BUCKET", size)
        patched.setattr(keys, "_AT_ONCE", size)
        hashes = hash_values(pa.array(values, pa.int64()))
        pieces = lambda: (hashes[start : start + 48] for start in range(0, len(hashes), 48))  # noqa: E731
        folder = tmp_path_factory.mktemp("keys")
        with numbered(folder, pieces, len(values), "column") as (codes, summary):
            found = np.concatenate(codes)
        same(found, values)
        present = [value for value in values if value is not None]
        assert summary.num_values == len(set(present))
        assert summary.max_count == max((present.count(value) for value in present), default=0)
        assert summary.num_nulls == values.count(None)
        assert not list(folder.iterdir())


def test_a_value_that_fills_the_data_set_takes_no_more_memory_than_others(tmp_path, monkeypatch):
    """A bucket is read in chunks, and only its distinct values are held."""
    monkeypatch.setattr(keys, "_AT_ONCE", 64)
    seen = []
    unique = np.unique
    monkeypatch.setattr(keys.np, "unique", lambda array: seen.append(len(array)) or unique(array))
    hashes = hash_values(pa.array(["same"] * 1000))
    with numbered(tmp_path, lambda: [hashes], 1000, "column") as (codes, summary):
        assert not np.concatenate(codes).any()
    assert summary.max_count == 1000
    assert max(seen) == 65


@pytest.mark.parametrize(
    ("column", "message"), [([0.5], "holds double"), ([[1]], "holds list"), ([True], "holds bool")]
)
def test_what_is_no_key_is_refused_before_anything_is_read(tmp_path, column, message):
    pq.write_table(pa.table({"key": column, "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match=f"--key-column key {message}.*texts, integers or binaries"):
        analyzed(tmp_path / "a.parquet", tmp_path)


def test_json_that_is_no_key_is_named_by_its_row_or_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"key": "x", "n": 1}\n{"key": [1], "n": 1}\n')
    with pytest.raises(SourceError, match=r"row 1: the key \[1\] is no text"):
        analyzed(tmp_path / "a.jsonl", tmp_path)
    _, codes = analyzed(tmp_path / "a.jsonl", tmp_path, on_error="skip")
    assert codes.tolist() == [0, -1]


def test_a_name_that_is_taken_or_no_name_is_refused(tmp_path):
    pq.write_table(pa.table({"seqlen": ["x"], "a b": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="already; name it otherwise, as KEY=seqlen"):
        analyzed(tmp_path / "a.parquet", tmp_path, key_columns="seqlen")
    with pytest.raises(ConfigError, match="cannot name a metric"):
        analyzed(tmp_path / "a.parquet", tmp_path, key_columns="a b")
    with pytest.raises(ColumnError, match="no column 'other'"):
        analyzed(tmp_path / "a.parquet", tmp_path, key_columns="other")


def test_the_command_names_a_key_and_says_what_it_found(tmp_path):
    pq.write_table(
        pa.table({"s": pa.array([{"url": "u"}, {"url": "u"}, None]), "n": [1, 2, 3]}), tmp_path / "a.parquet"
    )
    run = CliRunner().invoke(
        cli,
        f"analyze {tmp_path}/a.parquet --out {tmp_path}/metrics --length-column n --key-column link=s.url",
    )
    assert run.exit_code == 0, run.output
    assert "link    key: 1 value, the most frequent in 2 samples; 1 without" in run.output
    assert "Warning: key link has one value or none in all samples" in run.output
    assert open_metrics(tmp_path / "metrics").metric("link").tolist() == [0, 0, -1]
    again = CliRunner().invoke(
        cli,
        f"analyze {tmp_path}/a.parquet --out {tmp_path}/again --length-column n --key-column s.url --json",
    )
    assert json.loads(again.stdout)["keys"] == {
        "s.url": {"origin": "s.url", "num_values": 1, "max_count": 2, "num_nulls": 1}
    }


def url_of(samples):
    return [sample["url"] for sample in samples]


def length_of(samples):
    return [sample["n"] for sample in samples]


@pytest.mark.parametrize("workers", [1, 2])
def test_functions_of_samples_give_keys_too(tmp_path, workers):
    values = ["a", "b", None, "a", "b"]
    dataset = [{"url": value, "n": 1 + n} for n, value in enumerate(values)]
    result = packer.analyze_dataset(
        dataset, length_of, key_fns={"url": url_of}, out=tmp_path / "m", batch_size=2, workers=workers
    )
    same(open_metrics(tmp_path / "m").metric("url"), values)
    assert result.manifest.keys["url"].origin == f"{__name__}:url_of"


@pytest.mark.parametrize("returned", [[0.5], [["a"]], ["a", "b"], 7, ["a", 1]])
def test_a_function_that_returns_no_keys_is_named(tmp_path, returned):
    def wrong(samples):
        return returned

    with pytest.raises(SourceError, match="wrong"):
        packer.analyze_dataset([1], lambda rows: [1] * len(rows), key_fns={"k": wrong}, out=tmp_path / "m")
    with pytest.raises(ConfigError, match="already"):
        packer.analyze_dataset([1], len, key_fns={"seqlen": wrong}, out=tmp_path / "m")
