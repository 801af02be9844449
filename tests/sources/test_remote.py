"""The same rows through fsspec: ``memory://`` stands for every remote place, ``file://`` for this machine."""

import json
import shutil

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec import AbstractFileSystem

from packer.errors import MissingExtraError, SourceError
from packer.samples import LengthDefinition, default_definition, measure_unit, open_dataset
from packer.sources import open_source
from tests.sources.test_arrow import write
from tests.sources.test_indexed import write_pair

IDS = [[1, 2, 3], [], [4], None, [5] * 20]


@pytest.fixture
def remote(tmp_path):
    """A folder whose content a test uploads; returns the upload and the URL."""
    memory = fsspec.filesystem("memory")

    def upload(url="memory://bucket/data"):
        memory.put(str(tmp_path), url, recursive=True)
        return url

    yield upload
    memory.rm("/bucket", recursive=True)


def write_all(folder):
    table = pa.table({"ids": pa.array(IDS, pa.list_(pa.int64()))})
    pq.write_table(table, folder / "p-2.parquet", row_group_size=2)
    shutil.copy(folder / "p-2.parquet", folder / "p-10.parquet")
    write(folder / "a.arrow", table, "file", rows_per_batch=2)
    write(folder / "b.arrows", table, "stream", rows_per_batch=2)
    (folder / "j.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    write_pair(folder / "t", [row or [] for row in IDS], 8, np.dtype(np.uint16))


@pytest.mark.parametrize("name", ["p-2.parquet", "a.arrow", "b.arrows", "j.jsonl", "t.idx"])
def test_a_remote_file_equals_the_local_one(tmp_path, remote, name):
    write_all(tmp_path)
    url = f"{remote()}/{name}"
    source, local = open_source(url), open_source(f"file://{tmp_path}/{name}")
    assert source.identity() == local.identity()
    assert local.files == [f"{tmp_path}/{name}"]
    definition = default_definition(source) or LengthDefinition.by_tokens("ids")
    units = source.units(list(definition.read_columns), target_bytes=20)
    assert units == local.units(list(definition.read_columns), target_bytes=20)
    lengths = [
        n for unit in units for m in measure_unit(source, unit, definition) for n in m.lengths["seqlen"]
    ]
    assert lengths == [len(row or []) for row in IDS]
    dataset = open_dataset(url, definition=definition)
    assert [sample["input_ids"].tolist() for sample in dataset] == [row or [] for row in IDS]
    assert dataset.read_slice(4, 3, 5)["input_ids"].tolist() == [5, 5]


def test_remote_folders_and_patterns(tmp_path, remote):
    write_all(tmp_path)
    url = remote()
    assert open_source(f"{url}/p-*.parquet").files == [
        "memory:///bucket/data/p-2.parquet",
        "memory:///bucket/data/p-10.parquet",
    ]
    (tmp_path / "only").mkdir()
    for name in ("p-10.parquet", "p-2.parquet"):
        fsspec.filesystem("memory").cp(f"/bucket/data/{name}", f"/bucket/only/{name}")
    assert [file.rsplit("/")[-1] for file in open_source("memory://bucket/only").files] == [
        "p-2.parquet",
        "p-10.parquet",
    ]


def test_nothing_there():
    with pytest.raises(SourceError, match="memory://bucket/none: no such file"):
        open_source("memory://bucket/none")


def test_an_unknown_protocol_names_the_cure():
    with pytest.raises(MissingExtraError, match="gopher://x cannot be reached"):
        open_source("gopher://x")


class Unreachable(AbstractFileSystem):
    """What a client does without a network: each has an exception of its own for it."""

    error: BaseException = OSError()

    def info(self, path, **options):
        raise self.error

    isfile = isdir = open = find = glob = info


class ConnectError(Exception):
    """Of httpx, which hf:// rests on."""


@pytest.mark.parametrize(
    "error", [ConnectError("no such\nhost"), ConnectionRefusedError("x"), TimeoutError("x")]
)
@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.parametrize("path", ["data/x.parquet", "data", "data/*.parquet"])
def test_no_network_is_one_line(monkeypatch, error, is_chained, path):
    fsspec.register_implementation("away", Unreachable, clobber=True)
    wrapped = OSError("failed")
    wrapped.__cause__ = error
    monkeypatch.setattr(Unreachable, "error", wrapped if is_chained else error)
    with pytest.raises(SourceError, match=r"away://.* cannot be reached \(.*check the network") as caught:
        open_source(f"away://{path}")
    assert "\n" not in str(caught.value)
