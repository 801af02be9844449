"""Blocks: where the samples lie together in files, for every format, and what they take in memory."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import MetricsError
from packer.metrics import BLOCKS_NAME, Blocks, open_metrics
from packer.metrics.manifest import MANIFEST_HASH, manifest_hash
from packer.sources import indexed, open_source
from packer.sources.cache import BatchCache
from tests.sources.test_indexed import write_pair
from tests.sources.test_mds import ROWS, write_folder


def blocks_of(source, tmp_path, **options):
    result = packer.analyze(source, out=tmp_path / "metrics", overwrite=True, **options)
    metrics = open_metrics(tmp_path / "metrics")
    blocks = metrics.blocks
    assert result.manifest.blocks.num_blocks == len(blocks)
    assert result.manifest.blocks.num_bytes == blocks.num_bytes.sum()
    assert result.manifest.blocks.max_bytes == blocks.num_bytes.max()
    metrics.check_files()
    return blocks


def write_parquet(path, num_rows, *, group_rows, length=30):
    rows = [np.arange(length, dtype=np.int32)] * num_rows
    table = pa.table({"ids": pa.array(rows), "n": np.full(num_rows, length), "text": ["abc"] * num_rows})
    pq.write_table(table, path, row_group_size=group_rows)


def test_row_groups_of_several_files_one_of_them_empty(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_parquet(data / "0.parquet", 25, group_rows=10)
    write_parquet(data / "1.parquet", 0, group_rows=10)
    write_parquet(data / "2.parquet", 10, group_rows=10)
    blocks = blocks_of(data, tmp_path, tokens_column="ids", workers=1)
    assert blocks.firsts.tolist() == [0, 10, 20, 25]
    assert blocks.edges.tolist() == [0, 10, 20, 25, 35]
    assert blocks.of(np.array([0, 9, 10, 24, 25, 34])).tolist() == [0, 0, 1, 2, 3, 3]
    # 4 bytes a token and 4 a list, though a page of equal lists takes next to nothing
    assert blocks.num_bytes.tolist() == [1240, 1240, 620, 1240]


def test_a_length_column_says_not_which_columns_will_be_read_so_all_count(tmp_path):
    write_parquet(tmp_path / "a.parquet", 10, group_rows=10)
    [of_all] = blocks_of(tmp_path / "a.parquet", tmp_path, length_column="n").num_bytes
    [of_ids] = blocks_of(tmp_path / "a.parquet", tmp_path, tokens_column="ids").num_bytes
    assert of_all > of_ids + 80


@pytest.mark.parametrize("column", ["ids", "text", "small", "flags"])
def test_row_groups_take_what_the_loaders_cache_counts(tmp_path, column):
    random = np.random.default_rng(0)
    ids = [random.integers(0, 50_000, n, np.int32) for n in random.integers(1, 2000, 2000)]
    table = pa.table(
        {
            "ids": pa.array(ids),
            "text": ["word " * int(n) for n in random.integers(1, 400, 2000)],
            "small": pa.array([row.astype(np.uint16) for row in ids]),
            "flags": random.integers(0, 2, 2000).astype(bool),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    source = open_source(tmp_path / "a.parquet")
    [blocks] = source.blocks([column])
    cache = BatchCache()
    source.parts[0].take(np.array([0, 1999]), {column: None}, cache)
    assert 0.9 * cache._num_bytes <= blocks.num_bytes.sum() <= 1.1 * cache._num_bytes + 1000


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_record_batches_take_what_they_unpack_to(tmp_path, compression, new):
    table = pa.table({"ids": pa.array([[7] * 1000] * 40, pa.list_(pa.int32()))})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with new(tmp_path / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=16)
    blocks = blocks_of(tmp_path / "a.arrow", tmp_path, tokens_column="ids")
    assert blocks.firsts.tolist() == [0, 16, 32]
    assert np.allclose(blocks.num_bytes, [64_000, 64_000, 32_000], rtol=0.02)


def test_a_stream_with_dictionaries_is_one_block(tmp_path):
    table = pa.table({"ids": [[1]] * 40, "text": pa.array(["a", "b"] * 20).dictionary_encode()})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    assert blocks_of(tmp_path / "a.arrow", tmp_path, tokens_column="ids").firsts.tolist() == [0]


def test_an_mds_shard_is_a_block(tmp_path):
    write_folder(tmp_path / "mds")
    blocks = blocks_of(tmp_path / "mds", tmp_path, tokens_column="ids")
    assert blocks.firsts.tolist() == [0, len(ROWS)]
    assert blocks.num_bytes.tolist() == [
        file.stat().st_size for file in sorted((tmp_path / "mds").glob("*.mds"))
    ]


def test_token_files_have_stretches_however_the_index_is_walked(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "BLOCK_BYTES", 100)
    sizes = [0, 10, 15, 1, 60, 0, 0, 3, 22, 0]
    path = write_pair(tmp_path / "a", [range(size) for size in sizes], 4, np.dtype(np.int32))
    before = np.cumsum([0, *sizes[:-1]]) * 4
    expected = [n for n in range(len(sizes)) if n == 0 or before[n] // 100 > before[n - 1] // 100]
    for chunk in (1, 3, 100):
        monkeypatch.setattr(indexed, "_CHUNK_ITEMS", chunk)
        blocks = blocks_of(path, tmp_path)
        assert blocks.firsts.tolist() == expected
        assert blocks.num_bytes.tolist() == np.diff([*before[expected], sum(sizes) * 4]).tolist()


def test_json_lines_have_the_stretches_that_were_read_joined_to_a_size(tmp_path, monkeypatch):
    lines = [json.dumps({"ids": list(range(n))}) for n in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("packer.analyzer.work.UNIT_BYTES", 1000)
    monkeypatch.setattr("packer.analyzer.work.BLOCK_BYTES", 2500)
    blocks = blocks_of(tmp_path / "a.jsonl", tmp_path, tokens_column="ids")
    assert 3 < len(blocks) < 12
    assert (blocks.num_bytes[:-1] >= 2500).all()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    packed = blocks_of(tmp_path / "a.jsonl.gz", tmp_path, tokens_column="ids")
    assert packed.firsts.tolist() == [0]
    assert packed.num_bytes[0] > 8 * sum(range(100))  # what its lists take, not the packed file


def test_a_data_set_in_memory_has_no_blocks(tmp_path):
    packer.analyze_dataset([[1], [2]], lambda rows: [1] * len(rows), out=tmp_path / "metrics")
    assert open_metrics(tmp_path / "metrics").blocks is None


def test_a_directory_of_before_opens_without_blocks(tmp_path):
    write_parquet(tmp_path / "a.parquet", 10, group_rows=5)
    blocks_of(tmp_path / "a.parquet", tmp_path, tokens_column="ids")
    path = tmp_path / "metrics" / "manifest.json"
    content = json.loads(path.read_text())
    del content["blocks"], content["files"][BLOCKS_NAME]
    content[MANIFEST_HASH] = manifest_hash(content)
    path.write_text(json.dumps(content))
    assert open_metrics(tmp_path / "metrics").blocks is None


def test_blocks_that_are_not_the_ones_written_are_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", 10, group_rows=5)
    blocks_of(tmp_path / "a.parquet", tmp_path, tokens_column="ids")
    path = tmp_path / "metrics" / BLOCKS_NAME
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(MetricsError, match="not the file that was written"):
        _ = open_metrics(tmp_path / "metrics").blocks
    path.unlink()
    with pytest.raises(MetricsError, match="cannot read"):
        _ = open_metrics(tmp_path / "metrics").blocks


@pytest.mark.parametrize("firsts", [[1, 2], [0, 2, 2], [0, 5], [0, 2, 1]])
def test_blocks_that_do_not_tile_the_samples_are_refused(firsts):
    with pytest.raises(MetricsError, match="tile"):
        Blocks(np.array(firsts), np.ones(len(firsts), np.int64), 5)
