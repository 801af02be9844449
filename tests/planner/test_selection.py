"""Who is planned, who is left out and why, told from the lengths before anything is made of them."""

import numpy as np
import pytest

from packer.errors import ConfigError, EmptyPlanError, MetricsError, PlanError, SampleTooLongError
from packer.planner import PlanConfig, make_plan


def planned(plan):
    epoch = plan.epoch(0)
    return [i for row in range(epoch.num_microbatches) for i in epoch.microbatch(row).sample_ids.tolist()]


@pytest.mark.parametrize(
    ("step_tokens", "multiple", "grad_accum"),
    [(1000, 1, 5), (1090, 1, 5), (1110, 1, 6), (1, 1, 1), (1000, 4, 4)],
)
def test_step_tokens_choose_the_nearest_accumulation(step_tokens, multiple, grad_accum):
    config = PlanConfig(max_tokens=100, dp_size=2, step_tokens=step_tokens, accum_multiple=multiple)
    plan = make_plan(np.full(400, 10), config)
    assert plan.grad_accum == plan.config["grad_accum"] == grad_accum
    assert plan.config["step_tokens"] == step_tokens


def test_more_step_tokens_than_there_are():
    with pytest.raises(EmptyPlanError, match="--grad-accum 50"):
        make_plan(np.full(400, 10), PlanConfig(max_tokens=100, step_tokens=5000))


def test_step_tokens_under_shape_rules_and_a_curriculum():
    lengths = np.random.default_rng(0).integers(1, 50, 2000)
    schedule = {
        "curriculum_type": "seqlen",
        "min_difficulty": 10,
        "max_difficulty": 50,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 10},
    }
    for options in ({"same_num_samples": True, "same_seqlen": True}, {"curriculum": schedule}):
        plan = make_plan(lengths, PlanConfig(max_tokens=500, step_tokens=4000, **options))
        assert 6 <= plan.grad_accum <= 12


def test_samples_that_train_nothing_are_left_out_where_asked():
    lengths, loss = [5, 1, 4, 0, 6], [4, 1, 0, 0, 2]
    config = PlanConfig(max_tokens=50, drop_untrainable=True)
    assert sorted(planned(make_plan(lengths, config, loss_tokens=loss))) == [0, 1, 4]
    plan = make_plan(lengths, config)
    assert sorted(planned(plan)) == [0, 2, 4]  # by length alone, all but the first token trains
    counts = {reason: lost["num_samples"] for reason, lost in plan.header["dropped"].items()}
    assert counts == {"filtered": 1, "empty": 1}


def test_given_ids_keep_their_order_where_it_counts():
    lengths = [9, 8, 7, 6, 5, 4]
    given = {"max_tokens": 9, "order": "sequential"}
    assert planned(make_plan(lengths, PlanConfig(sample_ids=[4, 0, 5, 2], **given))) == [4, 0, 5, 2]
    assert planned(make_plan(lengths, PlanConfig(sample_ids=[5, 4, 3, 2, 1, 0], **given))) == [
        5,
        4,
        3,
        2,
        1,
        0,
    ]
    one, other = (PlanConfig(max_tokens=9, sample_ids=ids) for ids in ([4, 0, 5, 2], [0, 2, 4, 5]))
    assert planned(make_plan(lengths, one)) == planned(make_plan(lengths, other))


def test_a_sample_is_cut_at_the_length_that_holds_in_company():
    lengths = [90, 2, 2, 2, 2]
    options = {"max_tokens": 100, "min_samples": 3, "remainder": "keep"}
    for layout, longest in (("padded", 33), ("packed", 96)):
        cut = make_plan(lengths, PlanConfig(too_long="truncate", layout=layout, **options))
        assert cut.header["max_seqlen"] == longest
    with pytest.raises(SampleTooLongError, match=r"over the limit of 33 .*--min-samples 3 with the shortest"):
        make_plan(lengths, PlanConfig(**options))


