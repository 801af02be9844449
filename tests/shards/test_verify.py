"""Planted faults: each is found, and named by sample and micro-batch."""

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import ConfigError, InvariantError, PackerError, ShardsError, SourceChangedError
from packer.shards.format import BATCH, BATCHES_FILE, HEADER_FILE, HEADER_HASH, _hash_of, shard_file
from packer.shards.verify import verify_shards
from packer.sources.ipc_messages import end_of_buffers, scan_file
from tests.shards.worlds import World, token_world, world_of

Rows = list[dict[str, Any]]


def rewrite(shards: Path, change: Callable[[int, Rows], Rows]) -> None:
    """Write other content with hashes that fit: what only a comparison finds."""
    header = json.loads((shards / HEADER_FILE).read_text())
    index = []
    for number, entry in enumerate(header["shards"]):
        path = shards / shard_file(number)
        table = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
        batches = [table.get_batch(at).to_pylist() for at in range(table.num_record_batches)]
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            for at, rows in enumerate(batches):
                rows = change(entry["first_row"] + at, rows)
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=table.schema))
        content = path.read_bytes()
        footer = content[-10 - int.from_bytes(content[-10:-6], "little") : -10]
        part = []
        with path.open("rb") as file:
            for message in scan_file(file, footer, len(content)):
                body = content[message.offset : message.offset + message.num_bytes]
                num_read = end_of_buffers(body, 4 + 4 * (header["num_columns_read"] - 2))
                crc = zlib.crc32(body[:num_read])
                part.append((message.offset, message.num_bytes, num_read, crc, message.num_rows))
        packed = np.array(part, BATCH).tobytes()
        entry |= {
            "num_bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "batches_sha256": hashlib.sha256(packed).hexdigest(),
        }
        index.append(packed)
    (shards / BATCHES_FILE).write_bytes(b"".join(index))
    header[HEADER_HASH] = _hash_of(header)
    (shards / HEADER_FILE).write_text(json.dumps(header))


def made(world: World, folder: Path, **options: Any) -> Path:
    packer.materialize(world.plan, world.source, out=folder / "shards", metrics=world.metrics, **options)
    return folder / "shards"


def changed(row: int, edit: Callable[[Rows], Any]) -> Callable[[int, Rows], Rows]:
    """Return a change of one micro-batch."""

    def change(number: int, rows: Rows) -> Rows:
        if number == row:
            edit(rows)
        return rows

    return change


def swap(rows: Rows) -> None:
    rows[0], rows[1] = rows[1], rows[0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (swap, r"row 3 of epoch 0, place 0: sample_id is \d+ in the shards and \d+ in the plan"),
        (lambda rows: rows[1].update(sample_id=9999), r"place 1: sample_id is 9999 in the shards"),
        (lambda rows: rows[1].update(start=1), r"place 1: start is 1 in the shards and 0"),
        (lambda rows: rows.pop(), r"row 3 of epoch 0 has \d+ samples? in the shards and \d+ in the plan"),
    ],
)
def test_faults_that_the_plan_tells(tmp_path: Path, edit: Any, message: str) -> None:
    world = token_world(tmp_path)
    shards = made(world, tmp_path, shard_size=5000)
    rewrite(shards, lambda number, rows: rows)
    verify_shards(world.plan, shards)  # so it is not the rewriting
    rewrite(shards, changed(3, edit))
    with pytest.raises(PackerError, match=message):
        verify_shards(world.plan, shards)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: rows[0]["input_ids"].pop(), r"has \d+ tokens in the shards and \d+ in the plan"),
        (lambda rows: rows[0].update(position_ids=[7]), r"position_ids are not those of input_ids"),
        (lambda rows: rows[0].update(labels=[7]), r"labels are not those of input_ids"),
    ],
)
def test_faults_in_what_was_made_of_texts(tmp_path: Path, edit: Any, message: str) -> None:
    world = world_of("text", tmp_path)
    shards = made(world, tmp_path)
    rewrite(shards, changed(3, edit))
    with pytest.raises(InvariantError, match=message):
        verify_shards(world.plan, shards)


@pytest.mark.parametrize("column", ["ids", "name"])
def test_faults_that_the_source_tells(tmp_path: Path, column: str) -> None:
    world = token_world(tmp_path, epochs=2)
    shards = made(world, tmp_path)
    row = world.plan.epoch(0).num_microbatches + 2
    sample_id = world.plan.epoch(1).microbatch(2).sample_ids[1]

    def edit(rows: Rows) -> None:
        rows[1][column] = "other" if column == "name" else [value + 1 for value in rows[1][column]]

    rewrite(shards, changed(row, edit))
    verify_shards(world.plan, shards)
    message = rf"sample {sample_id} in row 2 of epoch 1 has other {column} in the shards than in the source"
    with pytest.raises(InvariantError, match=message):
        verify_shards(world.plan, shards, world.source)


def test_a_source_that_is_another(tmp_path: Path) -> None:
    world = token_world(tmp_path)
    shards = made(world, tmp_path)
    pq.write_table(pq.read_table(world.source), tmp_path / "other.parquet")
    with pytest.raises(SourceChangedError, match="not the file that was planned"):
        verify_shards(world.plan, shards, tmp_path / "other.parquet")
    by_tokens = packer.samples.LengthDefinition.by_tokens
    with pytest.raises(ConfigError, match="the plan counts seqlen, and the definition measures tokens"):
        verify_shards(world.plan, shards, world.source, definition=by_tokens({"tokens": "ids"}))
    folder = tmp_path / "labels"
    folder.mkdir()
    labelled = world_of("labels", folder)
    shards = made(labelled, folder)
    with pytest.raises(ShardsError, match="for the fields input_ids, labels, and the source gives"):
        verify_shards(labelled.plan, shards, labelled.source, definition=by_tokens("ids"))


def test_progress_counts_to_its_end(tmp_path: Path) -> None:
    world = token_world(tmp_path)
    shards = made(world, tmp_path)
    seen: list[tuple[int, int]] = []
    verify_shards(world.plan, shards, world.source, progress=lambda done, total: seen.append((done, total)))
    assert all(0 < done <= total for done, total in seen)
    assert seen[-1][0] == seen[-1][1]
