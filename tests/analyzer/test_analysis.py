"""From data sets to metrics: right lengths, one error for bad input, and nothing half-written ever."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packer
from packer.errors import (
    ColumnError,
    ConfigError,
    SourceChangedError,
    SourceError,
    TargetBusyError,
    TargetExistsError,
    TargetWriteError,
    WorkerLostError,
)
from packer.metrics import open_metrics, write_items
from packer.publish import published_directory


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """A unit a row group, so that little data makes many units."""
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 1)


def write_lists(path: Path, rows: list, *, name: str = "input_ids", group: int = 5, **more: pa.Array) -> Path:
    table = pa.table({name: pa.array(rows, pa.list_(pa.int32())), **more})
    pq.write_table(table, path, row_group_size=group)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def lists(tmp_path):
    """40 rows in 8 row groups, row i of length i % 7."""
    return write_lists(tmp_path / "data.parquet", [[1] * (n % 7) for n in range(40)])


SEQLENS = [n % 7 for n in range(40)]


@settings(max_examples=30)
@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=9)), min_size=1, max_size=30))
def test_lengths_are_those_of_python(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("lengths")
    result = packer.analyze(
        write_lists(folder / "x.parquet", rows), out=folder / "m", tokens_column="input_ids"
    )

    seqlens = [len(row or []) for row in rows]
    metrics = open_metrics(folder / "m")
    assert metrics.metric("seqlen").tolist() == seqlens
    assert result.manifest == metrics.manifest
    assert result.main.total == sum(seqlens)
    assert result.manifest.num_nulls == rows.count(None)
    assert result.manifest.num_empties == rows.count([])
    assert sorted(p.name for p in folder.iterdir()) == ["m", "x.parquet"]


def test_the_manifest_says_what_was_measured(tmp_path, lists):
    other = write_lists(tmp_path / "other.parquet", [[1], [2, 3]])
    packer.analyze([lists, other], out=tmp_path / "m", tokens_column="input_ids")
    manifest = open_metrics(tmp_path / "m").manifest

    assert manifest.num_samples == 42
    assert [(source["format"], source["num_rows"]) for source in manifest.sources] == [
        ("parquet", 40),
        ("parquet", 2),
    ]
    assert manifest.definition == {"kind": "tokens", "columns": {"seqlen": "input_ids"}}
    text = (tmp_path / "m" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert "other" not in text


def test_any_number_of_workers_gives_the_same_bytes(tmp_path, lists):
    for workers in (1, 2, 3):
        packer.analyze(lists, out=tmp_path / f"m{workers}", tokens_column="input_ids", workers=workers)
    assert contents(tmp_path / "m1") == contents(tmp_path / "m2") == contents(tmp_path / "m3")
    assert open_metrics(tmp_path / "m1").metric("seqlen").tolist() == SEQLENS


def test_labels_give_loss_tokens(tmp_path):
    labels = pa.array([[-100, 5, 5], [5], [], None], pa.list_(pa.int64()))
    data = write_lists(tmp_path / "x.parquet", [[1, 2, 3], [1], [], None], labels=labels)
    for shift, expected in ((True, [2, 0, 0, 0]), (False, [2, 1, 0, 0])):
        out = tmp_path / f"m{shift}"
        packer.analyze(data, out=out, tokens_column="input_ids", labels_column="labels", shift=shift)
        assert open_metrics(out).metric("loss_tokens").tolist() == expected
        assert open_metrics(out).metric("seqlen").tolist() == [3, 1, 0, 0]


def test_several_columns_are_a_metric_each(tmp_path):
    target = pa.array([[1], [1, 2], []], pa.list_(pa.int32()))
    data = write_lists(tmp_path / "x.parquet", [[1, 2, 3], [1], []], name="src", tgt=target)
    columns = {"source": "src", "target": "tgt"}
    packer.analyze(data, out=tmp_path / "m", tokens_column=columns)
    metrics = open_metrics(tmp_path / "m")
    assert metrics.names == ("source", "target")
    assert metrics.metric("source").tolist() == [3, 1, 0]
    assert metrics.metric("target").tolist() == [1, 2, 0]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_every_format_gives_the_same_lengths(tmp_path, small_tokenizer):
    texts = ["w2 w3", "", None, "w4 " * 9, "é 漢"]
    seqlens = [3, 1, 0, 10, 3]
    table = pa.table({"text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "b.arrow", compression="uncompressed")
    write_jsonl(tmp_path / "c.jsonl", table.to_pylist())
    write_jsonl(tmp_path / "d.jsonl.gz", table.to_pylist())
    sources = [tmp_path / name for name in ("a.parquet", "b.arrow", "c.jsonl", "d.jsonl.gz")]
    options = {"text_column": "text", "tokenizer": small_tokenizer}
    result = packer.analyze(sources, out=tmp_path / "m", **options)
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == seqlens * 4
    assert [source["num_rows"] for source in result.manifest.sources] == [5] * 4
    assert result.manifest.num_nulls == 4
    packer.analyze(sources, out=tmp_path / "m2", workers=2, **options)
    assert contents(tmp_path / "m") == contents(tmp_path / "m2")


def test_token_files_need_no_definition(tmp_path):
    for name, lengths in (("first", [3, 0, 1]), ("second", [5])):
        ids = np.zeros(sum(lengths), np.int32)
        write_items(
            tmp_path / name, [ids], np.array(lengths), np.dtype(np.int32), np.array([0, len(lengths)])
        )
    packer.analyze([tmp_path / "first.bin", tmp_path / "second.bin"], out=tmp_path / "m")
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [3, 0, 1, 5]
    with pytest.raises(ConfigError, match="--tokenizer has no meaning"):
        packer.analyze(tmp_path / "first.bin", out=tmp_path / "n", tokenizer="tokenizer.json")


def test_files_with_different_schemas(tmp_path):
    """Of the files only the columns that are read matter, and in these the kind of list does not."""
    write_lists(tmp_path / "a.parquet", [[1, 2], [3]], other=pa.array(["x", "y"]))
    large = pa.array([[1], [2, 3, 4]], pa.large_list(pa.int64()))
    pq.write_table(pa.table({"more": [1, 2], "input_ids": large}), tmp_path / "b.parquet")
    packer.analyze(tmp_path, out=tmp_path / "m", tokens_column="input_ids")
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [2, 1, 1, 3]

    pq.write_table(pa.table({"ids": [[1]]}), tmp_path / "c.parquet")
    with pytest.raises(ColumnError, match=r"c\.parquet has no column 'input_ids'"):
        packer.analyze(tmp_path / "*.parquet", out=tmp_path / "n", tokens_column="input_ids")


def test_lengths_over_32_bits(tmp_path):
    lengths = [2**40, 0, 2**62]
    pq.write_table(pa.table({"n": lengths}), tmp_path / "x.parquet")
    result = packer.analyze(tmp_path / "x.parquet", out=tmp_path / "m", length_column="n")
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == lengths
    assert result.main.total == sum(lengths)
    assert result.main.median == 2**40


def test_a_null_column_in_the_first_file_and_a_typed_one_in_the_second(tmp_path):
    pq.write_table(pa.table({"ids": pa.nulls(3)}), tmp_path / "a.parquet")
    write_lists(tmp_path / "b.parquet", [[1, 2]], name="ids")
    result = packer.analyze(tmp_path / "*.parquet", out=tmp_path / "m", tokens_column="ids")
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [0, 0, 0, 2]
    assert result.manifest.num_nulls == 3


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        ([[1, 2]] * 5, "seqlen is 2 for all 5 samples; if they were padded or truncated"),
        ([[], None, []], "seqlen is 0 for all 3 samples; is it the right column"),
        ([[1]], None),
        ([[1], [1, 2]], None),
    ],
)
def test_suspicious_lengths_earn_a_warning(tmp_path, rows, warning):
    data = write_lists(tmp_path / "x.parquet", rows)
    warnings = packer.analyze(data, out=tmp_path / "m", tokens_column="input_ids").warnings
    assert (not warnings) if warning is None else (warning in warnings[0])


def test_equal_loss_tokens_are_no_reason_to_warn(tmp_path):
    table = pa.table({"input_ids": [[1, 2], [1, 2, 3]], "labels": [[-100, 2], [-100, -100, 3]]})
    pq.write_table(table, tmp_path / "x.parquet")
    columns = {"tokens_column": "input_ids", "labels_column": "labels"}
    assert not packer.analyze(tmp_path / "x.parquet", out=tmp_path / "m", **columns).warnings


def test_progress_within_one_row_group_and_one_compressed_file(tmp_path, monkeypatch):
    monkeypatch.setattr("packer.jobs.progress._SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr("packer.sources.parquet.BATCH_ROWS", 100)
    monkeypatch.setattr("packer.sources.text_part.BLOCK_BYTES", 1000)
    lists = [[1] * (n % 7) for n in range(1000)]
    text = random.Random(0).randbytes(500_000).hex()  # hardly packs
    rows = [{"input_ids": ids, "text": text[n * 1000 : n * 1000 + 1000]} for n, ids in enumerate(lists)]
    sources = [
        write_lists(tmp_path / "one.parquet", lists, group=1000),
        write_jsonl(tmp_path / "one.jsonl.gz", rows),
    ]
    for source in sources:
        seen = []
        packer.analyze(source, out=tmp_path / source.stem, tokens_column="input_ids", progress=seen.append)
        shares = [progress.fraction for progress in seen]
        assert shares == sorted(shares)
        assert sum(0.05 < share < 0.95 for share in shares) > 3
        assert [progress.num_rows for progress in seen] == sorted(progress.num_rows for progress in seen)
        assert (seen[-1].fraction, seen[-1].num_rows) == (1, 1000)
        assert seen[-1].num_tokens == sum(map(len, lists))


def test_progress_counts_to_the_end(tmp_path, lists):
    seen = []
    packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids", progress=seen.append)
    assert len(seen) == 8
    assert [progress.num_rows for progress in seen] == list(range(5, 41, 5))
    assert seen[-1].num_tokens == sum(SEQLENS)
    assert seen[-1].fraction == 1.0
    assert seen[-1].seconds_left == 0.0


# What is refused, and leaves nothing behind.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens_column": "inputs"}, ColumnError, "did you mean 'input_ids'"),
        ({"tokens_column": "text"}, ColumnError, "'text' is of type string"),
        ({"length_column": "text"}, ColumnError, "'text' is of type string; name an integer column"),
        ({"length_column": "negative"}, SourceError, "length -1"),
        ({}, ConfigError, "nothing says what the length of a sample is"),
        ({"tokens_column": "input_ids", "length_column": "n"}, ConfigError, "give one of them"),
        ({"text_column": "text"}, ConfigError, "needs --tokenizer"),
        ({"tokens_column": "input_ids", "tokenizer": "t"}, ConfigError, "--tokenizer has no meaning"),
        ({"text_column": "t", "tokenizer": "t", "labels_column": "l"}, ConfigError, "--labels-column has no"),
        (
            {"tokens_column": "input_ids", "counter": "gigatoken"},
            ConfigError,
            "--counter gigatoken counts texts",
        ),
        ({"tokens_column": {"../up": "input_ids"}}, ConfigError, "cannot name a metric"),
        ({"tokens_column": "input_ids", "workers": 0}, ConfigError, "--workers 0"),
    ],
)
def test_what_cannot_be_measured(tmp_path, options, error, message):
    data = write_lists(tmp_path / "x.parquet", [[1]], text=pa.array(["a"]), negative=pa.array([-1]))
    with pytest.raises(error, match=message):
        packer.analyze(data, out=tmp_path / "m", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_a_data_set_without_rows(tmp_path):
    data = write_lists(tmp_path / "x.parquet", [])
    with pytest.raises(SourceError, match="is empty"):
        packer.analyze(data, out=tmp_path / "m", tokens_column="input_ids")
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_an_existing_target_is_kept_unless_told(tmp_path, lists):
    packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")
    before = contents(tmp_path / "m")
    with pytest.raises(TargetExistsError, match="--overwrite"):
        packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")
    assert contents(tmp_path / "m") == before

    write_lists(lists, [[1, 2, 3]])
    packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids", overwrite=True)
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [3]


def test_overwrite_never_removes_the_data(tmp_path):
    (tmp_path / "data").mkdir()
    data = write_lists(tmp_path / "data" / "x.parquet", [[1]])
    with pytest.raises(TargetExistsError, match="holds no manifest"):
        packer.analyze(data, out=tmp_path / "data", tokens_column="input_ids", overwrite=True)
    (tmp_path / "data" / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds the data set itself"):
        packer.analyze(data, out=tmp_path / "data", tokens_column="input_ids", overwrite=True)
    assert data.is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(TargetExistsError, match="holds no manifest"):
        packer.analyze(data, out=tmp_path / "other", tokens_column="input_ids", overwrite=True)


def test_a_target_is_refused_before_the_data_is_looked_at(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(TargetExistsError, match="exists already"):
        packer.analyze(tmp_path / "nowhere.parquet", out=tmp_path / "m", tokens_column="input_ids")


def test_of_two_runs_into_one_target_one_wins(tmp_path, lists):
    def run_another(_):
        with pytest.raises(TargetBusyError, match="another process is writing"):
            packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")

    packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids", progress=run_another)
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == SEQLENS


def test_a_bad_file_among_good_ones(tmp_path, lists):
    content = lists.read_bytes()
    for cut in range(0, len(content), 41):
        (tmp_path / "e.parquet").write_bytes(content[:cut])
        with pytest.raises(SourceError, match=r"e\.parquet"):
            packer.analyze([lists, tmp_path / "e.parquet"], out=tmp_path / "m", tokens_column="input_ids")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.parquet", "e.parquet"]


def test_a_data_set_that_changes_meanwhile(tmp_path, lists):
    def grow(_):
        write_lists(lists, [[1] * 100] * 50)

    with pytest.raises(SourceError) as caught:
        packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids", progress=grow)
    assert isinstance(caught.value, SourceChangedError)
    assert [p.name for p in tmp_path.iterdir()] == ["data.parquet"]


def test_a_full_disk(tmp_path, lists, monkeypatch):
    def no_room(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("packer.metrics.writer.HashedFile.write", no_room)
        with pytest.raises(TargetWriteError, match="No space left on device; nothing was published"):
            packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")
    assert not (tmp_path / "m").exists()
    packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == SEQLENS


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_is_really_full(tmp_path):
    lengths = np.arange(100_000)
    pq.write_table(pa.table({"n": lengths}), tmp_path / "x.parquet")
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", tmp_path / "disk"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    try:
        out = tmp_path / "disk" / "m"
        with pytest.raises(TargetWriteError, match="No space left on device; nothing was published"):
            packer.analyze(tmp_path / "x.parquet", out=out, length_column="n")
        assert not out.exists()
        subprocess.run(["mount", "-o", "remount,size=8m", tmp_path / "disk"], check=True)
        packer.analyze(tmp_path / "x.parquet", out=out, length_column="n")
        assert np.array_equal(open_metrics(out).metric("seqlen"), lengths)
        assert [p.name for p in out.parent.iterdir()] == ["m"]
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


# Interruptions.


class Interrupt:
    """Stops a run after some units, as Ctrl-C would."""

    def __init__(self, units: int) -> None:
        self.units = units

    def __call__(self, _: object) -> None:
        self.units -= 1
        if self.units == 0:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on(tmp_path, lists):
    packer.analyze(lists, out=tmp_path / "whole", tokens_column="input_ids")
    for units in (3, 2):
        with pytest.raises(KeyboardInterrupt):
            packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids", progress=Interrupt(units))
        assert not (tmp_path / "m").exists()
    result = packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")
    assert result.num_units_reused == 5
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.parquet", "m", "whole"]


@pytest.mark.parametrize("change", ["grow", "shrink", "definition", "version"])
def test_units_of_another_job_are_not_reused(tmp_path, lists, monkeypatch, change):
    with pytest.raises(KeyboardInterrupt):
        packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids", progress=Interrupt(3))
    rows = SEQLENS
    options = {"tokens_column": "input_ids"}
    if change in ("grow", "shrink"):
        rows = [2] * 45 if change == "grow" else [2] * 12
        write_lists(lists, [[1] * n for n in rows])
    elif change == "definition":
        options = {"tokens_column": {"ids": "input_ids"}}
    else:
        monkeypatch.setattr("packer.analyzer.work.__version__", "9.9.9")
    result = packer.analyze(lists, out=tmp_path / "m", **options)
    assert result.num_units_reused == 0
    assert open_metrics(tmp_path / "m").metric(next(iter(result.manifest.metrics))).tolist() == rows


KILLED_RUN = """
    import os, signal, sys
    import packer, packer.analyzer.work
    packer.analyzer.work.UNIT_BYTES = 1
    data, out, where, workers = sys.argv[1:]
    units = 0

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def listen(progress):
        global units
        units += 1
        if units == 4:
            die()

    if __name__ == "__main__":
        if where == "merging":
            import packer.analyzer.writing
            packer.analyzer.writing.Manifest.save = die
        elif where == "publishing":
            import packer.publish
            packer.publish._move_into_place = die
        progress = listen if where == "measuring" else None
        packer.analyze(data, out=out, tokens_column="input_ids", workers=int(workers), progress=progress)
