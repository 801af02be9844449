"""All options together, on all sorts of lengths, against a checker that shares no code with the planner."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ConfigError, EmptyPlanError, PlanError, SampleTooLongError
from packer.metrics import Blocks
from packer.plan import verify_plan
from packer.plan.trained import Trained
from packer.plan.verify_blocks import check_blocks
from packer.plan.verify_keys import check_keys
from packer.planner import PlanConfig, make_plan
from tests import invariants, plans

MOST = 60


@st.composite
def lengths(draw):
    """Lengths at random, all equal, of 1, sorted, with a giant, with empty ones."""
    size = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 40, 90]))
    kind = draw(st.sampled_from(["any", "equal", "ones", "sorted", "giant", "empty", "distinct"]))
    if kind == "equal":
        return [draw(st.integers(1, MOST))] * size
    if kind == "ones":
        return [1] * size
    if kind == "giant":
        return [draw(st.integers(1, 5)) for _ in range(size - 1)] + [draw(st.integers(MOST, 20 * MOST))]
    if kind == "distinct":
        return draw(st.permutations(range(1, size + 1)))
    least = 0 if kind == "empty" else 1
    drawn = draw(st.lists(st.integers(least, MOST), min_size=size, max_size=size))
    return sorted(drawn) if kind == "sorted" else drawn


def maybe(values, *, odds=4):
    """Draw one of ``values`` once in ``odds`` times, else leave the option out."""
    return st.one_of(*[st.none()] * (odds - 1), st.sampled_from(values))


def sometimes(*values):
    return st.sampled_from([None, None, None, *values])


_CURRICULA = [
    {
        "schedule_type": "fixed_linear",
        "min_difficulty": 4,
        "max_difficulty": MOST,
        "total_curriculum_step": 6,
        "difficulty_step": 4,
    },
    {
        "curriculum_metrics": {
            "seqlen": {
                "difficulty_type": "percentile",
                "schedule_type": "fixed_root",
                "min_difficulty": 10,
                "max_difficulty": 100,
                "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 5, "root_degree": 2},
            },
            "rarity": {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [2, 5], "max_step": [2]},
            },
        }
    },
]

options = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([MOST, MOST, 2 * MOST, 3 * MOST + 1, 10 * MOST, MOST // 2, 1]),
        "layout": st.sampled_from(["padded", "packed"]),
        "count": st.sampled_from([None, None, "real"]),
        "order": st.sampled_from([None, None, None, "sequential", "seqlen"]),
        "seed": st.integers(0, 3),
        "epochs": st.sampled_from([None, None, 2, 3]),
        "packing": st.sampled_from([None, None, "windowed", "mixed", "next-fit", "best-fit", "wrapped"]),
        "window": sometimes(1, 2, 5),
        "shuffle_blocks": sometimes(1, 2, 40),
        "no_repeat_key": sometimes("key"),
        "dp_size": st.sampled_from([None, 1, 2, 3]),
        "grad_accum": sometimes(2, 3),
        "accum_multiple": maybe([2], odds=8),
        "same_num_samples": sometimes(True),
        "same_seqlen": sometimes(True),
        "min_samples": sometimes(2, 3),
        "max_samples": sometimes(1, 3, 8),
        "sp_size": sometimes(2, 3),
        "pad_multiple": sometimes(4, 6),
        "pad_segments_to": maybe([4], odds=8),
        "fixed_seqlen": maybe([MOST, MOST + 12], odds=8),
        "num_shapes": sometimes(1, 2, 4),
        "max_attention": maybe([MOST**2, 3 * MOST**2 + 1, 50 * MOST**2], odds=6),
        "max_seqlen": maybe([3, MOST // 2, MOST], odds=5),
        "too_long": st.sampled_from(["error", "drop", "truncate", "split"]),
        "filter_min": maybe([2, 5], odds=8),
        "filter_max": maybe([MOST // 2], odds=8),
        "sample_ids": maybe([[0], [0, 1, 2, 5, 9]], odds=6),
        "remainder": st.sampled_from(["drop", "keep", "fill"]),
        "balance": st.sampled_from([None, "tokens", "flops"]),
        "hidden_size": sometimes(8),
        "balance_steps": sometimes(1, 3),
        "lr_scaling": st.sampled_from([None, "linear", "sqrt"]),
        "lr_by": st.sampled_from([None, "tokens", "loss-tokens"]),
        "lr_base": maybe([3.5, 100], odds=6),
        "lr_max_scale": maybe([1.2], odds=6),
        "curriculum": maybe(_CURRICULA, odds=6),
        "step_tokens": maybe([20, 200], odds=4),
        "drop_untrainable": sometimes(True),
    }
).map(lambda drawn: {name: value for name, value in _meaningful(drawn).items() if value is not None})


_NOT_WRAPPED = [
    "min_samples", "max_samples", "max_attention", "curriculum", "shuffle_blocks", "no_repeat_key"
]  # fmt: skip


def _meaningful(drawn):
    """Leave out what an option refuses beside it: else few plans would be made with it."""
    if drawn["step_tokens"] is not None:
        drawn = drawn | {"grad_accum": None}
    if drawn["shuffle_blocks"] is not None:
        drawn = drawn | {"order": None, "curriculum": None}
    if drawn["packing"] == "wrapped":
        drawn = drawn | dict.fromkeys(_NOT_WRAPPED)
    if drawn["packing"] in ("mixed", "best-fit", "wrapped"):
        return drawn | {"layout": "packed", "order": None, "same_num_samples": None}
    return drawn


def without_what_is_refused(drawn):
    """Try the options; leave out, one after the other, those that the first refusals name."""
    drawn = dict(drawn)
    while True:
        try:
            return PlanConfig(**drawn)
        except ConfigError as error:
            named = [name for name in drawn if f"--{name.replace('_', '-')}" in str(error)]
            removable = [name for name in named if name not in ("max_tokens", "layout")]
            if not removable:
                return PlanConfig(**drawn | {"max_tokens": 10 * MOST})
            del drawn[removable[0]]


def check_apart(epoch, key):
    for table in epoch.microbatches():
        for ids in np.split(table.sample_ids, table.offsets[1:-1]):
            keys = [code for code in key[ids].tolist() if code >= 0]
            assert len(keys) == len(set(keys))


planned = set()


def goes_on_from(made, part, seqlens, config, loss_tokens, metrics, blocks, path):
    """Plan what is left once a half, or a whole, of the last epoch was trained."""
    last = made.num_epochs - 1
    place = Trained(plan=made, epoch=last, step=made.epoch(last).num_steps * part // 2)
    try:
        rest = make_plan(
            seqlens,
            config,
            loss_tokens=loss_tokens,
            metrics=metrics,
            blocks=blocks,
            trained=[place],
            out=path,
        )
    except (EmptyPlanError, ConfigError):
        return
    invariants.check(path, seqlens, loss_tokens)
    verify_plan(rest)
    for epoch in range(rest.num_epochs):
        check_blocks(rest, epoch, blocks)
        if config.no_repeat_key is not None:
            check_apart(rest.epoch(epoch), metrics["key"])
    planned.add("trained")


@settings(max_examples=300)
@given(lengths(), options, st.booleans(), st.sampled_from([None, None, 1, 2]))
def test_every_invariant_holds(seqlens, drawn, has_labels, left_at):
    config = without_what_is_refused(drawn)
    seqlens = np.array(seqlens)
    loss_tokens = np.maximum(seqlens // 2, 0) if has_labels else None
    # a key that every fourth sample lacks, one that is often there, and others
    key = np.where(np.arange(len(seqlens)) % 4 == 3, -1, np.arange(len(seqlens)) * 5 % 7 % 5)
    metrics = {"rarity": seqlens * 7 % 9, "key": key}
    blocks = Blocks(np.arange(0, len(seqlens), 5), np.arange(0, len(seqlens), 5), len(seqlens))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan")
        try:
            made = make_plan(
                seqlens, config, loss_tokens=loss_tokens, metrics=metrics, blocks=blocks, out=path
            )
        except (EmptyPlanError, SampleTooLongError, ConfigError, PlanError):
            assert not list(Path(folder).glob("plan"))
            return
        invariants.check(path, seqlens, loss_tokens)
        assert verify_plan(path).num_samples == len(seqlens)
        for epoch in range(made.num_epochs):
            check_blocks(made, epoch, blocks)
            if config.no_repeat_key is not None:
                check_keys(made, epoch, key)
                check_apart(made.epoch(epoch), key)
        if config.curriculum is not None:
            directory = plans.write_metric(Path(folder, "metrics"), "seqlen", seqlens.tolist())
            for name, values in metrics.items():
                plans.write_metric(directory, name, values.tolist())
            if loss_tokens is not None:
                plans.write_metric(directory, "loss_tokens", loss_tokens.tolist())
            assert verify_plan(path, metrics=directory).with_curriculum
        assert (
            make_plan(seqlens, config, loss_tokens=loss_tokens, metrics=metrics, blocks=blocks).fingerprint
            == made.fingerprint
        )
        if left_at is not None and config.curriculum is None:
            goes_on_from(made, left_at, seqlens, config, loss_tokens, metrics, blocks, Path(folder, "rest"))
    planned.update(drawn)
    planned.add(config.packing)


def test_every_option_was_planned_with():
    assert planned >= {
        "windowed",
        "next-fit",
        "best-fit",
        "mixed",
        "wrapped",
        "trained",
        "step_tokens",
        "drop_untrainable",
        "curriculum",
        "num_shapes",
        "max_attention",
        "sample_ids",
        "shuffle_blocks",
        "no_repeat_key",
    }
