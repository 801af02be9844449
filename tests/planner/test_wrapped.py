"""``--packing wrapped``: documents end to end in full rows, together with every option it stands beside."""

import numpy as np
import pytest

from packer.errors import ConfigError, PlanError
from packer.plan import verify_plan
from packer.planner import PlanConfig, make_plan
from packer.report import summarize, summary_lines
from tests import invariants

ROOM = 64
WRAPPED = {"max_tokens": ROOM, "layout": "packed", "packing": "wrapped"}
LENGTHS = np.minimum(np.random.default_rng(3).lognormal(3, 1.3, 400).astype(int) + 1, 500)


def rows_of(plan, epoch=0):
    opened = plan.epoch(epoch)
    return [opened.microbatch(row) for row in range(opened.num_microbatches)]


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 64),
        ({"dp_size": 2, "grad_accum": 3, "balance": "flops", "hidden_size": 8}, 64),
        ({"dp_size": 2, "grad_accum": 2, "remainder": "keep", "epochs": 2}, 64),
        ({"dp_size": 3, "remainder": "fill", "same_seqlen": True}, 64),
        ({"fixed_seqlen": 48}, 48),
        ({"fixed_seqlen": 72, "count": "real"}, 64),  # the budget counts tokens, T is 72
        ({"count": "real", "pad_segments_to": 4}, 64),
        ({"max_tokens": 70, "sp_size": 4, "pad_multiple": 6}, 60),
        ({"max_tokens": 70, "pad_segments_to": 4}, 68),
        ({"num_shapes": 2, "max_tokens": 63}, 63),
        ({"lr_scaling": "sqrt", "lr_by": "tokens", "step_tokens": 400}, 64),
        ({"filter_min": 10, "filter_max": 300, "drop_untrainable": True}, 64),
        ({"max_seqlen": 100, "too_long": "drop"}, 64),
        ({"max_seqlen": 100, "too_long": "truncate"}, 64),
        ({"max_seqlen": 100, "too_long": "split"}, 64),
        ({"max_seqlen": 20, "too_long": "split"}, 64),
        ({"sample_ids": range(5, 250)}, 64),
    ],
)
def test_rows_are_full_to_one_token_beside_every_option(tmp_path, options, room):
    plan = make_plan(LENGTHS, PlanConfig(**WRAPPED | options), out=tmp_path / "plan")
    invariants.check(tmp_path / "plan", LENGTHS)
    verify_plan(plan)
    segment = 1 if options.get("count") == "real" else options.get("pad_segments_to", 1)
    for epoch in range(plan.num_epochs):
        rows = rows_of(plan, epoch)
        missing = [room - int((-(-row.seqlens // segment) * segment).sum()) for row in rows]
        assert len(rows) > 20
        assert min(missing) >= 0
        assert sum(short > 1 for short in missing) <= 1 + plan.header["epochs"][epoch]["num_fillers"]


def test_no_token_is_lost_and_the_last_row_is_the_only_short_one():
    plan = make_plan(LENGTHS, PlanConfig(**WRAPPED))
    assert plan.header["epochs"][0]["num_tokens"] == LENGTHS.sum()
    missing = [ROOM - row.num_tokens for row in rows_of(plan)]
    assert max(missing[:-1]) == 1  # some documents leave a single token
    assert plan.header["epochs"][0]["figures"]["lower_bound"] == -(-LENGTHS.sum() // ROOM)


def test_every_epoch_cuts_other_documents():
    plan = make_plan(LENGTHS, PlanConfig(**WRAPPED, epochs=2))
    first, second = (
        {piece for row in rows_of(plan, epoch) for piece in zip(row.sample_ids, row.starts, strict=True)}
        for epoch in range(2)
    )
    assert len(first & second) < 0.9 * len(first | second)


def test_parts_of_a_long_document_do_not_follow_each_other():
    lengths = np.full(50, 100 * ROOM)
    ids = [row.sample_ids[0] for row in rows_of(make_plan(lengths, PlanConfig(**WRAPPED)))]
    assert np.mean(np.diff(ids) == 0) < 0.05


def test_what_cuts_cost_is_counted_and_shown():
    plan = make_plan(LENGTHS, PlanConfig(**WRAPPED, remainder="keep"))
    later = sum(int(np.count_nonzero(row.starts)) for row in rows_of(plan))
    summary = summarize(plan)
    assert summary.unpredicted_tokens == later > 0
    assert f"nothing predicts the first token of {later} later pieces" in "\n".join(summary_lines(summary))
    loss = sum(table.num_loss_tokens.sum() for table in plan.epoch(0).steps())
    assert loss == LENGTHS.sum() - len(LENGTHS) - later


def test_loss_tokens_of_labels_are_unknown():
    loss_tokens = LENGTHS // 2
    plan = make_plan(LENGTHS, PlanConfig(**WRAPPED), loss_tokens=loss_tokens)
    assert plan.header["loss_tokens"] is None
    with pytest.raises(ConfigError, match="choose --lr-by tokens"):
        config = PlanConfig(**WRAPPED, lr_scaling="linear", lr_by="loss-tokens")
        make_plan(LENGTHS, config, loss_tokens=loss_tokens)


def test_a_sample_that_is_split_is_never_twice_in_a_row():
    """Rows are short only when its pieces are all that is left."""
    lengths = [600, *[40] * 20]
    plan = make_plan(lengths, PlanConfig(**WRAPPED, max_seqlen=20, too_long="split"))
    rows = rows_of(plan)
    assert sum(0 in row.sample_ids for row in rows) == 30
    assert verify_plan(plan).num_samples == 21


def test_documents_of_three_tokens_alone_leave_room_for_two():
    plan = make_plan([3] * 50, PlanConfig(max_tokens=5, layout="packed", packing="wrapped"))
    assert {row.num_tokens for row in rows_of(plan)} == {3}
    verify_plan(plan)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 1000])
def test_a_single_document(length):
    plan = make_plan([length], PlanConfig(**WRAPPED))
    assert sum(row.num_tokens for row in rows_of(plan)) == length
    verify_plan(plan)


def test_rows_too_short_to_cut_are_refused():
    options = {"layout": "packed", "packing": "wrapped"}
    with pytest.raises(ConfigError, match="a wrapped row of 2 tokens"):
        make_plan([5, 7], PlanConfig(max_tokens=2, **options))
    with pytest.raises(ConfigError, match="a wrapped row of 2 tokens"):
        make_plan([5, 7], PlanConfig(max_tokens=3, pad_segments_to=2, **options))
    verify_plan(make_plan([5, 7], PlanConfig(max_tokens=3, **options)))


def test_a_sample_beyond_what_starts_can_count_is_refused_before_anything_is_made():
    config = PlanConfig(**WRAPPED, max_seqlen=2**30, too_long="split")
    with pytest.raises(PlanError, match="its pieces would start after token 2147483647"):
        make_plan(np.array([2**31 + 5, 5]), config)