def test_the_company_of_a_sample_is_the_shortest_of_the_others():
    options = {"max_tokens": 10, "layout": "packed", "min_samples": 3}
    assert len(planned(make_plan([8, 1, 1], PlanConfig(**options)))) == 3
    with pytest.raises(SampleTooLongError, match="sample 0 has 8 tokens, over the limit of 7"):
        make_plan([8, 1, 2], PlanConfig(**options))


def test_a_fixed_length_over_a_budget_of_real_tokens_holds_what_the_budget_does():
    """S is 12 whatever the samples are; only their own tokens are held to the budget."""
    fixed = {"count": "real", "fixed_seqlen": 12}
    alone = make_plan([8, 9], PlanConfig(max_tokens=8, too_long="drop", **fixed))
    assert (planned(alone), alone.header["max_seqlen"]) == ([0], 8)
    together = make_plan([11, 1], PlanConfig(max_tokens=12, min_samples=2, **fixed))
    assert sorted(planned(together)) == [0, 1]
    with pytest.raises(SampleTooLongError, match=r"over the limit of 10 .*--min-samples 2 with the shortest"):
        make_plan([11, 2], PlanConfig(max_tokens=12, min_samples=2, **fixed))


def test_no_last_piece_of_a_split_sample_trains_nothing():
    """One token that is left takes one from the piece before, and is two."""
    plan = make_plan([21, 20, 31, 9, 1], PlanConfig(max_tokens=10, layout="packed", too_long="split"))
    pieces = {}
    for row in (plan.epoch(0).microbatch(row) for row in range(plan.epoch(0).num_microbatches)):
        for sample, start, seqlen in zip(row.sample_ids, row.starts, row.seqlens, strict=True):
            pieces.setdefault(int(sample), []).append((int(start), int(seqlen)))
    assert {sample: sorted(found) for sample, found in pieces.items()} == {
        0: [(0, 10), (10, 9), (19, 2)],
        1: [(0, 10), (10, 10)],
        2: [(0, 10), (10, 10), (20, 9), (29, 2)],
        3: [(0, 9)],
        4: [(0, 1)],
    }
    assert plan.header["epochs"][0]["num_cut"] == 3


def test_pieces_that_could_train_nothing_are_refused():
    with pytest.raises(ConfigError, match="would make pieces of 2 tokens"):
        make_plan([5, 1], PlanConfig(max_tokens=9, max_seqlen=2, too_long="split"))
    assert len(planned(make_plan([2, 1], PlanConfig(max_tokens=9, max_seqlen=2, too_long="split")))) == 2


def test_lengths_beyond_all_bounds_are_refused_before_anything_is_made():
    with pytest.raises(MetricsError, match=r"over 2\^62"):
        make_plan(np.array([2**62, 2**62, 2**62]), PlanConfig(max_tokens=9, too_long="truncate"))
    with pytest.raises(MetricsError, match=r"is 9223372036854775808, over 2\^63 − 1"):
        make_plan(np.array([1, 2**63], np.uint64), PlanConfig(max_tokens=9))
    with pytest.raises(PlanError, match="its pieces would start after token 2147483647"):
        make_plan(np.array([2**40, 5]), PlanConfig(max_tokens=1024, too_long="split"))
    with pytest.raises(PlanError, match="samples are over the"):
        make_plan(np.full(5000, 2**31 - 1), PlanConfig(max_tokens=1024, too_long="split"))
    plan = make_plan(np.array([2**40, 5]), PlanConfig(max_tokens=1024, too_long="truncate"))
    assert plan.header["dropped"]["truncated"]["num_tokens"] == 2**40 - 1024


@pytest.mark.parametrize("packing", ["mixed", "best-fit", "windowed"])
def test_a_row_of_two_billion_tokens_takes_no_table_of_that_size(packing):
    plan = make_plan([5, 7, 2000], PlanConfig(max_tokens=2**31 - 1, layout="packed", packing=packing))
    assert sorted(planned(plan)) == [0, 1, 2]
