"""The same files from Ray, also when a worker dies in the middle."""

import os
import signal
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import ConfigError, MissingExtraError, SourceError, WorkerLostError
from packer.metrics import open_metrics

ROWS = [[1] * (n % 7) for n in range(200)]


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """20 units of 10 rows."""
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 1)
    table = pa.table({"ids": pa.array(ROWS, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=10)
    return tmp_path / "x.parquet"


@pytest.fixture(scope="module")
def two_workers():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def ray_workers() -> list[psutil.Process]:
    """The worker processes that run, or have run, units; not Ray's agents, without which a node ends."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name() in ("ray::_run", "ray::IDLE")]


class KillWorkers:
    """Kills every worker process once, after the third unit."""

    def __init__(self) -> None:
        self.units = self.killed = 0

    def __call__(self, _: object) -> None:
        self.units += 1
        if self.units == 3:
            for worker in ray_workers():
                os.kill(worker.pid, signal.SIGKILL)
                self.killed += 1


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # Ray's own
class TestRay:
    def test_files_are_the_same_though_workers_die(self, tmp_path, data, two_workers):
        packer.analyze(data, out=tmp_path / "here", tokens_column="ids", metrics=["vocab_rarity"])
        killer = KillWorkers()
        packer.analyze(
            data,
            out=tmp_path / "ray",
            tokens_column="ids",
            metrics=["vocab_rarity"],
            executor="ray",
            progress=killer,
        )
        assert killer.killed > 0
        assert contents(tmp_path / "ray") == contents(tmp_path / "here")

    def test_an_error_of_a_unit_arrives_as_it_was(self, tmp_path, data, two_workers):
        content = bytearray(data.read_bytes())
        content[4:40] = bytes(36)
        data.write_bytes(content)
        with pytest.raises(SourceError, match="row group 0"):
            packer.analyze(data, out=tmp_path / "m", tokens_column="ids", executor="ray")
        assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]

    def test_units_of_an_interrupted_run_are_reused(self, tmp_path, data, two_workers):
        def interrupt(progress: packer.analyzer.Progress) -> None:
            if progress.num_rows >= 50:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            packer.analyze(data, out=tmp_path / "m", tokens_column="ids", executor="ray", progress=interrupt)
        result = packer.analyze(data, out=tmp_path / "m", tokens_column="ids", workers=1)
        assert result.num_units_reused == 5
        assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [len(row) for row in ROWS]


def test_ray_that_is_not_installed(tmp_path, data, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"microbatch-packer\[ray\]"):
        packer.analyze(data, out=tmp_path / "m", tokens_column="ids", executor="ray")
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_options_that_do_not_fit(tmp_path, data):
    with pytest.raises(ConfigError, match="--ray-address has no meaning"):
        packer.analyze(data, out=tmp_path / "m", tokens_column="ids", ray_address="auto")
    with pytest.raises(ConfigError, match="there are local and ray"):
        packer.analyze(data, out=tmp_path / "m", tokens_column="ids", executor="dask")


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_is_not_there(tmp_path, data):
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(WorkerLostError, match="check --ray-address"):
        packer.analyze(
            data, out=tmp_path / "m", tokens_column="ids", executor="ray", ray_address="127.0.0.1:1"
        )
