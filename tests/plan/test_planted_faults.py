"""Verification names many faults in plans of the planner's own: one a rule, and each reason to drop."""

from functools import cache

import numpy as np
import pytest

from packer.errors import PlanError
from packer.plan import plan_in_memory, verify_plan
from packer.planner import PlanConfig, make_plan
from tests import invariants, plans

HEADER = "plan.json"
ROWS = "epoch-00000/microbatches.arrow"
STEPS = "epoch-00000/steps.arrow"
DROPS = "dropped.arrow"

SEQLENS = np.append(np.random.default_rng(7).integers(3, 56, 300), [0, 1, 58, 59, 61, 90]).tolist()
STEP = {"max_tokens": 240, "dp_size": 2, "grad_accum": 2}
OPTIONS = {
    "padded": STEP
    | {"grad_accum": 5}
    | {"filter_min": 2, "filter_max": 60, "max_seqlen": 57, "too_long": "drop", "epochs": 2}
    | {"lr_scaling": "linear", "pad_multiple": 4},
    "kept": STEP | {"too_long": "truncate", "max_seqlen": 50, "remainder": "keep"},
    "packed": STEP | {"layout": "packed", "too_long": "split", "max_seqlen": 30, "balance": "flops"},
    "company": STEP | {"min_samples": 5, "too_long": "drop"},
    "chosen": STEP | {"sample_ids": range(200), "too_long": "drop"},
    "real": STEP | {"count": "real", "max_seqlen": 90},
    "wrapped": STEP | {"layout": "packed", "packing": "wrapped"},
}


@cache
def planned(kind):
    return make_plan(SEQLENS, PlanConfig(**OPTIONS[kind]))


def option(**values):
    return lambda header: header["config"].update(values)


def stated(**values):
    return lambda header: header["epochs"][0].update(values)


def row(at=0, **values):
    return lambda rows: rows[at].update(values)


def drop(of, **values):
    """Change the first drop of a reason."""
    return lambda rows: next(r for r in rows if r["reason"] == of).update(values)


def without(reason):
    return lambda rows: rows.remove(next(r for r in rows if r["reason"] == reason))


def exchange(rows):
    """Plan a sample of the first row again, in place of one of the last."""
    rows[-1]["sample_ids"] = [rows[0]["sample_ids"][0], *rows[-1]["sample_ids"][1:]]


def swap_ranks(rows):
    rows[0]["sample_ids"], rows[0]["seqlens"] = rows[1]["sample_ids"], rows[1]["seqlens"]


def also_dropped(reason, epoch=None):
    """Say that a sample that is planned is dropped as well, for a reason that does not apply."""

    def edit(rows):
        lost = {"sample_id": 5, "seqlen": SEQLENS[5], "start": 0, "num_tokens": SEQLENS[5]}
        rows.append({"epoch": epoch, "reason": reason} | lost)

    return edit