"""


@pytest.mark.parametrize(
    ("where", "workers", "reused"),
    [("measuring", 1, 4), ("measuring", 2, 4), ("merging", 1, 8), ("publishing", 1, 0)],
)
def test_a_kill_leaves_no_target_and_the_next_run_succeeds(tmp_path, lists, where, workers, reused):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(KILLED_RUN))
    command = [sys.executable, script, lists, tmp_path / "m", where, str(workers)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "m").exists()

    result = packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")
    assert result.num_units_reused == reused
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == SEQLENS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.parquet", "m", "run.py"]


def test_a_killed_worker_costs_no_finished_unit(tmp_path, lists):
    def kill_workers(progress):
        if progress.num_rows == 15:
            for child in psutil.Process().children(recursive=True):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()

    options = {"out": tmp_path / "m", "tokens_column": "input_ids"}
    with pytest.raises(WorkerLostError, match="finished units are kept, run again"):
        packer.analyze(lists, workers=2, progress=kill_workers, **options)
    assert packer.analyze(lists, workers=2, **options).num_units_reused >= 3
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == SEQLENS


def test_a_target_beside_a_published_one_is_found_in_the_folder_made_for_it(tmp_path, lists):
    packer.analyze(lists, out=tmp_path / "a" / "b" / "m", tokens_column="input_ids")
    assert np.array_equal(open_metrics(tmp_path / "a" / "b" / "m").metric("seqlen"), SEQLENS)


def test_the_lock_is_that_of_every_other_publication(tmp_path, lists):
    with published_directory(tmp_path / "m", marker="x"), pytest.raises(TargetBusyError):
        packer.analyze(lists, out=tmp_path / "m", tokens_column="input_ids")
