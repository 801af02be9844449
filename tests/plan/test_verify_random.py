"""Verification passes what the planner makes, whatever the options: one length or pairs, with the metrics."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ConfigError, EmptyPlanError, PlanError, SampleTooLongError
from packer.plan import verify_plan
from packer.planner import PlanConfig, make_plan
from packer.report import summarize
from tests import invariants, plans

MOST = 40


def maybe(*values):
    return st.sampled_from([None, None, None, *values])


common = {
    "count": st.sampled_from(["padded", "real"]),
    "order": st.sampled_from(["random", "random", "sequential", "seqlen"]),
    "seed": st.integers(0, 9),
    "epochs": st.integers(1, 2),
    "dp_size": st.integers(1, 3),
    "grad_accum": st.integers(1, 3),
    "same_num_samples": st.sampled_from([False, False, True]),
    "same_seqlen": st.sampled_from([False, False, True]),
    "min_samples": st.sampled_from([1, 1, 2, 3]),
    "max_samples": maybe(3, 5),
    "pad_multiple": st.sampled_from([1, 1, 4]),
    "filter_min": maybe(2),
    "filter_max": maybe(MOST - 10),
    "sample_ids": maybe(range(0, 20, 2)),
    "remainder": st.sampled_from(["drop", "keep", "fill"]),
}
of_one_length = {
    "max_tokens": st.sampled_from([MOST, 2 * MOST, 5 * MOST]),
    "pad_segments_to": st.sampled_from([1, 1, 4]),
    "fixed_seqlen": maybe(MOST),
    "max_attention": maybe(MOST**2),
    "max_seqlen": maybe(7, MOST // 2),
    "too_long": st.sampled_from(["drop", "drop", "truncate", "split"]),
    "balance": st.sampled_from(["none", "tokens", "flops"]),
}
of_pairs = {
    "max_tokens": st.fixed_dictionaries(
        {"seqlen": st.sampled_from([30, 80]), "target": st.sampled_from([25, 90])}
    ),
    "too_long": st.just("drop"),
}


KINDS = ["padded windowed", "padded next-fit", "pairs windowed", "pairs next-fit"] + [
    f"packed {packing}" for packing in ("windowed", "next-fit", "mixed", "best-fit")
]


def config_of(kind, drawn):
    """Return the options without what the layout or the packing refuses."""
    layout, packing = kind.split()
    drawn = drawn | {"packing": packing, "layout": "padded" if layout == "pairs" else layout}
    if layout == "packed":
        drawn["same_num_samples"] = False
    else:
        drawn.pop("pad_segments_to", None)
    if packing != "next-fit":
        drawn["order"] = "random"
    return PlanConfig(**drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_planner_makes_is_right(kind):
    made = []

    @settings(max_examples=40)
    @given(
        st.lists(st.integers(0, MOST), min_size=20, max_size=60),
        st.fixed_dictionaries(common | (of_pairs if kind.startswith("pairs") else of_one_length)),
    )
    def check(seqlens, drawn):
        made.append(is_right(seqlens, kind, drawn))

    check()
    assert any(made), "nothing was planned"


def is_right(seqlens, kind, drawn):
    """Check a plan of these samples in every way; False where there is none."""
    target = [n * 7 % MOST for n in seqlens]
    try:
        config = config_of(kind, drawn)
        plan = make_plan(seqlens, config, metrics={"target": target})
    except (ConfigError, EmptyPlanError, PlanError, SampleTooLongError):
        return False
    with tempfile.TemporaryDirectory() as folder:
        metrics = plans.write_metric(Path(folder, "metrics"), "seqlen", seqlens)
        plans.write_metric(metrics, "target", target)
        verify_plan(plan)
        verify_plan(plan, metrics=metrics)
        invariants.check(plan.save(Path(folder, "plan")).path, np.array(seqlens))
    summary = summarize(plan)
    assert summary.over_bound is None or summary.over_bound >= 0
    cut = config.too_long == "split"
    dropped = sum(n["num_samples"] for reason, n in summary.dropped.items() if reason != "truncated")
    assert cut or summary.planned_samples + dropped == len(seqlens) * config.epochs
    return True
