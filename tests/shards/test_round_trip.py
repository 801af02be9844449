"""What the loader makes of shards is what it makes of the data set, whatever the samples are made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import packer
from packer.errors import ColumnError, ConfigError
from packer.shards import materialize as module
from packer.shards import scatter
from packer.shards.format import shard_file
from packer.shards.verify import verify_shards
from tests.shards.worlds import KINDS, batches_of, token_world, world_of

CUT = {"max_seqlen": 7, "too_long": "split", "epochs": 2}


def opened(world: Any, folder: Path, **options: Any) -> Any:
    packer.materialize(world.plan, world.source, out=folder / "shards", metrics=world.metrics, **options)
    return packer.open_dataset(folder / "shards")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sample(tmp_path: Path, kind: str) -> None:
    world = world_of(kind, tmp_path, epochs=2, grad_accum=2)
    dataset = opened(world, tmp_path, shard_size=5000)
    assert len(dataset.header.shards) > 1
    assert batches_of(world.plan, dataset) == batches_of(world.plan, world.dataset)
    checked = verify_shards(world.plan, tmp_path / "shards", world.source, metrics=world.metrics)
    assert checked.with_source
    assert checked.num_microbatches == sum(world.plan.epoch(e).num_microbatches for e in (0, 1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pair"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_pieces_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, compression: str
) -> None:
    monkeypatch.setattr(module, "_STRETCH_BYTES", 3000)
    monkeypatch.setattr(scatter, "_RUN_BYTES", 1000)
    world = world_of(kind, tmp_path, **CUT)
    dataset = opened(world, tmp_path, compression=compression)
    assert batches_of(world.plan, dataset) == batches_of(world.plan, world.dataset)
    assert (
        verify_shards(world.plan, tmp_path / "shards", world.source, metrics=world.metrics).num_pieces > 200
    )


def test_pairs_with_a_budget_for_each(tmp_path: Path) -> None:
    world = world_of("pair", tmp_path, layout="padded", max_tokens={"chosen": 90, "rejected": 60})
    assert batches_of(world.plan, opened(world, tmp_path)) == batches_of(world.plan, world.dataset)


def test_fillers_and_repeats_are_written(tmp_path: Path) -> None:
    for remainder in ("keep", "fill"):
        folder = tmp_path / remainder
        folder.mkdir()
        world = token_world(folder, remainder=remainder, dp_size=4, grad_accum=4)
        rows = [world.plan.epoch(0).microbatch(row) for row in range(world.plan.epoch(0).num_microbatches)]
        assert any(row.is_filler or row.is_repeat for row in rows)
        dataset = opened(world, folder)
        for dp_rank in range(4):
            at = {"dp_rank": dp_rank, "dp_size": 4}
            assert batches_of(world.plan, dataset, **at) == batches_of(world.plan, world.dataset, **at)


def test_what_stands_in_a_shard(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4], [5, 6]]
    world = token_world(tmp_path, rows, dp_size=1, order="sequential", packing="next-fit", max_tokens=4)
    dataset = opened(world, tmp_path)
    table = pa.ipc.open_file(tmp_path / "shards" / shard_file(0))
    assert [table.get_batch(number).to_pylist() for number in range(table.num_record_batches)] == [
        [
            {"sample_id": 0, "start": 0, "ids": [1, 2, 3], "name": "n0"},
            {"sample_id": 1, "start": 0, "ids": [4], "name": "n1"},
        ],
        [{"sample_id": 2, "start": 0, "ids": [5, 6], "name": "n2"}],
    ]
    assert table.schema.field("name").type == pa.string()
    assert len(dataset) == 3
    assert dataset.header.content_hash == world.plan.fingerprint
    assert "2 micro-batches of 1 epoch, with input_ids" in repr(dataset)
    source = packer.analyze(tmp_path / "shards", out=tmp_path / "again", tokens_column="ids")
    assert source.manifest.num_samples == 3  # a folder of shards is a data set like any other


def test_texts_are_written_as_tokens_and_kept_if_asked(tmp_path: Path) -> None:
    world = world_of("text", tmp_path, order="sequential", packing="next-fit")
    opened(world, tmp_path)
    batch = pa.ipc.open_file(tmp_path / "shards" / shard_file(0)).get_batch(0)
    assert batch.schema.names == ["sample_id", "start", "input_ids", "labels", "position_ids"]
    row = batch.slice(0, 1).to_pylist()[0]
    assert row["labels"] == row["input_ids"] == world.dataset[0]["input_ids"].tolist()
    assert row["position_ids"] == list(range(len(row["input_ids"])))
    kept = packer.materialize(
        world.plan, world.source, out=tmp_path / "raw", metrics=world.metrics, keep_columns=["text"]
    )
    assert list(kept.header.columns)[-1] == "text"
    assert batches_of(world.plan, packer.open_dataset(tmp_path / "raw")) == batches_of(
        world.plan, world.dataset
    )
    assert verify_shards(world.plan, tmp_path / "raw", world.source, metrics=world.metrics).with_source


def test_a_prompts_labels_are_those_of_its_completion(tmp_path: Path) -> None:
    world = world_of("prompt", tmp_path)
    dataset = opened(world, tmp_path)
    assert list(dataset.header.columns)[2:] == ["input_ids", "labels", "position_ids"]
    sample_ids = world.plan.epoch(0).microbatch(0).sample_ids
    for sample_id, sample in zip(sample_ids.tolist(), dataset.read_microbatch(0, 0), strict=True):
        expected = world.dataset[sample_id]
        assert {name: values.tolist() for name, values in sample.items()} == {
            name: values.tolist() for name, values in expected.items()
        }


def test_further_fields(tmp_path: Path) -> None:
    world = world_of("labels", tmp_path, **CUT)
    opened(world, tmp_path)
    fields = {"scores": "weight"}
    ours = packer.open_dataset(tmp_path / "shards", fields=fields)
    theirs = packer.open_dataset(world.source, metrics=world.metrics, fields=fields)
    assert batches_of(world.plan, ours) == batches_of(world.plan, theirs)
    for wrong, message in (
        (["nothing"], "has no column 'nothing'; it has: ids, labels, weight"),
        ({"labels": "weight"}, "cannot be named 'labels'"),
    ):
        with pytest.raises((ColumnError, ConfigError), match=message):
            packer.open_dataset(tmp_path / "shards", fields=wrong)


def test_one_of_several_epochs(tmp_path: Path) -> None:
    world = token_world(tmp_path, epochs=3)
    dataset = opened(world, tmp_path, epoch=1)
    expected = world.dataset
    row = world.plan.epoch(1).microbatch(0)
    for sample_id, sample in zip(row.sample_ids.tolist(), dataset.read_microbatch(1, 0), strict=True):
        assert np.array_equal(sample["input_ids"], expected[sample_id]["input_ids"])
    with pytest.raises(packer.PackerError, match=r"epoch 0 is not in .*, which holds epoch 1"):
        batches_of(world.plan, dataset)
    with pytest.raises(packer.PackerError, match="epoch 3 is not planned"):
        packer.materialize(world.plan, world.source, out=tmp_path / "other", epoch=3)


def test_a_length_column_needs_to_know_where_the_tokens_are(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from tests.shards.worlds import planned, rows_of_tokens

    rows = rows_of_tokens(30)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": [len(row) for row in rows], "tokens": rows}), path)
    world = planned(tmp_path, path, {}, length_column="n")
    with pytest.raises(ConfigError, match=r"not where the tokens are"):
        opened(world, tmp_path)
    fields = {"input_ids": "tokens"}
    dataset = opened(world, tmp_path, fields=fields)
    theirs = packer.open_dataset(path, metrics=world.metrics, fields=fields)
    assert batches_of(world.plan, dataset) == batches_of(world.plan, theirs)
    assert verify_shards(world.plan, tmp_path / "shards", path, metrics=world.metrics).with_source
