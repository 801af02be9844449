"""The summary says what the rows say."""

import json
from dataclasses import replace

import numpy as np
import pytest

from packer.plan import plan_in_memory
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
    slots = np.array([row.cost for row in rows]).reshape(-1, 2)
    assert summary.rank_imbalance == pytest.approx((slots.max(1) / slots.mean(1) - 1).mean(), abs=1e-6)
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
        "11.7%",
    ):
        assert part in text


def test_copies_are_counted_apart():
    plan, _ = plans.copying_plan("fill")
    summary = summarize(plan)
    assert (summary.num_repeats, summary.planned_tokens, summary.real_tokens) == (1, 10, 12)
    assert "1 micro-batches train twice" in "\n".join(summary_lines(summary))
    plan, _ = plans.copying_plan("keep")
    summary = summarize(plan)
    assert (summary.num_fillers, summary.planned_tokens, summary.real_tokens) == (1, 10, 10)
    assert "1 masked micro-batches" in "\n".join(summary_lines(summary))


def test_figures_of_the_planner_are_shown():
    plan_facts = plans.facts([4, 4], layout="packed", dp_size=2)
    rows = [plans.Row(pieces=[(0, 4)]), plans.Row(pieces=[(1, 4)])]
    epoch = replace(
        plans.epoch(rows, dp_size=2, layout="packed"),
        figures={
            "lower_bound": 1,
            "num_packed": 2,
            "rank_imbalance_before": 0.31,
            "curriculum_raises": 3,
            "curriculum_first_raise": 17,
        },
    )
    summary = summarize(plan_in_memory(plan_facts, [epoch, epoch], dropped=plans.drops()))
    assert (summary.lower_bound, summary.over_bound, summary.rank_imbalance_before) == (2, 2, 0.31)
    text = "\n".join(summary_lines(summary))
    assert "4, 2 over the lower bound of 2" in text
    assert "ran dry in epoch 1, first at step 17: the difficulty was raised to the next value 3 times" in text
    assert "0% after balancing, 31.0% before" in text


def test_a_wide_range_of_learning_rates_is_noted():
    seqlens = [1, 1, 1, 1, 1, 1]
    rows = [plans.Row(pieces=[(0, 1)]), plans.Row(pieces=[(i, 1) for i in range(1, 6)])]
    facts = replace(plans.facts(seqlens, lr_scaling="linear"), lr_base=3.0)
    plan = plan_in_memory(facts, [plans.epoch(rows, lr_scales=[1 / 3, 5 / 3])], dropped=plans.drops())
    (note,) = summarize(plan).notes
    assert "spans 5.0×" in note
    assert "--lr-max-scale" in note


def test_a_plan_without_steps_is_said_to_have_none():
    plan = plan_in_memory(plans.facts([]), [plans.epoch([])], dropped=plans.drops())
    summary = summarize(plan)
    assert summary.tokens_per_step is None
    assert summary.notes == ("the plan has no step",)
    assert list(summary_lines(summary))


def test_metrics_without_manifest_are_noted():
    facts = replace(plans.facts([1]), metrics_fingerprint="0" * 64)
    plan = plan_in_memory(facts, [plans.epoch([plans.Row(pieces=[(0, 1)])])], dropped=plans.drops())
    assert "no manifest" in summarize(plan).notes[0]
