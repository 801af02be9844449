"""Further metrics: shipped, named, or given as functions."""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packer
from packer.analyzer import sample_metric
from packer.errors import ColumnError, ConfigError, SourceError
from packer.metrics import open_metrics


@sample_metric(columns=["score"])
def difficulty(batch: pa.RecordBatch) -> np.ndarray:
    return np.rint(batch["score"].to_numpy() * 100).astype(np.int64)


@sample_metric(token_ids=True)
def largest_id(batch: pa.RecordBatch) -> np.ndarray:
    return np.array([max(ids, default=-1) for ids in batch["token_ids"].to_pylist()])


@sample_metric(vocabulary=True)
def rarest(batch: pa.RecordBatch, vocabulary: np.ndarray) -> np.ndarray:
    rows = batch["token_ids"].to_pylist()
    return np.array([min((vocabulary[token] for token in ids), default=0) for ids in rows])


def undeclared(batch: pa.RecordBatch) -> np.ndarray:
    return np.full(batch.num_rows, batch.num_columns)


def write(path, rows, **more):
    pq.write_table(pa.table({"ids": pa.array(rows, pa.list_(pa.int32())), **more}), path, row_group_size=3)
    return path


ROWS = [[1, 2, 2], [], None, [5], [2, 2, 2, 2], [1, 1], [7, 5]]


@pytest.mark.parametrize("workers", [1, 2])
def test_functions_give_a_metric_each(tmp_path, workers, monkeypatch):
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 1)
    data = write(tmp_path / "x.parquet", ROWS, score=np.arange(7) / 4)
    metrics = [difficulty, largest_id, rarest, undeclared]
    result = packer.analyze(data, out=tmp_path / "m", tokens_column="ids", metrics=metrics, workers=workers)

    found = open_metrics(tmp_path / "m")
    assert found.names == ("seqlen", "difficulty", "largest_id", "rarest", "undeclared")
    assert found.metric("difficulty").tolist() == [0, 25, 50, 75, 100, 125, 150]
    assert found.metric("largest_id").tolist() == [2, -1, -1, 5, 2, 1, 7]
    assert found.metric("rarest").tolist() == [3, 0, 0, 2, 6, 3, 1]
    assert result.manifest.functions["difficulty"] == f"{__name__}:difficulty"
    assert result.manifest.metrics["largest_id"].min == -1


@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 20), max_size=8)), min_size=1, max_size=20).filter(
        any
    )
)
def test_vocab_rarity_is_the_sum_of_surprisals(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rarity")
    data = write(folder / "x.parquet", rows)
    packer.analyze(data, out=folder / "m", tokens_column="ids", metrics=["vocab_rarity"])
    counts = Counter(token for row in rows for token in row or [])
    expected = [sum(-math.log(counts[token] / counts.total()) for token in row or []) for row in rows]
    found = open_metrics(folder / "m").metric("vocab_rarity")
    assert all(exact - 1.001 < value <= exact + 0.001 for value, exact in zip(found, expected, strict=True))


def test_a_column_named_as_the_added_one_gives_way(tmp_path):
    pq.write_table(pa.table({"token_ids": [[1, 2], [3]]}), tmp_path / "x.parquet")
    packer.analyze(
        tmp_path / "x.parquet", out=tmp_path / "m", tokens_column="token_ids", metrics=[largest_id]
    )
    assert open_metrics(tmp_path / "m").metric("largest_id").tolist() == [2, 3]


def test_metrics_by_name(tmp_path):
    data = write(tmp_path / "x.parquet", ROWS)
    names = ["seqlen", f"{__name__}:largest_id"]
    packer.analyze(data, out=tmp_path / "m", tokens_column="ids", metrics=names)
    assert open_metrics(tmp_path / "m").names == ("seqlen", "largest_id")


def wrong_shape(batch):
    return np.zeros(batch.num_rows + 1, np.int64)


def wrong_type(batch):
    return np.zeros(batch.num_rows)


def too_large(batch):
    return np.full(batch.num_rows, 2**64 - 1, np.uint64)


def fails(batch):
    raise ZeroDivisionError("no scores")


@sample_metric(columns=["gone"])
def wants_a_missing_column(batch):
    return np.zeros(batch.num_rows, np.int64)


def seqlen(batch):
    return np.zeros(batch.num_rows, np.int64)


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (
            "rarity",
            ConfigError,
            "no metric is named 'rarity'; there are seqlen, loss_tokens and vocab_rarity",
        ),
        ("loss_tokens", ConfigError, "needs --labels-column"),
        ("no_such_module:f", ConfigError, "No module named 'no_such_module'"),
        ("math:gone", ConfigError, "has no attribute 'gone'"),
        ("math:pi", ConfigError, "is no function but float"),
        (lambda batch: None, ConfigError, "use a def"),
        (seqlen, ConfigError, "there is a metric 'seqlen' already"),
        (wrong_shape, SourceError, r"wrong_shape returned an array of shape \(8,\) for 7 samples"),
        (wrong_type, SourceError, "returned float64"),
        (fails, SourceError, "fails failed: ZeroDivisionError: no scores"),
        (too_large, SourceError, "returned 18446744073709551615"),
        (wants_a_missing_column, ColumnError, "no column 'gone'"),
    ],
)
def test_what_is_no_metric(tmp_path, metric, error, message):
    pq.write_table(pa.table({"ids": pa.array(ROWS, pa.list_(pa.int32()))}), tmp_path / "x.parquet")
    with pytest.raises(error, match=message):
        packer.analyze(tmp_path / "x.parquet", out=tmp_path / "m", tokens_column="ids", metrics=[metric])
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_tokens_cannot_come_from_lengths(tmp_path):
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="needs token ids, and --length-column has none"):
        packer.analyze(
            tmp_path / "x.parquet", out=tmp_path / "m", length_column="n", metrics=["vocab_rarity"]
        )


@pytest.mark.parametrize(("ids", "place"), [([-1], "row 2"), ([2**24], "row 2"), ([0.5], None)])
def test_what_is_no_vocabulary(tmp_path, ids, place):
    pq.write_table(pa.table({"ids": [[1], [2], ids] if place else [ids]}), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=place or "name a list of integers"):
        packer.analyze(
            tmp_path / "x.parquet", out=tmp_path / "m", tokens_column="ids", metrics=["vocab_rarity"]
        )


def test_an_interrupted_count_of_the_vocabulary_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 1)
    data = write(tmp_path / "x.parquet", ROWS)
    options = {"tokens_column": "ids", "metrics": ["vocab_rarity"]}
    packer.analyze(data, out=tmp_path / "whole", **options)
    for stage, reused in (("counting", 1), ("measuring", 3 + 1)):

        def interrupt(progress, stage=stage):
            if progress.stage == stage:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            packer.analyze(data, out=tmp_path / f"m{reused}", progress=interrupt, **options)
        result = packer.analyze(data, out=tmp_path / f"m{reused}", **options)
        assert result.num_units_reused == reused
        assert result.manifest == open_metrics(tmp_path / "whole").manifest
