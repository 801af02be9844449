"""An order by blocks: every block is read once, by few steps, and rows are as full as without."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import packer
from cli.main import cli
from packer.errors import ConfigError, InvariantError, MetricsError
from packer.metrics import Blocks, open_metrics
from packer.plan.verify_blocks import check_blocks
from packer.planner import PlanConfig, make_plan
from packer.report import summarize
from tests import naive, plans

PACKINGS = [
    {"layout": "padded", "packing": "windowed"},
    {"layout": "padded", "packing": "next-fit"},
    {"layout": "padded", "packing": "windowed", "same_num_samples": True, "same_seqlen": True},
    {"layout": "packed", "packing": "mixed"},
    {"layout": "packed", "packing": "best-fit"},
    {"layout": "packed", "packing": "windowed"},
    {"layout": "packed", "packing": "next-fit"},
]
named = pytest.mark.parametrize("packing", PACKINGS, ids=lambda options: "-".join(map(str, options.values())))


def lengths_of(num_samples, seed=0, most=2000):
    random = np.random.default_rng(seed)
    return np.minimum(random.lognormal(5.5, 0.9, num_samples).astype(np.int32) + 1, most)


def blocks_of(num_samples, rows=500, num_bytes=1000):
    firsts = np.arange(0, num_samples, rows)
    return Blocks(firsts, num_bytes + np.arange(len(firsts)), num_samples)


def steps_of(plan, epoch=0):
    """Return the blocks' samples of each step: lists of sample ids."""
    rows = rows_of(plan, epoch)
    step_size = plan.dp_size * plan.grad_accum
    return [
        list(chain.from_iterable(rows[first : first + step_size])) for first in range(0, len(rows), step_size)
    ]


def rows_of(plan, epoch=0):
    """Return the sample ids of each row."""
    tables = plan.epoch(epoch).microbatches()
    return [ids.tolist() for table in tables for ids in np.split(table.sample_ids, table.offsets[1:-1])]


@named
@pytest.mark.parametrize("steps", [{}, {"dp_size": 4, "grad_accum": 2}])
def test_a_block_is_read_once_and_few_are_open_at_a_time(packing, steps):
    """The bound: the K blocks of a group, and those of the group before, whose last rows fill a step."""
    seqlens, blocks = lengths_of(20_000), blocks_of(20_000)
    at_a_time = 4
    config = PlanConfig(max_tokens=8192, shuffle_blocks=at_a_time, epochs=2, **packing, **steps)
    plan = make_plan(seqlens, config, blocks=blocks)
    packer.verify_plan(plan)
    for epoch in range(2):
        open_blocks, open_bytes = naive.most_open(
            steps_of(plan, epoch), blocks.firsts.tolist(), blocks.num_bytes.tolist()
        )
        stated = plan.header["epochs"][epoch]["figures"]["blocks"]
        assert (stated["open_blocks"], stated["open_bytes"]) == (open_blocks, open_bytes)
        assert at_a_time <= open_blocks <= 2 * at_a_time
        check_blocks(plan, epoch, blocks)
    orders = [[int(blocks.of(np.array(step[:1]))[0]) for step in steps_of(plan, epoch)] for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) != orders[0]


@named
def test_rows_are_as_full_as_over_all_samples_at_once(packing):
    """Rows go on over the borders of groups: what a group leaves unfilled, the next one fills."""
    seqlens, blocks = lengths_of(12_000), blocks_of(12_000, rows=250)
    config = PlanConfig(max_tokens=8192, dp_size=2, **packing)
    at_once, in_groups = (
        make_plan(seqlens, chosen, blocks=blocks).header["epochs"][0]
        for chosen in (config, replace(config, shuffle_blocks=6))
    )
    assert in_groups["num_samples"] >= 0.99 * at_once["num_samples"]
    padding = [counts["num_padded_tokens"] / counts["num_tokens"] for counts in (at_once, in_groups)]
    fill = [counts["num_tokens"] / counts["num_microbatches"] for counts in (at_once, in_groups)]
    assert padding[1] <= 1.03 * padding[0]
    assert fill[1] >= 0.985 * fill[0]


