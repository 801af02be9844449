"""Damaged, cut, foreign and remote shards; what is read, and that nothing else is."""

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import packer
from packer.errors import ConfigError, PlanError, ShardsError, TargetExistsError
from packer.shards.format import BATCH, BATCHES_FILE, HEADER_FILE, read_header, shard_file
from packer.shards.verify import verify_shards
from packer.sources.location import Location
from tests.shards.worlds import World, batches_of, content_of, token_world, world_of

SIZE = {"shard_size": 6000}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    folder = tmp_path_factory.mktemp("made")
    world = token_world(folder, epochs=2)
    packer.materialize(world.plan, world.source, out=folder / "shards", **SIZE)
    return world, folder / "shards"


@pytest.fixture
def shards(made: tuple[World, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made[1], tmp_path / "shards"))


def places(shards: Path) -> list[tuple[int, np.void]]:
    """Return shard and entry of every row."""
    header = json.loads((shards / HEADER_FILE).read_text())
    index = np.fromfile(shards / BATCHES_FILE, BATCH)
    owners = [number for number, shard in enumerate(header["shards"]) for _ in range(shard["num_rows"])]
    return list(zip(owners, index, strict=True))


def test_any_flipped_byte_is_refused_before_its_batch(made: tuple[World, Path], shards: Path) -> None:
    world, _ = made
    good = batches_of(world.plan, packer.open_dataset(shards))
    rng = np.random.default_rng(0)
    for row in (0, 3, 7):
        shard, entry = places(shards)[row]
        file = shards / shard_file(shard)
        before = file.read_bytes()
        at = int(entry["offset"]) + int(rng.integers(entry["num_read"]))
        file.write_bytes(before[:at] + bytes([before[at] ^ 16]) + before[at + 1 :])
        dataset = packer.open_dataset(shards)
        for other in range(row):
            dataset.read_microbatch(0, other)
        first = json.loads((shards / HEADER_FILE).read_text())["shards"][shard]["first_row"]
        message = rf"record batch {row - first} of .*{shard_file(shard)} \(row {row} of epoch 0\) is damaged"
        with pytest.raises(ShardsError, match=message):
            dataset.read_microbatch(0, row)
        with pytest.raises(ShardsError, match="is damaged"):
            batches_of(world.plan, packer.open_dataset(shards), num_workers=1)
        with pytest.raises(ShardsError, match=rf"{shard_file(shard)} is not the file that was written"):
            verify_shards(world.plan, shards)
        file.write_bytes(before)
    assert batches_of(world.plan, packer.open_dataset(shards)) == good


def test_what_training_does_not_read_may_be_damaged_until_it_is_verified(
    made: tuple[World, Path], shards: Path
) -> None:
    world, _ = made
    shard, entry = places(shards)[0]
    file = shards / shard_file(shard)
    content = bytearray(file.read_bytes())
    content[int(entry["offset"]) + int(entry["num_bytes"]) - 9] ^= 1  # of the column of names
    file.write_bytes(content)
    assert len(packer.open_dataset(shards).read_microbatch(0, 0)) == entry["num_rows"]
    with pytest.raises(ShardsError, match="is not the file that was written"):
        verify_shards(world.plan, shards)


def test_cut_and_missing_files(made: tuple[World, Path], shards: Path) -> None:
    file = shards / shard_file(1)
    content = file.read_bytes()
    row = json.loads((shards / HEADER_FILE).read_text())["shards"][1]["first_row"]
    file.write_bytes(content[:-1])
    with pytest.raises(
        ShardsError, match=rf"{shard_file(1)} has {len(content) - 1:,} bytes, shards.json says"
    ):
        packer.open_dataset(shards).read_microbatch(0, row)
    file.unlink()
    with pytest.raises(ShardsError, match=rf"{shard_file(1)} is missing"):
        packer.open_dataset(shards).read_microbatch(0, row)
    packer.open_dataset(shards).read_microbatch(0, row - 1)  # the one before is whole
    index = shards / BATCHES_FILE
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ShardsError, match=rf"{BATCHES_FILE} does not say what was written of"):
        packer.open_dataset(shards).read_microbatch(1, made[0].plan.epoch(1).num_microbatches - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-9], "is not JSON"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "format version 2, this packer reads version 1",
        ),
        (
            lambda text: text.replace('"num_samples": 120', '"num_samples": 121'),
            "changed after it was written",
        ),
        (lambda text: "[]", "no shards of ours"),
    ],
)
def test_a_header_that_is_none(shards: Path, change: Any, message: str) -> None:
    header = shards / HEADER_FILE
    header.write_text(change(header.read_text()))
    with pytest.raises(ShardsError, match=message):
        read_header(Location(str(shards)))


def test_shards_of_another_plan(made: tuple[World, Path], tmp_path: Path) -> None:
    world, shards = made
    other = packer.make_plan(world.metrics, packer.PlanConfig(max_tokens=96, layout="packed", seed=1))
    with pytest.raises(ShardsError, match=r"holds the samples of plan .* and this is plan"):
        packer.PlanLoader(other, packer.open_dataset(shards))
    with pytest.raises(ShardsError, match="holds the samples of plan"):
        verify_shards(other, shards)