FAULTS = {
    # every sample once
    "planned twice": ("padded", ROWS, exchange, "is planned twice"),
    "planned nowhere": ("padded", DROPS, without("remainder"), "is neither planned nor dropped"),
    "planned and dropped": ("padded", DROPS, also_dropped("remainder", 0), "planned and dropped"),
    "not in the source": ("padded", DROPS, drop("empty", sample_id=306), "is not in the source"),
    "rows of another": ("padded", ROWS, swap_ranks, r"\(row 0\): num_samples is|num_tokens is"),
    "pieces that overlap": (
        "packed",
        ROWS,
        lambda rows: rows[0].update(starts=[1] * len(rows[0]["starts"])),
        "epoch 0",
    ),
    "a piece that trains nothing": (
        "packed",
        ROWS,
        lambda rows: rows[0].update(
            starts=[*rows[0]["starts"][:-1], 9], seqlens=[*rows[0]["seqlens"][:-1], 1]
        ),
        "its piece at token 9 is a single token, which trains nothing",
    ),
    "cut inside a wrapped row": (
        "wrapped",
        ROWS,
        lambda rows: rows[0].update(starts=[*rows[0]["starts"][:-1], 7]),
        "it goes on at token 7, and is not the first of its row",
    ),
    "wrapped rows that are not full": ("wrapped", HEADER, option(max_tokens=250), "ends 10 tokens short"),
    "dropped before its place": (
        "kept",
        DROPS,
        drop("truncated", start=49),
        "planned and dropped: two of its pieces share tokens",
    ),
    "dropped beyond its end": ("kept", DROPS, drop("truncated", start=51), "is dropped beyond its end"),
    "trained before, by no plan": ("padded", DROPS, drop("remainder", reason="trained"), "takes a plan that"),
    # bounds
    "over max_tokens": ("padded", HEADER, option(max_tokens=200), "over max_tokens=200"),
    "over max_tokens, real": ("real", HEADER, option(max_tokens=200), "over max_tokens=200"),
    "over max_tokens, packed": ("packed", HEADER, option(max_tokens=200), "over max_tokens=200"),
    "under min_samples": ("packed", HEADER, option(min_samples=12), "under min_samples=12"),
    "over max_samples": ("padded", HEADER, option(max_samples=5), "over max_samples=5"),
    "over max_attention": (
        "padded",
        HEADER,
        option(max_attention=9000),
        "over max_attention=9000|max_seqlen is 57",
    ),
    "over max_seqlen": ("padded", HEADER, option(max_seqlen=40), "over max_seqlen=40|max_seqlen is 57"),
    "no multiple": ("padded", HEADER, option(pad_multiple=16), "is no multiple of 16"),
    "not the fixed shape": ("padded", HEADER, option(fixed_seqlen=60), "fixed_seqlen=60"),
    "too many shapes": ("padded", HEADER, option(num_shapes=2), "over num_shapes=2"),
    "other numbers in a step": (
        "padded",
        HEADER,
        option(same_num_samples=True),
        "same_num_samples does not hold",
    ),
    "other lengths in a step": ("padded", HEADER, option(same_seqlen=True), "same_seqlen does not hold"),
    "planned under filter_min": ("padded", HEADER, option(filter_min=10), "is under filter_min=10"),
    "planned over filter_max": ("padded", HEADER, option(filter_max=54), "is over filter_max=54"),
    # sums
    "cost": ("packed", ROWS, row(cost=1), r"\(row 0\): cost is 1"),
    "tokens of a step": ("padded", STEPS, row(num_tokens=1), "step 0: num_tokens is 1"),
    "samples before": ("padded", STEPS, row(1, samples_before=1), "step 1: samples_before is 1"),
    "rate": ("padded", STEPS, row(lr_scale=1.5), "step 0: lr_scale is 1.5"),
    "base of the rate": ("padded", HEADER, lambda header: header.update(lr_base=5.0), "lr_base is 5.0"),
    "a copy without remainder": ("padded", ROWS, row(is_repeat=True), "it is a repeat, with remainder=drop"),
    "a filler that trains": ("kept", ROWS, row(is_filler=True), "copies no cheapest|num_samples is"),
    "the mix of the steps": (
        "padded",
        HEADER,
        stated(design_effect={"seqlen": 0.5, "source": None}),
        "design_effect.seqlen is 0.5",
    ),
    "time lost": ("padded", HEADER, stated(rank_imbalance=0.9), "rank_imbalance is 0.9"),
    "time lost by step": (
        "padded",
        HEADER,
        stated(rank_imbalance_by_step=0.9),
        "rank_imbalance_by_step is 0.9",
    ),
    "the limit": (
        "padded",
        HEADER,
        lambda header: header.update(max_seqlen=56),
        "max_seqlen is 56 in plan.json",
    ),
    # reasons: without their option, where they do not apply, too many
    "filtered without a filter": (
        "kept",
        DROPS,
        also_dropped("filtered"),
        "as filtered, which takes filter_min",
    ),
    "filtered inside the filter": ("padded", DROPS, also_dropped("filtered"), "as filtered, which it is not"),
    "filtered, though chosen": ("chosen", DROPS, also_dropped("filtered"), "dropped twice"),
    "other samples chosen": (
        "chosen",
        HEADER,
        lambda h: h["config"]["sample_ids"].update(count=199),
        "199 of sample_ids",
    ),
    "empty with tokens": ("padded", DROPS, also_dropped("empty"), "as empty, which it is not"),
    "too long without the option": ("padded", HEADER, option(too_long="error"), "as too_long, which takes"),
    "too long that fits": ("padded", DROPS, also_dropped("too_long"), "as too_long, which it is not"),
    "too long in one epoch": ("padded", DROPS, drop("too_long", epoch=0), "as too_long in one epoch only"),
    "truncated without the option": ("kept", HEADER, option(too_long="drop"), "as truncated, which takes"),
    "truncated below the limit": (
        "kept",
        DROPS,
        drop("truncated", num_tokens=20),
        "as truncated, which it is not",
    ),
    "remainder under keep": (
        "padded",
        HEADER,
        option(remainder="keep"),
        "as remainder, which takes remainder=drop",
    ),
    "remainder of every epoch": (
        "padded",
        DROPS,
        drop("remainder", epoch=None),
        "as remainder in every epoch",
    ),
    "company that nobody asks for": (
        "company",
        HEADER,
        option(min_samples=1),
        "as min_samples, which takes|max_seqlen",
    ),
    "company that is there": (
        "company",
        DROPS,
        also_dropped("min_samples"),
        "as min_samples, which it is not",
    ),
    "counts of drops": (
        "padded",
        HEADER,
        lambda header: header["dropped"].pop("empty"),
        "dropped is .* in plan.json",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(tmp_path, name):
    kind, file, edit, message = FAULTS[name]
    planned(kind).save(tmp_path / "plan")
    plans.forge(tmp_path / "plan", file, edit)
    with pytest.raises(PlanError, match=message) as caught:
        verify_plan(tmp_path / "plan")
    assert "\n" not in str(caught.value)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        invariants.check(tmp_path / "plan")


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_plans_without_a_fault_are_right(tmp_path, kind):
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", SEQLENS)
    assert verify_plan(planned(kind), metrics=metrics).num_samples == len(SEQLENS)
    invariants.check(planned(kind).save(tmp_path / "plan").path, SEQLENS)


@pytest.mark.parametrize("remainder", ["drop", "keep"])
def test_a_remainder_of_most_samples_is_refused(tmp_path, remainder):
    lengths = [10] * 1000
    rows = [plans.Row(pieces=[(5 * at + i, 10) for i in range(5)]) for at in range(4)]
    lost = plans.drops(*((sample, 10, 10, "remainder") for sample in range(20, 1000)))
    facts = plans.facts(lengths, dp_size=2, remainder=remainder)
    plan = plan_in_memory(facts, [plans.epoch(rows, dp_size=2, dropped=lost)], dropped=plans.drops())
    with pytest.raises(
        PlanError,
        match=r"9800 tokens are dropped as remainder; at most 64|takes remainder=drop|980 samples are",
    ):
        verify_plan(plan)
    with pytest.raises(AssertionError):
        invariants.check(plan.save(tmp_path / "plan").path, lengths)


@pytest.mark.parametrize("lengths", [([2, 3], [1, 4]), ([2, 3, 5, 1], [4, 4, 1, 2])])
def test_pairs_whose_budgets_count_real_tokens_are_right(tmp_path, lengths):
    source, target = lengths
    config = PlanConfig(max_tokens={"seqlen": 5, "target": 4}, count="real", too_long="drop")
    plan = make_plan(source, config, metrics={"target": target})
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", source)
    plans.write_metric(metrics, "target", target)
    verify_plan(plan)
    verify_plan(plan, metrics=metrics)
    invariants.check(plan.save(tmp_path / "plan").path, source)
    plans.forge(tmp_path / "plan", HEADER, lambda h: h["config"]["max_tokens"].update(target=3))
    with pytest.raises(PlanError, match="of target, over max_tokens target=3"):
        verify_plan(tmp_path / "plan", metrics=metrics)