def test_steps_are_like_their_blocks_and_the_figures_say_how_far_these_are_from_the_data_set():
    """Files sorted by length: each stretch is of its own kind, and its steps are a mix of all that it has."""
    seqlens, blocks = np.sort(lengths_of(40_000)), blocks_of(40_000, rows=1000)
    config = PlanConfig(max_tokens=8192, layout="packed", dp_size=4, grad_accum=2)
    plan = make_plan(seqlens, replace(config, shuffle_blocks=4), blocks=blocks)
    check_blocks(plan, 0, blocks)
    effect = plan.header["epochs"][0]["design_effect"]["seqlen"]
    figures = plan.header["epochs"][0]["figures"]["blocks"]
    assert figures["design_effect_of_stretches"] > 50
    assert figures["design_effect_of_steps"] < 2
    assert effect > 1.5
    shuffled = np.random.default_rng(1).permutation(seqlens)
    plan = make_plan(shuffled, replace(config, shuffle_blocks=4), blocks=blocks)
    figures = plan.header["epochs"][0]["figures"]["blocks"]
    assert figures["design_effect_of_stretches"] < 2
    assert figures["design_effect_of_steps"] < 0.5


@st.composite
def problems(draw):
    seqlens = draw(st.lists(st.integers(1, 30), min_size=1, max_size=80))
    firsts = draw(st.lists(st.integers(1, len(seqlens)), max_size=12))
    firsts = sorted({0, *(first for first in firsts if first < len(seqlens))})
    sizes = draw(st.lists(st.integers(0, 100), min_size=len(firsts), max_size=len(firsts)))
    options = draw(st.sampled_from(PACKINGS)) | {
        "shuffle_blocks": draw(st.integers(1, 5)),
        "dp_size": draw(st.integers(1, 3)),
        "remainder": draw(st.sampled_from(["keep", "fill"])),
        "min_samples": draw(st.sampled_from([1, 1, 2])),
        "too_long": draw(st.sampled_from(["split", "drop"])),
        "max_seqlen": draw(st.sampled_from([30, 20])),
    }
    blocks = Blocks(np.array(firsts), np.array(sizes, np.int64), len(seqlens))
    return np.array(seqlens, np.int32), blocks, PlanConfig(max_tokens=60, **options)


@given(problems())
def test_whatever_the_blocks_every_sample_is_planned_and_the_figures_are_those_of_a_naive_count(problem):
    seqlens, blocks, config = problem
    try:
        plan = make_plan(seqlens, config, blocks=blocks)
    except packer.errors.EmptyPlanError:
        return
    packer.verify_plan(plan)
    check_blocks(plan, 0, blocks)
    stated = plan.header["epochs"][0]["figures"]["blocks"]
    expected = naive.most_open(steps_of(plan), blocks.firsts.tolist(), blocks.num_bytes.tolist())
    assert (stated["open_blocks"], stated["open_bytes"]) == expected
    assert plan.fingerprint == make_plan(seqlens, config, blocks=blocks).fingerprint


@given(problems())
def test_the_mix_by_stretch_is_that_of_a_naive_sum(problem):
    seqlens, blocks, config = problem
    config = replace(config, remainder="drop", too_long="drop", dp_size=1)
    try:
        plan = make_plan(seqlens, config, blocks=blocks)
    except packer.errors.EmptyPlanError:
        return
    steps = [[int(seqlens[sample]) for sample in step] for step in steps_of(plan)]
    first_steps = naive.stretches_of(steps_of(plan), blocks.firsts.tolist(), config.shuffle_blocks)
    stated = plan.header["epochs"][0]["figures"]["blocks"]
    expected = naive.effects_by_stretch(steps, first_steps)
    for name, effect in zip(("design_effect_of_steps", "design_effect_of_stretches"), expected, strict=True):
        if effect is None:
            assert stated[name] is None
        else:
            assert stated[name] == pytest.approx(effect, rel=1e-6, abs=1e-6)


