"""``no_repeat_key``: no micro-batch holds two samples of one key, at little cost."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import packer
from cli.main import cli
from packer.errors import ConfigError, InvariantError
from packer.plan.verify_keys import check_keys
from packer.planner import PlanConfig, make_plan
from packer.report import summarize
from tests import plans

PACKINGS = [
    {"layout": "padded", "packing": "windowed"},
    {"layout": "padded", "packing": "next-fit"},
    {"layout": "padded", "packing": "next-fit", "order": "sequential"},
    {"layout": "padded", "packing": "windowed", "same_num_samples": True, "same_seqlen": True},
    {"layout": "padded", "max_tokens": {"query": 2048, "answer": 2048}},
    {"layout": "padded", "max_tokens": {"query": 2048, "answer": 2048}, "same_num_samples": True},
    {"layout": "packed", "packing": "mixed"},
    {"layout": "packed", "packing": "best-fit"},
    {"layout": "packed", "packing": "windowed"},
    {"layout": "packed", "packing": "next-fit"},
    {"layout": "packed", "packing": "best-fit", "min_samples": 4},
    {"layout": "padded", "packing": "windowed", "min_samples": 4, "too_long": "split", "max_seqlen": 100},
]
named = pytest.mark.parametrize("packing", PACKINGS, ids=lambda options: "-".join(map(str, options.values())))


def lengths_of(num_samples, seed=0, most=200):
    random = np.random.default_rng(seed)
    return np.minimum(random.lognormal(3.5, 0.6, num_samples).astype(np.int32) + 2, most)


def metrics_of(num_samples, num_keys):
    random = np.random.default_rng(1)
    keys = random.integers(0, num_keys, num_samples)
    keys[::50] = -1
    return {"key": keys, "query": lengths_of(num_samples, 2), "answer": lengths_of(num_samples, 3)}


def rows_of(plan, epoch=0):
    tables = plan.epoch(epoch).microbatches()
    return [ids.tolist() for table in tables for ids in np.split(table.sample_ids, table.offsets[1:-1])]


@named
@pytest.mark.parametrize("num_keys", [50, 1000])
def test_no_micro_batch_holds_a_key_twice(packing, num_keys):
    """Few keys, one micro-batch in which each comes: it is full of samples of other keys, or ends."""
    metrics = metrics_of(3000, num_keys)
    config = PlanConfig(**{"max_tokens": 2048, "dp_size": 2, "epochs": 2, "no_repeat_key": "key"} | packing)
    plan = make_plan(lengths_of(3000), config, metrics=metrics)
    packer.verify_plan(plan)
    for epoch in range(2):
        check_keys(plan, epoch, metrics["key"])
        for row in rows_of(plan, epoch):
            keys = metrics["key"][row]
            assert len(set(keys[keys >= 0])) == np.count_nonzero(keys >= 0)
        assert plan.header["epochs"][epoch]["num_samples"] >= 2850


@pytest.mark.parametrize("packing", [p for p in PACKINGS if "order" not in p], ids=str)
def test_keys_cost_few_micro_batches(packing):
    """Six samples of each of 1,000 keys, 50 a micro-batch: without the rule two in three hold a key twice."""
    metrics, seqlens = metrics_of(6000, 1000), lengths_of(6000)
    config = PlanConfig(**{"max_tokens": 2048, "dp_size": 2} | packing)
    free, bound = (
        make_plan(seqlens, chosen, metrics=metrics).header["epochs"][0]
        for chosen in (config, replace(config, no_repeat_key="key"))
    )
    assert bound["num_samples"] >= 0.98 * free["num_samples"]
    assert bound["num_microbatches"] <= 1.06 * free["num_microbatches"] + 2


def test_samples_without_a_key_may_come_together():
    """The smallest plan that shows it: one micro-batch would hold all four, but for one key."""
    config = PlanConfig(max_tokens=400, no_repeat_key="key")
    plan = make_plan([10] * 4, config, metrics={"key": [-1, -1, 7, 7]})
    assert sorted(map(len, rows_of(plan))) in ([1, 3], [2, 2])
    assert len(rows_of(make_plan([10] * 4, config, metrics={"key": [-1, -1, 7, -1]}))) == 1


def test_a_key_in_more_samples_than_there_would_be_micro_batches_is_told():
    keys = np.zeros(100, np.int64)
    keys[:50] = np.arange(1, 51)
    plan = make_plan(np.full(100, 10), PlanConfig(max_tokens=100, no_repeat_key="key"), metrics={"key": keys})
    assert plan.header["epochs"][0]["figures"]["key_max_count"] == 50
    notes = " ".join(summarize(plan).notes)
    assert "one value of key is in 50 of the 50 micro-batches of epoch 0, so that it decides" in notes
    plan = make_plan(
        np.full(50, 10), PlanConfig(max_tokens=100, no_repeat_key="key"), metrics={"key": keys[:50]}
    )
    assert not any("one value of key" in note for note in summarize(plan).notes)


def test_what_is_no_key_or_not_measured_is_refused():
    for name in ("seqlen", "", 3):
        with pytest.raises(ConfigError, match="is no key; name what `packer analyze --key-column` made"):
            PlanConfig(max_tokens=100, no_repeat_key=name)
    with pytest.raises(ConfigError, match="--no-repeat-key names metric 'url', and measured is only seqlen"):
        make_plan([1], PlanConfig(max_tokens=100, no_repeat_key="url"))


@pytest.fixture
def made(tmp_path):
    urls = [f"page {n % 90}" for n in range(900)]
    pq.write_table(pa.table({"n": lengths_of(900), "url": urls}), tmp_path / "a.parquet")
    packer.analyze(tmp_path / "a.parquet", out=tmp_path / "metrics", length_column="n", key_columns="url")
    run = CliRunner().invoke(
        cli, f"plan {tmp_path}/metrics --out {tmp_path}/plan --max-tokens 2048 --no-repeat-key url"
    )
    assert run.exit_code == 0, run.output
    return tmp_path


def test_a_plan_of_the_command_holds_and_verify_says_so(made):
    packer.verify_plan(made / "plan", metrics=made / "metrics")
    for row in rows_of(packer.load_plan(made / "plan")):
        assert len({sample % 90 for sample in row}) == len(row)


def test_verify_names_two_samples_of_one_key_in_one_micro_batch(made):
    table = packer.load_plan(made / "plan").epoch(0)
    rows = rows_of(packer.load_plan(made / "plan"))
    lengths = lengths_of(900)
    first = rows[0][0]
    second = next(s for s in range(900) if s % 90 == first % 90 and s != first)
    del table

    def edit(listed):
        """Let the second of the key change places with a sample of the first micro-batch."""
        other = next(n for n, row in enumerate(listed) if second in row["sample_ids"])
        gone = listed[0]["sample_ids"][1]
        for number, (old, new) in ((0, (gone, second)), (other, (second, gone))):
            row = listed[number]
            ids = [new if sample == old else sample for sample in row["sample_ids"]]
            row |= {"sample_ids": ids, "seqlens": [int(lengths[sample]) for sample in ids]}

    plans.forge(made / "plan", "epoch-00000/microbatches.arrow", edit)
    keys = packer.open_metrics(made / "metrics").metric("url")
    with pytest.raises(InvariantError, match=r"step 0, .*it has the same url as sample \d+ beside it"):
        check_keys(packer.load_plan(made / "plan"), 0, keys)


def test_verify_refuses_another_count_of_the_most_frequent_key(made):
    def edit(header):
        header["epochs"][0]["figures"]["key_max_count"] = 3

    plans.forge(made / "plan", "plan.json", edit)
    with pytest.raises(InvariantError, match="key_max_count is 3, the rows give 10"):
        packer.verify_plan(made / "plan", metrics=made / "metrics")
