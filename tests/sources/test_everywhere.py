"""The newer formats as every other: behind a URL, in folders, through Ray, the same rows and files."""

import gzip
import json
import tarfile

import fsspec
import pyarrow as pa
import pytest

import packer
from packer.errors import ConfigError, SourceError
from packer.sources import open_source
from tests.sources.test_webdataset import write_tar

IDS = [[row, row + 1][: row % 3] for row in range(40)]
COLUMNS = {"ids": pa.list_(pa.int64()), "text": pa.string()}
NAMES = ("x.csv", "x.tsv.gz", "x.tar")


def texts(delimiter):
    lines = [delimiter.join(["ids", "text"])]
    lines += [f'"{json.dumps(ids)}"{delimiter}"row {row}\nof many"' for row, ids in enumerate(IDS)]
    return ("\n".join(lines) + "\n").encode()


def write_all(folder):
    (folder / "x.csv").write_bytes(texts(","))
    (folder / "x.tsv.gz").write_bytes(gzip.compress(texts("\t")))
    members = [
        (f"d/{row:03}.{extension}", content)
        for row, ids in enumerate(IDS)
        for extension, content in (
            ("json", json.dumps({"ids": ids}).encode()),
            ("text", f"row {row}\nof many".encode()),
            ("jpg", bytes(3000)),
        )
    ]
    write_tar(folder / "x.tar", members, tarfile.GNU_FORMAT)


@pytest.fixture
def remote(tmp_path):
    """The files in memory, and their URL."""
    write_all(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "memory://everywhere/data", recursive=True)
    yield "memory://everywhere/data"
    memory.rm("/everywhere", recursive=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_remote_file_equals_the_local_one(tmp_path, remote, name):
    source, local = open_source(f"{remote}/{name}"), open_source(tmp_path / name)
    assert source.identity() == local.identity()
    units = source.units(list(COLUMNS), target_bytes=500)
    assert units == local.units(list(COLUMNS), target_bytes=500)
    read = [row for unit in units for batch in source.read(unit, COLUMNS) for row in batch.to_pylist()]
    assert read == [{"ids": ids, "text": f"row {row}\nof many"} for row, ids in enumerate(IDS)]
    packer.analyze(tmp_path / name, out=tmp_path / "m", tokens_column="ids")
    dataset = packer.open_dataset(f"{remote}/{name}", metrics=tmp_path / "m")
    assert [sample["input_ids"].tolist() for sample in dataset.__getitems__([39, 0, 5])] == [[], [], [5, 6]]


@pytest.mark.parametrize("name", NAMES)
def test_folders_and_patterns_find_the_format(tmp_path, name):
    (tmp_path / "all").mkdir()
    write_all(tmp_path / "all")
    folder = tmp_path / "one"
    folder.mkdir()
    for number in (10, 2):
        (folder / f"{number}{name}").write_bytes((tmp_path / "all" / name).read_bytes())
    for path in (folder, f"{folder}/*"):
        assert [file.rsplit("/")[-1] for file in open_source(path).files] == [f"2{name}", f"10{name}"]
    with pytest.raises(
        SourceError, match=r"several formats \(.*csv.*webdataset|several formats \(.*webdataset.*csv"
    ):
        open_source(tmp_path / "all")


def test_a_table_of_lance_behind_another_url_is_refused(tmp_path):
    pytest.importorskip("lance")
    memory = fsspec.filesystem("memory")
    memory.pipe("/everywhere/t.lance/_versions/1.manifest", b"x")
    with pytest.raises(ConfigError, match=r"memory://everywhere/t\.lance: Lance reads s3://.*copy the table"):
        open_source("memory://everywhere/t.lance")
    memory.rm("/everywhere", recursive=True)


@pytest.mark.frameworks
def test_ray_writes_the_same_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    lance = pytest.importorskip("lance")
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 200)
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        write_all(tmp_path)
        table = pa.table({"ids": pa.array(IDS, pa.list_(pa.int64()))})
        lance.write_dataset(table, tmp_path / "x.lance", max_rows_per_file=7)
        in_memory = datasets.Dataset(table).shuffle(seed=2)
        for number, given in enumerate([*(tmp_path / name for name in (*NAMES, "x.lance")), in_memory]):
            fingerprints = [
                packer.analyze(
                    given, out=tmp_path / f"m{number}-{executor}", tokens_column="ids", executor=executor
                ).manifest.fingerprint
                for executor in ("local", "ray")
            ]
            assert fingerprints[0] == fingerprints[1]
    finally:
        ray.shutdown()
