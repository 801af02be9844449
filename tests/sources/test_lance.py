"""Lance tables: versions, fragments, deleted rows, damage, processes; as Lance reads the whole table."""

import multiprocessing
import pickle
import shutil

import pyarrow as pa
import pytest

import packer
from packer.errors import ConfigError, SourceChangedError, SourceError
from packer.sources import open_source

lance = pytest.importorskip("lance")
pytestmark = pytest.mark.frameworks

COLUMNS = {"ids": None, "meta.n": None}


def rows(start, stop):
    return pa.table(
        {
            "ids": pa.array([list(range(row % 5)) for row in range(start, stop)], pa.list_(pa.int32())),
            "meta": [{"n": row} for row in range(start, stop)],
            "id": list(range(start, stop)),
        }
    )


def write(path):
    """Write a table of three versions: 100 rows, some deleted, 20 more."""
    lance.write_dataset(rows(0, 100), path, max_rows_per_file=30)
    lance.dataset(path).delete("id % 7 = 3 OR (id >= 30 AND id < 60)")
    lance.write_dataset(rows(100, 120), path, mode="append")
    return path


def ids_of(version):
    kept = [row for row in range(100) if row % 7 != 3 and not 30 <= row < 60]
    return {1: list(range(100)), 2: kept, 3: [*kept, *range(100, 120)]}[version]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_rows_of_every_version(tmp_path, version):
    path = write(tmp_path / "x.lance")
    source = pickle.loads(pickle.dumps(open_source(path if version == 3 else f"{path}@{version}")))
    expected = ids_of(version)
    assert source.num_rows == len(expected)
    assert [row["id"] for row in lance.dataset(path, version=version).to_table().to_pylist()] == expected
    for target_bytes in (1, 200, 1 << 20):
        units = source.units(list(COLUMNS), target_bytes=target_bytes)
        read = [row for unit in units for batch in source.read(unit, COLUMNS) for row in batch.to_pylist()]
        assert [row["meta"]["n"] for row in read] == expected
        assert [row["ids"] for row in read] == [list(range(row % 5)) for row in expected]
    order = [len(expected) - 1, 0, 25, 0]
    taken = [batch.to_pylist()[0]["meta"]["n"] for batch in source.rows(order, COLUMNS)]
    assert taken == [expected[row] for row in order]


@pytest.mark.parametrize("workers", [1, 2])
def test_from_analysis_to_training_while_the_table_grows(tmp_path, workers):
    path = write(tmp_path / "x.lance")
    packer.analyze(f"{path}@2", out=tmp_path / "m", tokens_column="ids", workers=workers)
    metrics = packer.open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == [row % 5 for row in ids_of(2)]
    dataset = packer.open_dataset(f"{path}@2", metrics=metrics)
    with pytest.raises(SourceChangedError, match=r"x\.lance is not the file that"):
        packer.open_dataset(path, metrics=metrics)
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=16))
    with packer.PlanLoader(
        plan, dataset, dp_rank=0, dp_size=1, num_workers=1, multiprocessing_context="spawn"
    ) as loader:
        seen = {
            int(at): row
            for step in loader
            for batch in step
            for at, row in zip(batch.sample_ids, batch["input_ids"], strict=True)
        }
    counts = [row % 5 for row in ids_of(2)]
    assert sorted(seen) == [at for at, count in enumerate(counts) if count]
    assert all(row[: counts[at]].tolist() == list(range(counts[at])) for at, row in seen.items())


def _read_first(source, queue):
    try:
        queue.put(source.rows([0], {"ids": None})[0].num_rows)
    except ConfigError as error:
        queue.put(str(error))


def test_a_forked_process_is_told_what_to_do(tmp_path):
    source = open_source(write(tmp_path / "x.lance"))
    source.close()
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    process = fork.Process(target=_read_first, args=(source, queue))
    process.start()
    answer = queue.get()
    process.join()
    assert "cannot be read in a forked process; give PlanLoader multiprocessing_context='spawn'" in answer


def test_what_is_not_there(tmp_path):
    path = write(tmp_path / "x.lance")
    with pytest.raises(SourceError, match=r"x\.lance, version 9: cannot be read"):
        open_source(f"{path}@9")
    with pytest.raises(SourceError, match=r"x\.lance@x: no such file"):
        open_source(f"{path}@x")
    shutil.rmtree(path / "data")
    with pytest.raises(SourceError, match=r"x\.lance.*cannot be read"):
        packer.analyze(path, out=tmp_path / "m", tokens_column="ids")
    assert not (tmp_path / "m").exists()


def test_cut_files_are_one_clear_error(tmp_path):
    path = write(tmp_path / "x.lance")
    victims = [*path.glob("data/*.lance"), *path.glob("_versions/*.manifest"), *path.glob("_deletions/*")]
    assert len(victims) >= 8
    for victim in victims[::2]:
        content = victim.read_bytes()
        victim.write_bytes(content[: len(content) // 2])
        message, found = "", None
        try:
            packer.analyze(f"{path}@3", out=tmp_path / "m", overwrite=True, tokens_column="ids")
            found = packer.open_metrics(tmp_path / "m").metric("seqlen").tolist()
        except SourceError as error:
            message = str(error)
        # What damages another version leaves this one as it is.
        assert "x.lance" in message or found == [row % 5 for row in ids_of(3)]
        victim.write_bytes(content)


def test_tables_of_a_pattern(tmp_path):
    for number in (10, 2):
        lance.write_dataset(rows(0, number), tmp_path / f"t-{number}.lance")
    assert [part.num_rows for part in open_source(f"{tmp_path}/t-*.lance").parts] == [2, 10]
