"""Bytes read for each byte needed: played against a naive cache, and told before it hurts."""

import re
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import packer
from cli.main import cli
from packer.errors import ConfigError, PackerWarning
from packer.plan.rereading import rereading_of, samples_of_a_process
from packer.rereading import BlockSizes, play
from packer.samples import LengthDefinition, open_dataset


def naive(microbatches, blocks, cache_bytes):
    """Read row by row; a list in the order of use is the cache."""
    kept, served, read, needed = [], {}, 0, 0.0
    if sum(blocks.num_bytes) <= cache_bytes:
        return None
    for rows in microbatches:
        for block in sorted(
            {max(b for b, first in enumerate(blocks.firsts) if first <= row) for row in rows}
        ):
            size = blocks.num_bytes[block]
            if size == 0:
                continue
            of_block = [
                r for r in rows if blocks.firsts[block] <= r < blocks.firsts[block] + blocks.num_rows[block]
            ]
            if block in kept:
                kept.remove(block)
            kept.append(block)
            served[block] = served.get(block, 0) + len(of_block) * size / blocks.num_rows[block]
            while sum(blocks.num_bytes[b] for b in kept) > cache_bytes and len(kept) > 1:
                oldest = kept.pop(0)
                read += blocks.num_bytes[oldest]
                needed += served.pop(oldest)
    return read / needed if needed else None


@st.composite
def worlds(draw):
    rows = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    num_bytes = draw(st.lists(st.sampled_from([0, 10, 30, 100]), min_size=len(rows), max_size=len(rows)))
    one = st.lists(st.integers(0, sum(rows) - 1), min_size=1, max_size=4)
    num_rows = np.array(rows)
    blocks = BlockSizes(np.cumsum(num_rows) - num_rows, num_rows, np.array(num_bytes))
    return draw(st.lists(one, max_size=20)), blocks, draw(st.sampled_from([0, 50, 120, 1000]))


@given(worlds())
def test_play_equals_naive(world):
    microbatches, blocks, cache_bytes = world
    found = play([np.array(rows) for rows in microbatches], blocks, cache_bytes)
    expected = naive(microbatches, blocks, cache_bytes)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found.factor == pytest.approx(expected)


NUM_ROWS, ROW_TOKENS, GROUP_ROWS = 2000, 50, 200


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "x.parquet"
    ids = pa.array([[1] * ROW_TOKENS] * NUM_ROWS, pa.list_(pa.int64()))
    pq.write_table(pa.table({"ids": ids}), path, row_group_size=GROUP_ROWS)
    return path


def loader_of(file, order, cache_bytes, **options):
    plan = packer.make_plan(
        np.full(NUM_ROWS, ROW_TOKENS), packer.PlanConfig(max_tokens=4 * ROW_TOKENS, order=order, dp_size=2)
    )
    dataset = open_dataset(file, definition=LengthDefinition.by_tokens("ids"), cache_bytes=cache_bytes)
    return packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=2, **options)


def test_a_shuffled_plan_over_more_than_the_cache_holds_is_told(file):
    group_bytes = 8 * GROUP_ROWS * ROW_TOKENS
    with pytest.warns(PackerWarning, match=r"--shuffle-blocks K.*cache_bytes") as caught:
        loader_of(file, "random", 2 * group_bytes)
    (factor,) = re.findall(r"about (\d+) bytes are decoded for each byte", str(caught[0].message))
    # A row of a group of 200, of which two in ten are kept; now and then two rows of a group at once.
    assert 100 <= int(factor) <= 200
    assert "`packer materialize PLAN SOURCE --out SHARDS`" in str(caught[0].message)


@pytest.mark.parametrize(
    ("order", "groups"),
    [("random", 10.5), ("sequential", 2.0)],
    ids=["all is kept", "in order, each group once by each of two ranks"],
)
def test_what_is_read_often_enough_is_not_told(file, order, groups):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader_of(file, order, int(groups * 8 * GROUP_ROWS * ROW_TOKENS))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_worker_reads_a_part_of_the_rank(file):
    """Sequential, four processes of two ranks: each decodes every group for an eighth of its rows."""
    with pytest.warns(PackerWarning, match="about 8 bytes are decoded"):
        loader_of(file, "sequential", 8 * GROUP_ROWS * ROW_TOKENS, num_workers=4)


def test_a_larger_cache_is_a_cure(file, monkeypatch):
    decoded = []
    from packer.sources.parquet import ParquetPart

    original = ParquetPart._decode_group
    monkeypatch.setattr(
        ParquetPart, "_decode_group", lambda self, *of: decoded.append(of[0]) or original(self, *of)
    )
    for cache_bytes, expected in [(0, 20), (1 << 30, 10)]:
        decoded.clear()
        dataset = open_dataset(file, definition=LengthDefinition.by_tokens("ids"), cache_bytes=cache_bytes)
        for row in [*range(0, NUM_ROWS, GROUP_ROWS)] * 2:
            dataset[row]
        assert len(decoded) == expected


def test_a_negative_cache_is_refused(file):
    with pytest.raises(ConfigError, match="cache_bytes=-1 is negative"):
        open_dataset(file, definition=LengthDefinition.by_tokens("ids"), cache_bytes=-1)


def test_packer_plan_tells_it_from_the_metrics(file, tmp_path, monkeypatch):
    packer.analyze(file, out=tmp_path / "metrics", tokens_column="ids")
    metrics = packer.open_metrics(tmp_path / "metrics")
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=4 * ROW_TOKENS, dp_size=2))
    group_bytes = 8 * GROUP_ROWS * ROW_TOKENS
    assert rereading_of(plan, metrics) is None
    found = rereading_of(plan, metrics, cache_bytes=2 * group_bytes)
    dataset = open_dataset(file, metrics=metrics, cache_bytes=2 * group_bytes)
    assert found == dataset.rereading(samples_of_a_process(plan, 0, 2))
    assert found.is_dear
    monkeypatch.setattr("cli.plan.rereading_of", lambda *of: found)
    arguments = ["plan", tmp_path / "metrics", "--out", tmp_path / "plan", "--max-tokens", 200]
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert f"Note: {found.told()}" in result.stdout