def test_two_blocks_at_a_time_of_one_sample_each():
    """The smallest plan that shows the order: neighbours in a row come from one group."""
    plan = make_plan(
        np.full(8, 10),
        PlanConfig(max_tokens=20, shuffle_blocks=2, layout="packed"),
        blocks=Blocks(np.arange(8), np.full(8, 7), 8),
    )
    assert Counter(map(len, rows_of(plan))) == {2: 4}
    assert plan.header["epochs"][0]["figures"]["blocks"] == {
        "num_blocks": 8,
        "open_blocks": 2,
        "open_bytes": 14,
        "design_effect_of_steps": None,
        "design_effect_of_stretches": None,
    }


@pytest.mark.parametrize(
    "options",
    [{"order": "sequential"}, {"order": "seqlen"}, {"curriculum": {"schedule_type": "fixed_linear"}}],
)
def test_an_order_of_the_users_own_and_one_by_blocks_are_refused(options):
    with pytest.raises(ConfigError, match=r"--shuffle-blocks 2 .* leave one of them out|curriculum"):
        PlanConfig(max_tokens=20, shuffle_blocks=2, **options)


def test_without_blocks_or_with_those_of_another_data_set_nothing_is_planned():
    with pytest.raises(ConfigError, match="needs to know how the samples lie in files"):
        make_plan([1, 2], PlanConfig(max_tokens=20, shuffle_blocks=2))
    with pytest.raises(MetricsError, match="hold 3 samples, and there are 2"):
        make_plan([1, 2], PlanConfig(max_tokens=20, shuffle_blocks=2), blocks=blocks_of(3))


@pytest.fixture
def made(tmp_path):
    rows = [np.arange(n, dtype=np.int32) for n in lengths_of(2000, most=500)]
    pq.write_table(pa.table({"ids": rows}), tmp_path / "a.parquet", row_group_size=100)
    packer.analyze(tmp_path / "a.parquet", out=tmp_path / "metrics", tokens_column="ids")
    return tmp_path


def test_the_command_says_what_the_order_takes_and_verify_holds_the_plan_to_it(made):
    run = CliRunner().invoke(
        cli,
        f"plan {made}/metrics --out {made}/plan --max-tokens 4096 --layout packed --shuffle-blocks 3",
    )
    assert run.exit_code == 0, run.output
    assert "3 of 20 shuffled at a time; at most 6 are open: a cache of " in run.output
    assert "of these from the epoch (1: random)" in run.output
    summary = summarize(packer.load_plan(made / "plan")).as_json()
    assert summary["blocks"]["num_blocks"] == len(open_metrics(made / "metrics").blocks)
    verified = CliRunner().invoke(cli, f"verify {made}/plan --metrics {made}/metrics")
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize(
    ("name", "value"),
    [("open_blocks", 5), ("open_bytes", 1), ("design_effect_of_steps", 0.5), ("num_blocks", 19)],
)
def test_verify_refuses_figures_that_the_rows_do_not_give(made, name, value):
    make_plan(made / "metrics", PlanConfig(max_tokens=4096, shuffle_blocks=3), out=made / "plan")

    def edit(header):
        header["epochs"][0]["figures"]["blocks"][name] = value

    plans.forge(made / "plan", "plan.json", edit)
    with pytest.raises(InvariantError, match="planned over 19 blocks" if name == "num_blocks" else name):
        packer.verify_plan(made / "plan", metrics=made / "metrics")


def test_verify_refuses_an_order_by_blocks_without_figures(made):
    make_plan(made / "metrics", PlanConfig(max_tokens=4096, shuffle_blocks=3), out=made / "plan")
    plans.forge(made / "plan", "plan.json", lambda header: header["epochs"][0]["figures"].pop("blocks"))
    with pytest.raises(InvariantError, match="without figures of its blocks"):
        packer.verify_plan(made / "plan", metrics=made / "metrics")
