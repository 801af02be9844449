"""Whatever happens meanwhile: the same bytes, or one clear error and nothing half-written."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import (
    ColumnError,
    ConfigError,
    LengthMismatchError,
    SourceChangedError,
    SourceError,
    TargetExistsError,
    TargetWriteError,
    WorkerLostError,
)
from packer.shards import feed, gather, scatter
from packer.shards import materialize as module
from tests.shards.worlds import batches_of, content_of, planned, rows_of_tokens, token_world, world_of


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "UNIT_BYTES", 1000)
    monkeypatch.setattr(scatter, "_RUN_BYTES", 500)


def write(world: Any, out: Path, **options: Any) -> packer.shards.materialize.Materialized:
    return packer.materialize(world.plan, world.source, out=out, metrics=world.metrics, **options)


def is_clean(folder: Path) -> bool:
    """Whether nothing is left beside what a test made itself."""
    return not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    world = token_world(tmp_path, rows_of_tokens(400), epochs=2)
    packer.analyze(world.source, out=tmp_path / "m2", tokens_column="ids")
    for workers in (1, 2, 3):
        write(world, tmp_path / f"by-{workers}", workers=workers, shard_size=20_000)
    alone = content_of(tmp_path / "by-1")
    assert len(alone) > 4
    assert content_of(tmp_path / "by-2") == content_of(tmp_path / "by-3") == alone
    assert is_clean(tmp_path)


@pytest.mark.frameworks
def test_ray_gives_the_same_bytes(tmp_path: Path) -> None:
    world = token_world(tmp_path, rows_of_tokens(200))
    for executor in ("local", "ray"):
        write(world, tmp_path / executor, executor=executor, workers=2, shard_size=20_000)
    assert content_of(tmp_path / "ray") == content_of(tmp_path / "local")


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("stop_at", ["first unit", "some units", "first shard", "some shards"])
def test_an_interrupted_run_goes_on(tmp_path: Path, stop_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = token_world(tmp_path, epochs=2)
    write(world, tmp_path / "whole", shard_size=4000)
    stage = "reading" if "unit" in stop_at else "writing"
    calls = []

    def stop(progress: packer.jobs.progress.Progress) -> None:
        if progress.stage == stage:
            calls.append(progress)
            if len(calls) == (1 if "first" in stop_at else 4):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(world, tmp_path / "shards", shard_size=4000, progress=stop)
    assert not (tmp_path / "shards").exists()
    result = write(world, tmp_path / "shards", shard_size=4000)
    assert result.num_units_reused >= len(calls)
    assert content_of(tmp_path / "shards") == content_of(tmp_path / "whole")
    assert is_clean(tmp_path)


@pytest.mark.usefixtures("small_units")
def test_what_another_run_left_is_not_taken(tmp_path: Path) -> None:
    world = token_world(tmp_path, epochs=2)
    write(world, tmp_path / "whole", epoch=1)

    def stop(progress: packer.jobs.progress.Progress) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            write(world, tmp_path / "shards", progress=stop)
    # A file that the journal knows, and that somebody cut.
    spilled = next((tmp_path / ".shards.partial" / "spill").glob("unit-*.arrow"))
    spilled.write_bytes(spilled.read_bytes()[:-1])
    with pytest.raises(KeyboardInterrupt):
        write(world, tmp_path / "shards", progress=stop)
    assert write(world, tmp_path / "shards", epoch=1).num_units_reused == 0
    assert content_of(tmp_path / "shards") == content_of(tmp_path / "whole")


KILLED = """
import sys, time
import packer
from packer.shards import feed, gather, scatter
from packer.shards.materialize import materialize

feed.UNIT_BYTES = scatter._RUN_BYTES = 2000

def slowly(progress):
    time.sleep(0.02)