def test_options_of_other_data_sets_are_refused(made: tuple[World, Path]) -> None:
    world, shards = made
    with pytest.raises(ConfigError, match="leave metrics= out"):
        packer.open_dataset(shards, metrics=world.metrics)


def test_rows_that_are_not_there(made: tuple[World, Path]) -> None:
    dataset = packer.open_dataset(made[1])
    for epoch, row in ((2, 0), (0, -1), (0, 10**6)):
        with pytest.raises(PlanError, match="is not in"):
            dataset.read_microbatch(epoch, row)


def test_shards_that_are_replaced_in_use(made: tuple[World, Path], shards: Path) -> None:
    world, _ = made
    sent = pickle.dumps(packer.open_dataset(shards))
    assert len(sent) < 20_000
    pickle.loads(sent).read_microbatch(0, 0)
    packer.materialize(world.plan, world.source, out=shards, overwrite=True, shard_size=9000)
    with pytest.raises(ShardsError, match="was replaced by other shards"):
        pickle.loads(sent)


@pytest.fixture
def store() -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    yield "memory://bucket/shards"
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("kind", ["parquet", "prompt"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_an_object_store(tmp_path: Path, store: str, kind: str, compression: str) -> None:
    world = world_of(kind, tmp_path, epochs=2)
    options: dict[str, Any] = {"metrics": world.metrics, "compression": compression, **SIZE}
    packer.materialize(world.plan, world.source, out=tmp_path / "here", **options)
    packer.materialize(world.plan, world.source, out=store, scratch=tmp_path / "scratch", **options)
    files = fsspec.filesystem("memory").find("/bucket/shards")
    content = {path.rsplit("/", 1)[-1]: fsspec.filesystem("memory").cat_file(path) for path in files}
    assert content == content_of(tmp_path / "here")
    assert not list((tmp_path / "scratch").iterdir())
    dataset = packer.open_dataset(store)
    assert batches_of(world.plan, dataset) == batches_of(world.plan, world.dataset)
    assert verify_shards(world.plan, store, world.source, metrics=world.metrics).with_source


def test_an_object_store_that_holds_something(tmp_path: Path, store: str) -> None:
    world = token_world(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/shards/precious.txt", b"x")
    with pytest.raises(TargetExistsError, match="exists already"):
        packer.materialize(world.plan, world.source, out=store)
    with pytest.raises(TargetExistsError, match=r"holds no shards\.json"):
        packer.materialize(world.plan, world.source, out=store, overwrite=True)
    memory.rm("/bucket/shards/precious.txt")
    packer.materialize(world.plan, world.source, out=store, shard_size=3000)
    num_files = len(memory.find("/bucket/shards"))
    packer.materialize(world.plan, world.source, out=store, overwrite=True)
    assert len(memory.find("/bucket/shards")) == 3 < num_files


def test_the_header_comes_last(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = token_world(tmp_path)
    order = []
    put = fsspec.filesystem("memory").put_file

    def note(self: Any, local: str, remote: str, **options: Any) -> Any:
        order.append(remote.rsplit("/", 1)[-1])
        if len(order) == 3:
            raise OSError("connection reset")
        return put(local, remote, **options)

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", note)
    options: dict[str, Any] = {"out": store, "scratch": tmp_path / "scratch", **SIZE}
    with pytest.raises(packer.PackerError, match=r"connection reset.*run again to go on"):
        packer.materialize(world.plan, world.source, **options)
    assert packer.materialize(world.plan, world.source, **options).num_units_reused > 0
    assert order[-1] == HEADER_FILE
    assert order.count(shard_file(0)) == 1


def test_one_range_a_micro_batch_and_eight_in_flight(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of("prompt", tmp_path, max_tokens=2000, dp_size=1)
    result = packer.materialize(world.plan, world.source, out=store, metrics=world.metrics)
    dataset = packer.open_dataset(store)
    asked = []
    read = Location.read

    def note(self: Location, start: int, stop: int) -> bytes:
        asked.append((self.name, stop - start))
        return read(self, start, stop)

    monkeypatch.setattr(Location, "read", note)
    batches_of(world.plan, dataset)
    ranges = [size for name, size in asked if name.startswith("shard-")]
    num_rows = world.plan.epoch(0).num_microbatches
    assert len(ranges) == num_rows
    assert [name for name, _ in asked if not name.startswith("shard-")] == [BATCHES_FILE]
    # ids and labels of 4 bytes, and what an offset, an id and a start take for each sample
    needed = sum(
        8 * row.num_tokens + 20 * row.num_samples
        for row in (world.plan.epoch(0).microbatch(number) for number in range(num_rows))
    )
    assert sum(ranges) < needed + 900 * num_rows
    assert result.num_bytes > sum(ranges) + 4 * result.num_tokens  # positions stay where they are
    assert dataset.rows_ahead >= 8
