"""Rows that cannot be read: the end of the run, or of length 0 under their ids; texts may be mended."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packer
from packer.analyzer import verify_source
from packer.errors import ConfigError, SourceError
from packer.metrics import open_metrics
from tests.word_tokenizer import write_tokenizer

HALF = "\ud83d"  # of a pair that JSON writes as \\ud83d\\ude00


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), 50)


def write(path, lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


TEXTS = ["w2 w3", f"w4 {HALF} w5", None, "", "\U0001f600", HALF]


def test_half_of_a_surrogate_pair_ends_the_run_by_its_name(tmp_path, tokenizer):
    data = write(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(SourceError, match=r"row 1: column 'text' holds half of a surrogate pair.*--on-error"):
        packer.analyze(data, out=tmp_path / "m", text_column="text", tokenizer=tokenizer)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("on_error", "seqlens", "skipped"),
    [("skip", [3, 0, 0, 1, 2, 0], [1, 5]), ("replace", [3, 4, 0, 1, 2, 2], [])],
)
def test_a_run_goes_on_and_training_reads_the_same(tmp_path, tokenizer, on_error, seqlens, skipped):
    data = write(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    result = packer.analyze(
        data, out=tmp_path / "m", text_column="text", tokenizer=tokenizer, on_error=on_error
    )
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == seqlens
    manifest = open_metrics(tmp_path / "m").manifest
    assert (manifest.num_nulls, manifest.num_skipped, manifest.skipped_samples) == (1, len(skipped), skipped)
    assert manifest.definition["on_error"] == on_error
    assert [warning[:22] for warning in result.warnings] == (["2 samples could not be"] if skipped else [])
    dataset = packer.open_dataset(data, metrics=tmp_path / "m")
    assert [len(sample["input_ids"]) for sample in dataset] == seqlens
    assert [len(sample["input_ids"]) for sample in dataset.__getitems__([5, 1, 0])] == [
        seqlens[n] for n in (5, 1, 0)
    ]
    plan = packer.make_plan(tmp_path / "m", packer.PlanConfig(max_tokens=16), out=tmp_path / "plan")
    assert verify_source(plan, data, metrics=open_metrics(tmp_path / "m")) == 6


def test_a_half_in_any_key_is_no_traceback(tmp_path):
    data = write(tmp_path / "x.jsonl", [{HALF: 1, "n": 2, "s": {HALF: {HALF: 3}}}])
    packer.analyze(data, out=tmp_path / "m", length_column="n")
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [2]
    for column in (HALF, f"s.{HALF}"):
        with pytest.raises(SourceError, match="has no column"):
            packer.analyze(data, out=tmp_path / "none", length_column=column)


def test_lines_that_are_no_rows_are_skipped(tmp_path):
    lines = [
        '{"n": 1,\n',
        {"n": [1, 2]},
        "[1]\n",
        {"n": 3},
        '{"n": [1.5]}\n',
        {"n": [None]},
        {"n": []},
        {"m": 1},
        '{"n": [7]',
    ]
    data = write(tmp_path / "x.jsonl", lines)
    packer.analyze(data, out=tmp_path / "m", tokens_column="n", on_error="skip")
    metrics = open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 0]
    assert metrics.manifest.skipped_samples == [0, 2, 3, 4, 5, 8]
    assert (metrics.manifest.num_nulls, metrics.manifest.num_empties) == (1, 1)
    dataset = packer.open_dataset(data, metrics=tmp_path / "m")
    assert [sample["input_ids"].tolist() for sample in dataset] == [[], [1, 2], *[[]] * 7]
    with pytest.raises(SourceError, match="row 0: "):
        packer.analyze(data, out=tmp_path / "replaced", tokens_column="n", on_error="replace")


def test_rows_of_typed_formats_are_skipped_too(tmp_path):
    ids = pa.array([[1, 2], [3, None], [4], None, []])
    labels = pa.array([[1, 2], [3, 3], [4, 4], None, []])
    pq.write_table(pa.table({"ids": ids, "labels": labels}), tmp_path / "x.parquet", row_group_size=2)
    packer.analyze(
        tmp_path / "x.parquet",
        out=tmp_path / "m",
        tokens_column="ids",
        labels_column="labels",
        on_error="skip",
    )
    metrics = open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == [2, 0, 0, 0, 0]
    assert metrics.metric("loss_tokens").tolist() == [1, 0, 0, 0, 0]
    assert metrics.manifest.skipped_samples == [1, 2]
    assert (metrics.manifest.num_nulls, metrics.manifest.num_empties) == (1, 1)
    samples = list(packer.open_dataset(tmp_path / "x.parquet", metrics=tmp_path / "m"))
    assert [sample["input_ids"].tolist() for sample in samples] == [[1, 2], [], [], [], []]
    assert [sample["labels"].tolist() for sample in samples] == [[1, 2], [], [], [], []]


def test_a_row_that_was_measured_is_not_skipped_for_a_field_beside_it(tmp_path):
    table = pa.table({"ids": [[1, 2]], "weights": [[0.5]]})
    pq.write_table(table, tmp_path / "x.parquet")
    packer.analyze(tmp_path / "x.parquet", out=tmp_path / "m", tokens_column="ids", on_error="skip")
    dataset = packer.open_dataset(tmp_path / "x.parquet", metrics=tmp_path / "m", fields=["weights"])
    with pytest.raises(SourceError, match="'weights' holds 1 elements beside 2 tokens"):
        dataset[0]


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["good", "null", "half", "broken"]), min_size=1, max_size=40),
    st.integers(1, 200),
)
def test_skipped_rows_are_those_that_fail_alone(tmp_path_factory, kinds, unit_bytes):
    folder = tmp_path_factory.mktemp("skip")
    lines = {
        "good": {"ids": [1, 2, 3]},
        "null": {"ids": None},
        "half": {"ids": HALF},
        "broken": '{"ids": [1\n',
    }
    write(folder / "x.jsonl", [lines[kind] for kind in kinds])
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", unit_bytes)
    with monkeypatch.context():
        try:
            packer.analyze(folder / "x.jsonl", out=folder / "m", tokens_column="ids", on_error="skip")
        except SourceError:
            assert set(kinds) <= {"broken"} or "good" not in kinds
            return
        finally:
            monkeypatch.undo()
    metrics = open_metrics(folder / "m")
    assert metrics.metric("seqlen").tolist() == [3 * (kind == "good") for kind in kinds]
    assert metrics.manifest.skipped_samples == [
        n for n, kind in enumerate(kinds) if kind in ("half", "broken")
    ]
    assert metrics.manifest.num_nulls == kinds.count("null")


def test_workers_skip_the_same_and_the_manifest_names_the_first(tmp_path):
    lines = ["x\n" if n % 3 else {"n": 1} for n in range(900)]
    data = write(tmp_path / "x.jsonl", lines)
    for workers in (1, 2):
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 500)
        packer.analyze(
            data, out=tmp_path / f"m{workers}", length_column="n", on_error="skip", workers=workers
        )
        monkeypatch.undo()
    one, two = ((tmp_path / name / "manifest.json").read_bytes() for name in ("m1", "m2"))
    assert one == two
    manifest = open_metrics(tmp_path / "m1").manifest
    assert manifest.num_skipped == 600
    assert manifest.skipped_samples == np.flatnonzero(np.arange(900) % 3)[:100].tolist()


def test_an_unknown_choice_is_refused(tmp_path):
    data = write(tmp_path / "x.jsonl", [{"n": 1}])
    with pytest.raises(ConfigError, match="--on-error ignore: there are error, skip, replace"):
        packer.analyze(data, out=tmp_path / "m", length_column="n", on_error="ignore")