plan, source, metrics, out = sys.argv[1:]
materialize(plan, source, metrics=metrics, out=out, shard_size=4000, progress=slowly)
"""


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "UNIT_BYTES", 2000)
    world = token_world(tmp_path, rows_of_tokens(300), epochs=2)
    write(world, tmp_path / "whole", shard_size=4000)
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    chance = random.Random(0)
    command = [sys.executable, script, tmp_path / "plan", world.source, world.metrics, tmp_path / "shards"]
    num_kills = 0
    for _ in range(4):
        process = subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL)
        while process.poll() is None and not (tmp_path / ".shards.partial").exists():
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1))
        process.send_signal(signal.SIGKILL)
        num_kills += process.wait() == -signal.SIGKILL
    assert num_kills > 1
    if not (tmp_path / "shards").exists():
        write(world, tmp_path / "shards", shard_size=4000)
    assert content_of(tmp_path / "shards") == content_of(tmp_path / "whole")


class Dying(NamedTuple):
    """A task whose process dies at its second unit."""

    task: Any

    def __call__(self, unit: Any, report: Any) -> bytes:
        if unit.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        payload: bytes = self.task(unit, report)
        return payload


@pytest.mark.usefixtures("small_units")
def test_a_worker_that_dies_costs_no_finished_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = token_world(tmp_path)
    write(world, tmp_path / "whole")
    run = packer.jobs.executors.run_in_processes

    def run_dying(task: Any, units: Any, report: Any, *, workers: int) -> Any:
        return run(Dying(task), units, report, workers=workers)

    with monkeypatch.context() as patch:
        patch.setattr(packer.jobs.executors, "run_in_processes", run_dying)
        with pytest.raises(WorkerLostError, match="run again to go on"):
            write(world, tmp_path / "shards", workers=2)
    write(world, tmp_path / "shards", workers=1)
    assert content_of(tmp_path / "shards") == content_of(tmp_path / "whole")


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17])
def test_edges_of_row_groups(tmp_path: Path, num_rows: int) -> None:
    world = token_world(tmp_path, rows_of_tokens(num_rows), dp_size=1)
    write(world, tmp_path / "shards", shard_size=1)
    dataset = packer.open_dataset(tmp_path / "shards")
    assert len(dataset.header.shards) == world.plan.epoch(0).num_microbatches
    assert batches_of(world.plan, dataset) == batches_of(world.plan, world.dataset)


def test_a_sample_larger_than_all_that_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRETCH_BYTES", 1000)
    monkeypatch.setattr(scatter, "_RUN_BYTES", 1000)
    rows = rows_of_tokens(40)
    rows[17] = list(range(1, 5000))
    world = token_world(tmp_path, rows, max_tokens=6000, dp_size=1)
    write(world, tmp_path / "shards", shard_size=1000)
    dataset = packer.open_dataset(tmp_path / "shards")
    assert batches_of(world.plan, dataset) == batches_of(world.plan, world.dataset)


def test_rows_without_tokens(tmp_path: Path) -> None:
    rows: list[list[int] | None] = [*rows_of_tokens(30)]
    rows[3], rows[4], rows[29] = None, [], None
    world = token_world(tmp_path, rows, max_seqlen=9, too_long="truncate")
    write(world, tmp_path / "shards")
    dataset = packer.open_dataset(tmp_path / "shards")
    assert batches_of(world.plan, dataset) == batches_of(world.plan, world.dataset)


def test_several_files_of_other_types(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = rows_of_tokens(40)
    types = [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int32())]
    for number, kind in enumerate(types):
        part = rows[number * 13 : number * 13 + 13]
        table = pa.table({"ids": pa.array(part, kind), "lang": pa.array(["de", None] * 6 + ["fr"])})
        pq.write_table(table, folder / f"part-{number}.parquet")
    world = planned(tmp_path, folder, {"max_seqlen": 11, "too_long": "split"}, tokens_column="ids")
    result = write(world, tmp_path / "shards")
    assert result.header.columns["ids"] == "list<item: int64>"
    dataset = packer.open_dataset(tmp_path / "shards")
    assert batches_of(world.plan, dataset) == batches_of(world.plan, world.dataset)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["sample_id"], {}, "column 'sample_id', which the shards have themselves.*--keep-columns"),
        (["start"], {}, "column 'start'"),
        (["start"], {"keep_columns": ["none"]}, None),
        (["other"], {"keep_columns": ["nothing"]}, "has no column 'nothing'"),
    ],
)
def test_columns_of_names_that_are_ours(
    tmp_path: Path, columns: list[str], options: dict[str, Any], message: str | None
) -> None:
    rows = rows_of_tokens(20)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"ids": rows} | dict.fromkeys(columns, range(20))), path)
    world = planned(tmp_path, path, {}, tokens_column="ids")
    if message is None:
        assert list(write(world, tmp_path / "shards", **options).header.columns) == [
            "sample_id",
            "start",
            "ids",
        ]
        return
    with pytest.raises(ColumnError, match=message):
        write(world, tmp_path / "shards", **options)
    assert not (tmp_path / "shards").exists()
    assert is_clean(tmp_path)


def test_a_target_that_is_there(tmp_path: Path) -> None:
    world = token_world(tmp_path)
    write(world, tmp_path / "shards", epoch=0)
    first = content_of(tmp_path / "shards")
    with pytest.raises(TargetExistsError, match="exists already"):
        write(world, tmp_path / "shards")
    assert content_of(tmp_path / "shards") == first
    write(world, tmp_path / "shards", overwrite=True, shard_size=3000)
    assert content_of(tmp_path / "shards") != first
    with pytest.raises(TargetExistsError, match=r"holds no shards\.json"):
        write(world, world.metrics, overwrite=True)
    with pytest.raises(ConfigError, match="holds the data set itself"):
        write(world, tmp_path, overwrite=True)
    assert is_clean(tmp_path)


def test_a_disk_without_room_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = token_world(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000))
    with pytest.raises(TargetWriteError, match=r"take about [\d.]+ kB on the disk.*20 kB are free.*--epoch"):
        write(world, tmp_path / "shards")
    monkeypatch.undo()
    write(world, tmp_path / "shards")


def test_a_disk_that_fills_up_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = token_world(tmp_path)
    write(world, tmp_path / "whole", shard_size=4000)
    hand_over = gather._Sink.hand_over

    def full(sink: gather._Sink) -> bytes:
        if sink.size > 2000 and "00002" in sink._file.name:
            raise OSError(28, "No space left on device", str(tmp_path / ".shards.partial" / "x"))
        return hand_over(sink)

    with monkeypatch.context() as patch:
        patch.setattr(gather._Sink, "hand_over", full)
        with pytest.raises(TargetWriteError, match=r"No space left on device.*make room"):
            write(world, tmp_path / "shards", shard_size=4000)
    assert write(world, tmp_path / "shards", shard_size=4000).num_units_reused > 2
    assert content_of(tmp_path / "shards") == content_of(tmp_path / "whole")


def test_another_data_set(tmp_path: Path) -> None:
    world = token_world(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    shorter = token_world(other, rows_of_tokens(119))
    alike = tmp_path / "alike.parquet"
    pq.write_table(pq.read_table(world.source), alike, row_group_size=7)
    with pytest.raises(SourceChangedError, match="119 rows"):
        packer.materialize(world.plan, shorter.source, out=tmp_path / "shards")
    with pytest.raises(SourceChangedError, match="not the file that was planned"):
        packer.materialize(world.plan, alike, out=tmp_path / "shards")
    with pytest.raises(SourceChangedError, match="was made from metrics"):
        packer.materialize(world.plan, world.source, metrics=shorter.metrics, out=tmp_path / "shards")
    # Where nothing tells the files apart, lengths do.
    unknown = packer.make_plan([9] * 119, packer.PlanConfig(max_tokens=90, layout="packed"))
    with pytest.raises(LengthMismatchError, match=r"sample \d+ has \d+ tokens and the plan was made for 9"):
        packer.materialize(unknown, shorter.dataset, out=tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
    assert is_clean(tmp_path)


def test_a_data_set_that_changes_meanwhile(tmp_path: Path) -> None:
    world = token_world(tmp_path)

    def change(progress: packer.jobs.progress.Progress) -> None:
        if progress.stage == "reading":
            pq.write_table(pq.read_table(world.source).slice(1), world.source)

    with pytest.raises(SourceChangedError, match="changed while it was read"):
        write(world, tmp_path / "shards", progress=change)
    assert is_clean(tmp_path)


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    world = world_of("jsonl", tmp_path, max_tokens=2000, dp_size=1)
    lines = world.source.read_text().splitlines()
    lines[41] = lines[41].replace("[", "[[").replace("]", "]]")
    target = tmp_path / "x2.jsonl"
    target.write_text("\n".join(lines))
    plan = packer.make_plan([1] * 60, packer.PlanConfig(max_tokens=60, layout="packed"))
    definition = packer.samples.LengthDefinition.by_tokens("ids")
    with pytest.raises(SourceError, match="row 41"):
        packer.materialize(plan, target, definition=definition, out=tmp_path / "shards")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "gzip"}, "--compression gzip"),
        ({"shard_size": 0}, "--shard-size 0"),
        ({"workers": 0}, "--workers 0"),
        ({"executor": "slurm"}, "--executor slurm"),
    ],
)
def test_options_that_have_no_meaning(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        packer.materialize("no plan", "no source", out=tmp_path / "shards", **options)
