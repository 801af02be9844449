"""The summary says what the rows say."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from packer.plan import plan_in_memory
from packer.plan.sources import PlanSource
from packer.planner import PlanConfig, make_plan
from packer.report import summarize, summary_lines
from packer.report import summary as summary_module
from tests import plans


def test_numbers_are_those_of_the_rows():
    plan, seqlens = plans.whole_plan()
    summary = summarize(plan)
    rows = [plan.epoch(e).microbatch(r) for e in range(2) for r in range(4)]
    assert (summary.num_steps, summary.num_microbatches) == (4, 8)
    assert summary.source_tokens == sum(seqlens)
    assert summary.planned_samples == sum(row.num_samples for row in rows)
    assert summary.planned_tokens == summary.real_tokens == sum(row.num_tokens for row in rows)
    assert summary.padded_tokens == sum(row.num_samples * row.padded_seqlen for row in rows)
    assert summary.largest_microbatch == max(row.num_samples * row.padded_seqlen for row in rows)
    assert summary.padding == summary.padded_tokens / summary.real_tokens - 1
    lost = [(part.epoch[i], part.num_tokens[i]) for part in plan.dropped() for i in range(len(part.epoch))]
    in_all = [tokens for epoch, tokens in lost for _ in range(2 if epoch < 0 else 1)]
    assert sum(counts["num_samples"] for counts in summary.dropped.values()) == len(in_all)
    assert sum(counts["num_tokens"] for counts in summary.dropped.values()) == sum(in_all)
    assert summary.planned_tokens + sum(in_all) == 2 * sum(seqlens)
    slots = np.array([row.cost for row in rows]).reshape(2, 2, 2)  # (epochs, slots, ranks)
    lost = (slots.max(2).sum(1) * 2 / slots.sum((1, 2)) - 1).mean()
    assert summary.rank_imbalance == pytest.approx(lost)
    assert summary.samples_per_step[:2] == (3, 3)
    assert (summary.samples_per_step.max, summary.samples_per_step.mean) == (4, 3.75)
    assert json.loads(json.dumps(summary.as_json()))["lr_scale"]["min"] == 0.8


def test_a_long_plan_takes_every_nth_step_and_keeps_the_extremes(monkeypatch):
    monkeypatch.setattr(summary_module, "STEPS_FOR_QUANTILES", 10)
    seqlens = [*range(1, 101)]
    rows = [plans.Row(pieces=[(i, n)]) for i, n in enumerate(seqlens)]
    tokens = summarize(
        plan_in_memory(plans.facts(seqlens), [plans.epoch(rows)], dropped=plans.drops())
    ).tokens_per_step
    assert (tokens.min, tokens.max, tokens.mean) == (1, 100, 50.5)
    assert 35 < tokens.median < 65


def test_lines_for_people_fit_a_screen_and_name_every_reason():
    plan, _ = plans.whole_plan()
    lines = list(summary_lines(summarize(plan)))
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines)
    for part in (
        "4 in 2 epochs, each of 2 ranks × 1 micro-batch (padded, next-fit)",
        "15 of 26 (57.7%)",
        "dropped too_long",
        "dropped remainder",
        "36.0% over 75 real tokens; the largest micro-batch takes 18",
        "0.8 to 1.07, mean 1 (linear in samples, 1 at 3.75)",
        "12.0% (time lost, by cost; --balance evens it out)",
    ):
        assert part in text


def test_copies_are_counted_apart():
    plan, _ = plans.copying_plan("fill")
    summary = summarize(plan)
    assert (summary.num_repeats, summary.planned_tokens, summary.real_tokens) == (1, 10, 12)
    assert "1 micro-batch to train twice" in "\n".join(summary_lines(summary))
    plan, _ = plans.copying_plan("keep")
    summary = summarize(plan)
    assert (summary.num_fillers, summary.planned_tokens, summary.real_tokens) == (1, 10, 10)
    assert "1 masked micro-batch to make" in "\n".join(summary_lines(summary))


def test_figures_of_the_planner_are_shown():
    plan_facts = plans.facts([4, 4], layout="packed", dp_size=2)
    rows = [plans.Row(pieces=[(0, 4)]), plans.Row(pieces=[(1, 4)])]
    epoch = replace(
        plans.epoch(rows, dp_size=2, layout="packed"),
        figures={
            "lower_bound": 1,
            "num_packed": 2,
            "rank_imbalance_before": 0.31,
            "curriculum_raises": [{"step": at, "as_of": 90, "beyond": 0} for at in (17, 19, 30)],
        },
    )
    summary = summarize(plan_in_memory(plan_facts, [epoch, epoch], dropped=plans.drops()))
    assert (summary.lower_bound, summary.over_bound, summary.rank_imbalance_before) == (2, 2, 0.31)
    text = "\n".join(summary_lines(summary))
    assert "4, 2 over the lower bound of 2" in text
    assert "ran dry in epoch 1, first before step 17: at 3 steps the difficulty was raised early" in text
    assert "0% after balancing, 31.0% before" in text


def test_a_wide_range_of_learning_rates_is_noted():
    seqlens = [1, 1, 1, 1, 1, 1]
    rows = [plans.Row(pieces=[(0, 1)]), plans.Row(pieces=[(i, 1) for i in range(1, 6)])]
    facts = replace(plans.facts(seqlens, lr_scaling="linear"), lr_base=3.0)
    plan = plan_in_memory(facts, [plans.epoch(rows, lr_scales=[1 / 3, 5 / 3])], dropped=plans.drops())
    (note,) = summarize(plan).notes
    assert "spans 5.0×" in note
    assert "--lr-max-scale" in note


def shapely(*shapes, **options):
    """Return a plan in whose first epoch micro-batches have these (B, S), and its second none."""
    rows = []
    for num_rows, padded in shapes:
        ids = range(len(rows) * 10, len(rows) * 10 + num_rows)
        rows.append(plans.Row(pieces=[(i, padded - 1) for i in ids], padded_seqlen=padded))
    seqlens = [1] * (10 * len(rows))
    facts = plans.facts(seqlens, **options)
    return plan_in_memory(facts, [plans.epoch(rows)], dropped=plans.drops())


def table_of(summary):
    """Return the lines of the table of shapes, split into cells."""
    lines = list(summary_lines(summary))
    assert max(map(len, lines)) <= 110
    first = next((at for at, line in enumerate(lines) if "micro-batches    share" in line), None)
    return [] if first is None else [line.split() for line in lines[first:] if line.startswith("    ")]


def test_shapes_are_listed_with_counts_shares_and_padding():
    summary = summarize(shapely((2, 4), (2, 4), (5, 2), (2, 4), num_shapes=2))
    assert summary.shapes == ((2, 4, 3, 18), (5, 2, 1, 5))
    assert "  shapes               2 of 2 padded lengths, 2 to 4" in list(summary_lines(summary))
    assert table_of(summary) == [
        ["B", "×", "S", "micro-batches", "share", "padding"],
        ["2", "×", "4", "3", "75.0%", "33.3%"],
        ["5", "×", "2", "1", "25.0%", "100%"],
    ]
    assert summary.as_json()["shapes"][1] == {
        "num_rows": 5,
        "padded_seqlen": 2,
        "num_microbatches": 1,
        "num_tokens": 5,
        "padding": 1.0,
    }


@pytest.mark.parametrize(("num_shapes", "rest"), [(8, None), (9, None), (10, "2"), (40, "32")])
def test_of_many_shapes_the_most_frequent_are_listed(num_shapes, rest):
    shapes = [(1, 2 + at) for at in range(num_shapes)] + [(1, 2)]
    table = table_of(summarize(shapely(*shapes, fixed_seqlen=64)))
    assert table[1][:4] == ["1", "×", "2", "2"]
    if rest is None:
        assert len(table) == 1 + num_shapes
        return
    assert len(table) == 1 + 8 + 1
    assert table[-1][:4] == ["…", rest, "more", rest]
    counts = [int(row[3]) for row in table[1:]]
    assert sum(counts) == num_shapes + 1


def test_shapes_that_nobody_asked_for_are_listed_while_few():
    six = [(1, 2 + at) for at in range(6)]
    assert len(table_of(summarize(shapely(*six)))) == 1 + 6
    assert not table_of(summarize(shapely(*six, (1, 9))))
    asked = shapely(*six, (1, 9), same_num_samples=True)
    assert len(table_of(summarize(asked))) == 1 + 7


def test_too_many_shapes_to_list_are_said_to_be():
    plan = shapely(*((1, 2 + at) for at in range(300)), same_seqlen=True)
    assert plan.header["shapes"] is None
    summary = summarize(plan)
    assert summary.shapes is None
    assert not table_of(summary)
    assert "too many to list" in "\n".join(summary_lines(summary))


def test_fillers_are_padding_of_their_shape():
    plan, _ = plans.copying_plan("keep")
    assert summarize(plan).shapes == ((1, 2, 2, 2), (1, 4, 2, 8))


def test_rows_have_one_length():
    rows = [plans.Row(pieces=[(0, 4)]), plans.Row(pieces=[(1, 4), (2, 3)], padded_seqlen=8)]
    facts = plans.facts([4, 4, 3], layout="packed")
    summary = summarize(plan_in_memory(facts, [plans.epoch(rows, layout="packed")], dropped=plans.drops()))
    assert "  shapes               2 row lengths, 4 to 8" in list(summary_lines(summary))
    assert table_of(summary)[1:] == [
        ["1", "×", "4", "1", "50.0%", "0%"],
        ["1", "×", "8", "1", "50.0%", "14.3%"],
    ]


def test_a_plan_without_steps_is_said_to_have_none():
    plan = plan_in_memory(plans.facts([]), [plans.epoch([])], dropped=plans.drops())
    summary = summarize(plan)
    assert summary.tokens_per_step is None
    assert summary.notes == ("the plan has no step",)
    assert list(summary_lines(summary))


def test_metrics_without_manifest_are_noted():
    facts = replace(plans.facts([1]), sources=[PlanSource(num_samples=1, num_tokens=1, fingerprint="0" * 64)])
    plan = plan_in_memory(facts, [plans.epoch([plans.Row(pieces=[(0, 1)])])], dropped=plans.drops())
    assert "no manifest" in summarize(plan).notes[0]


def plan_of(steps, *, stated=None, **options):
    """Return the summary of a plan whose steps are lists of rows, each a list of lengths."""
    lengths = [n for step in steps for row in step for n in row]
    ids = iter(range(len(lengths)))
    rows = [plans.Row(pieces=[(next(ids), n) for n in row]) for step in steps for row in step]
    options = {"order": "random", "grad_accum": len(steps[0])} | options
    layout = {name: options[name] for name in ("layout", "grad_accum", "dp_size") if name in options}
    epoch = plans.epoch(rows, **layout)
    if stated is not None:
        epoch = replace(epoch, design_effect={"seqlen": stated, "source": None})
    return summarize(plan_in_memory(plans.facts(lengths, **options), [epoch], dropped=plans.drops()))


APART = [[[1] * 8], [[8]]] * 80


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (
            {"packing": "windowed"},
            r"16 micro-batches .*--grad-accum 16, or --step-tokens 130\), or --layout packed$",
        ),
        (
            {"packing": "windowed", "accum_multiple": 3},
            r"18 micro-batches .*--grad-accum 18, or --step-tokens 140",
        ),
        ({"packing": "windowed", "same_seqlen": True}, "one shape; --layout packed"),
        ({"packing": "best-fit", "layout": "packed"}, "--packing mixed makes every row a mix"),
        ({"packing": "next-fit", "layout": "packed"}, "--packing mixed makes every row a mix"),
        (
            {"packing": "mixed", "layout": "packed"},
            r"more rows a step mix it \(--grad-accum 4, or --step-tokens 32\)",
        ),
    ],
)
def test_a_step_that_is_no_random_one_is_said_to_be_worth_less_in_one_line_with_the_cure(options, cure):
    summary = plan_of(APART, stated=8.0, **options)
    (note,) = summary.notes
    assert note.startswith("a step tells as much as a random one of 1/8.0 its size, since ")
    assert re.search(cure, note)
    assert "  design effect        8.0 in length (1: steps differ as random ones would)" in list(
        summary_lines(summary)
    )


@pytest.mark.parametrize(
    "options",
    [{"order": "sequential"}, {"order": "seqlen"}, {"curriculum": {"schedule_type": "fixed_linear"}}],
)
def test_of_a_given_order_no_more_is_asked(options):
    summary = plan_of(APART, **options)
    assert summary.design_effect["seqlen"] > 1.1
    assert summary.notes == ()
    assert "(by the order given)" in "\n".join(summary_lines(summary))


@pytest.mark.parametrize(
    ("dp_size", "grad_accum", "effect", "wanted"), [(8, 1, 4.0, 2), (2, 2, 20.0, 16), (8, 2, 1.8, 4)]
)
def test_micro_batches_that_mix_a_step_are_multiples_of_the_classes(dp_size, grad_accum, effect, wanted):
    steps = [[[1]] * dp_size * grad_accum] * 400
    summary = plan_of(steps, stated=effect, dp_size=dp_size, grad_accum=grad_accum, packing="windowed")
    assert f"{wanted * dp_size} micro-batches a step mix it (--grad-accum {wanted}, " in summary.notes[0]


def test_a_small_data_set_is_not_told_to_take_steps_that_it_does_not_fill():
    (note,) = plan_of(APART[:20], stated=8.0, packing="windowed").notes
    assert "--grad-accum" not in note
    assert "--layout packed mixes them (the data set is too small to deal them to steps)" in note


def test_mixed_steps_have_no_note():
    assert plan_of(APART, stated=1.1).notes == ()
    assert plan_of([[[1] * 8 + [8]]] * 4).notes == ()


def test_what_the_mix_costs_in_rows_stands_beside_the_bound():
    rows = [plans.Row(pieces=[(i, 4)]) for i in range(3)]
    epoch = replace(plans.epoch(rows, layout="packed"), figures={"lower_bound": 2, "num_packed": 3})
    facts = plans.facts([4, 4, 4], layout="packed", packing="mixed", order="random")
    text = "\n".join(summary_lines(summarize(plan_in_memory(facts, [epoch], dropped=plans.drops()))))
    assert "3, 1 over the lower bound of 2 (50.0%, the most that the mix costs)" in text


def test_time_lost_by_slots_and_by_steps_are_told_apart():
    summary = plan_of([[[4], [2], [2], [4]]] * 2, grad_accum=2, dp_size=2)
    assert (summary.rank_imbalance, summary.rank_imbalance_by_step) == (pytest.approx(1 / 3), 0)
    assert "33.3%; 0% where ranks wait once a step (time lost, by cost" in "\n".join(summary_lines(summary))


def test_figures_of_pairs_name_the_metric_they_are_of():
    row = plans.Row(pieces=[(0, 3), (1, 5)], padded_seqlens={"source": 5, "target": 4})
    facts = plans.facts([3, 5], max_tokens={"source": 10, "target": 8})
    lines = list(summary_lines(summarize(plan_in_memory(facts, [plans.epoch([row])], dropped=plans.drops()))))
    assert any(line.startswith("  padding, source      ") for line in lines)


def test_a_sample_in_pieces_counts_once_and_cut_ones_are_counted():
    seqlens = [9, 9, 3, 3]  # in pieces of 4: two rows a step, a remainder
    config = PlanConfig(max_tokens=4, layout="packed", too_long="split", order="sequential", grad_accum=3)
    summary = summarize(make_plan(seqlens, config))
    assert summary.cut_samples == 2
    assert sum(counts["num_samples"] for counts in summary.dropped.values()) + summary.planned_samples == 4
    assert summary.planned_tokens + sum(counts["num_tokens"] for counts in summary.dropped.values()) == 24
    cut = "  samples cut          2 of 4 (50.0%); nothing predicts the first token of 4 later pieces"
    assert cut in list(summary_lines(summary))


def test_each_source_has_a_line_with_its_share_and_passes():
    summary = summarize(plans.mixed_plan())
    assert summary.offered_samples == 7 + 2 * 3
    web, code, old = summary.sources
    assert (web.planned_samples, web.planned_tokens, code.planned_samples, code.planned_tokens) == (
        6,
        29,
        5,
        31,
    )
    assert (web.share, old.planned_tokens) == (29 / 60, 0)
    lines = "\n".join(summary_lines(summary))
    for part in (
        "source web           48.3% (45.0% asked); 0.857 passes through 7 samples of 35 tokens",
        "source code          51.7% (55.0% asked); 1.67 passes through 3 samples of 16 tokens",
        "source old           not reached: none of its 2 samples of 8 tokens",
        "11 of 13 (84.6%)",
        "0.28 in source",
    ):
        assert part in lines
    code_in_json = json.loads(json.dumps(summary.as_json()))["sources"][1]
    assert code_in_json["asked"] == [{"first_step": 0, "share": 0.55}]
    assert (code_in_json["passes"], code_in_json["planned_tokens"]) == (5 / 3, 31)


def test_shares_that_count_samples_and_phases_are_said():
    plan = plans.mixed_plan(mix_by="samples")
    plan.header["phases"].append({"first_step": 2, "shares": {"web": 0.3, "code": 0.7, "old": 0.0}})
    lines = "\n".join(summary_lines(summarize(plan)))
    assert "source web           54.5% (45.0% asked, 30.0% from step 2 on); 0.857 passes" in lines


def test_a_plan_of_one_data_set_names_no_source():
    plan, _ = plans.whole_plan()
    summary = summarize(plan)
    assert "source" not in "".join(line.split()[0] for line in summary_lines(summary))
    (only,) = summary.sources
    assert (only.name, only.planned_samples, only.asked) == (None, 15, ())
