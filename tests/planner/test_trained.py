"""``--except``: what a run trained before is left out once, to the token, and counted from there on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ConfigError, EmptyPlanError, PlanError, SourceChangedError
from packer.plan import load_plan, verify_plan
from packer.plan.trained import Trained
from packer.planner import PlanConfig, make_plan
from packer.planner.choose.pieces import Pieces
from packer.planner.choose.trained import Stretches, _joined, without_trained
from packer.report import summarize, summary_lines
from tests import invariants, plans

LENGTHS = np.minimum(np.random.default_rng(3).lognormal(3, 1.2, 300).astype(int) + 1, 300)
OLD = {
    "whole": {"max_tokens": 320, "dp_size": 2},
    "wrapped": {"max_tokens": 64, "layout": "packed", "packing": "wrapped", "dp_size": 2},
    "split": {"max_tokens": 64, "layout": "packed", "too_long": "split", "grad_accum": 2},
    "truncated": {"max_tokens": 64, "layout": "packed", "too_long": "truncate"},
    "filled": {
        "max_tokens": 100,
        "layout": "packed",
        "packing": "wrapped",
        "dp_size": 3,
        "remainder": "fill",
    },
}
NEW = {
    "whole": {"max_tokens": 400},
    "wrapped": {"max_tokens": 90, "layout": "packed", "packing": "wrapped"},
    "split": {"max_tokens": 48, "too_long": "split", "epochs": 2, "remainder": "keep", "dp_size": 2},
    "truncated": {"max_tokens": 50, "layout": "packed", "too_long": "truncate"},
    "dropped": {"max_tokens": 100, "too_long": "drop", "min_samples": 2, "order": "sequential"},
}


def tokens_of(plan, epoch=0, stop=None):
    """Return every token that an epoch trains before a step, as (sample, place), one entry each time."""
    opened = plan.epoch(epoch)
    rows = (opened.microbatch(row) for row in range(opened.num_microbatches))
    return [
        (int(sample), int(start) + at)
        for row in rows
        if not row.is_filler and (stop is None or row.step < stop)
        for sample, start, length in zip(
            row.sample_ids,
            np.zeros(row.num_samples, int) if row.starts is None else row.starts,
            row.seqlens,
            strict=True,
        )
        for at in range(length)
    ]


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("old", OLD)
def test_the_first_epoch_trains_what_was_not_trained(tmp_path, old, new):
    before = make_plan(LENGTHS, PlanConfig(**OLD[old]))
    step = before.epoch(0).num_steps // 2
    plan = make_plan(
        LENGTHS,
        PlanConfig(**NEW[new]),
        trained=[Trained(plan=before, epoch=0, step=step)],
        out=tmp_path / "plan",
    )
    invariants.check(tmp_path / "plan", LENGTHS)
    verify_plan(plan)
    seen = set(tokens_of(before, stop=step))
    found = tokens_of(plan)
    assert seen
    assert found
    assert not seen & set(found)
    assert plan.header["epochs"][0]["dropped"]["trained"]["num_tokens"] > 0
    if new in ("wrapped", "split"):  # nothing else is left out but single tokens between what was trained
        left_out = LENGTHS.sum() - len(found)
        assert len(seen) <= left_out <= len(seen) + 3


def test_later_epochs_pass_through_all_again():
    before = make_plan(LENGTHS, PlanConfig(**OLD["wrapped"]))
    config = PlanConfig(**NEW["wrapped"], epochs=2)
    plan = make_plan(LENGTHS, config, trained=[Trained(plan=before, epoch=0, step=20)])
    assert len(tokens_of(plan, 1)) == LENGTHS.sum() > len(tokens_of(plan, 0))
    assert plan.epoch(1).microbatch(0).starts is not None  # as in the first epoch


def test_whole_samples_stay_whole():
    place = Trained(plan=make_plan(LENGTHS, PlanConfig(**OLD["whole"])), epoch=0, step=10)
    plan = make_plan(LENGTHS, PlanConfig(max_tokens=400), trained=[place], loss_tokens=LENGTHS // 2)
    assert plan.header["loss_tokens"] == "labels"
    assert plan.epoch(0).microbatch(0).starts is None
    assert "start" not in plan.columns("dropped.arrow").names


def test_a_truncated_sample_keeps_its_rest_where_the_new_plan_takes_it():
    before = make_plan([100, 10], PlanConfig(max_tokens=40, too_long="truncate"))
    split = {"max_tokens": 40, "layout": "packed", "too_long": "split"}
    rest = make_plan([100, 10], PlanConfig(**split), trained=[before])
    assert sorted(tokens_of(rest)) == [(0, at) for at in range(40, 100)]
    with pytest.raises(EmptyPlanError, match="--except leaves out all that the options choose"):
        make_plan([100, 10], PlanConfig(max_tokens=40, too_long="truncate"), trained=[before])


def test_samples_and_tokens_go_on_from_there(tmp_path):
    config = PlanConfig(max_tokens=320, dp_size=2, epochs=2)
    before = make_plan(LENGTHS, config, out=tmp_path / "old")
    plan = make_plan(LENGTHS, PlanConfig(max_tokens=400), trained=[f"{tmp_path / 'old'}@1:5"])
    there = before.epoch(1).step(5)
    assert plan.epoch(0).step(0)[-2:] == (there.samples_before, there.tokens_before)
    (account,) = plan.header["trained"]
    assert account == {
        "plan": before.fingerprint,
        "epoch": 1,
        "step": 5,
        "num_steps": before.epoch(0).num_steps + 5,
        "num_samples": there.samples_before,
        "num_tokens": there.tokens_before,
    }
    line = next(text for text in summary_lines(summarize(plan)) if "goes on from" in text)
    assert f"epoch 1, step 5 of plan {before.fingerprint[:12]}" in line


def test_a_run_of_several_plans_names_the_last_one(tmp_path):
    first = make_plan(LENGTHS, PlanConfig(**OLD["wrapped"]))
    second = make_plan(LENGTHS, PlanConfig(**NEW["wrapped"]), trained=[Trained(plan=first, epoch=0, step=20)])
    place = Trained(plan=second, epoch=0, step=10)
    third = make_plan(LENGTHS, PlanConfig(**NEW["wrapped"], seed=1), trained=[place])
    seen = set(tokens_of(first, stop=20)) | set(tokens_of(second, stop=10))
    assert not seen & set(tokens_of(third))
    assert third.epoch(0).step(0).tokens_before == len(seen)
    again = make_plan(
        LENGTHS,
        PlanConfig(**NEW["wrapped"], seed=1),
        trained=[Trained(plan=first, epoch=0, step=20), place],
    )
    assert again.fingerprint == third.fingerprint
    assert again.header["trained"] == third.header["trained"]
    verify_plan(third)


def test_sources_are_matched_by_their_fingerprints(tmp_path):
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", LENGTHS.tolist())
    other = plans.write_metric(tmp_path / "other", "seqlen", (LENGTHS + 1).tolist())
    make_plan(metrics, PlanConfig(max_tokens=400), out=tmp_path / "old")
    plan = make_plan(metrics, PlanConfig(max_tokens=500), trained=[f"{tmp_path / 'old'}@0:3"])
    assert plan.header["epochs"][0]["dropped"]["trained"]["num_tokens"] == plan.epoch(0).step(0).tokens_before
    with pytest.raises(SourceChangedError, match="give the metrics that it was made from among the sources"):
        make_plan(other, PlanConfig(max_tokens=500), trained=[tmp_path / "old"])


def test_places_that_a_plan_does_not_have_are_refused(tmp_path):
    make_plan([5, 6, 7], PlanConfig(max_tokens=9), out=tmp_path / "a@1:2")
    assert Trained.at(f"{tmp_path / 'a@1:2'}@0:1").step == 1
    with pytest.raises(PlanError, match="epoch 1 is not planned"):
        Trained.at(f"{tmp_path / 'a@1:2'}@1:0")
    with pytest.raises(PlanError, match="has 3 steps, and no step 4; give the step at which"):
        Trained.at(f"{tmp_path / 'a@1:2'}@0:4")
    with pytest.raises(ConfigError, match="give both, as PLAN@EPOCH:STEP"):
        Trained(plan=load_plan(tmp_path / "a@1:2"), step=1)


def test_a_curriculum_is_refused_beside_it():
    schedule = {
        "curriculum_type": "seqlen",
        "min_difficulty": 10,
        "max_difficulty": 50,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 10},
    }
    before = make_plan(LENGTHS, PlanConfig(max_tokens=320))
    with pytest.raises(ConfigError, match="leave --curriculum out"):
        make_plan(LENGTHS, PlanConfig(max_tokens=320, curriculum=schedule), trained=[before])


def test_of_pairs_a_sample_is_left_out_whole():
    source, target = [9, 5, 7, 8], [4, 6, 9, 3]
    config = PlanConfig(max_tokens={"source": 10, "target": 10})
    metrics = {"source": source, "target": target}
    before = make_plan(source, config, metrics=metrics)
    plan = make_plan(source, config, metrics=metrics, trained=[Trained(plan=before, epoch=0, step=2)])
    first, then = (
        {sample for sample, _ in tokens_of(made, stop=stop)} for made, stop in ((before, 2), (plan, None))
    )
    assert len(first) == 2
    assert first | then == {0, 1, 2, 3}
    assert not first & then
    verify_plan(plan)


@st.composite
def cuts(draw):
    """Lengths, pieces that tile them, and stretches that were trained."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    pieces = []
    for sample, length in enumerate(lengths):
        edges = sorted({0, length, *draw(st.lists(st.integers(1, max(1, length - 1)), max_size=2))})
        edges = [edge for edge in edges if edge <= length]
        kept = draw(st.lists(st.booleans(), min_size=len(edges), max_size=len(edges)))
        pieces += [(sample, a, b) for a, b, keep in zip(edges, edges[1:], kept, strict=False) if keep]
    stretch = st.integers(0, len(lengths) - 1).flatmap(
        lambda sample: st.tuples(st.just(sample), st.integers(0, lengths[sample] - 1), st.integers(1, 12))
    )
    found = draw(st.lists(stretch, min_size=1, max_size=8))
    return lengths, pieces, [(i, a, min(a + n, lengths[i])) for i, a, n in found]


@settings(max_examples=200)
@given(cuts())
def test_stretches_are_taken_out_token_by_token(problem):
    lengths, pieces, trained = problem
    stretches = _joined(np.array(trained).T)
    seen = {(sample, at) for sample, first, stop in trained for at in range(first, stop)}
    assert {
        (i, at) for i, a, b in zip(*(part.tolist() for part in stretches), strict=True) for at in range(a, b)
    } == seen
    expected, lost = [], set()
    for sample, first, stop in pieces:
        run = []
        for at in range(first, stop + 1):
            if at < stop and (sample, at) not in seen:
                run.append(at)
                continue
            if len(run) > 1 or (run and len(run) == stop - first):
                expected.append((sample, run[0], run[-1] + 1))
            else:
                lost |= {(sample, token) for token in run}
            run = []
        lost |= {(sample, at) for at in range(first, stop)} & seen
    array = np.array(pieces, np.int32).reshape(-1, 3)
    seqlens = array[:, 2] - array[:, 1]
    given_pieces = Pieces(
        lengths=seqlens[np.newaxis],
        seqlens=seqlens,
        ids=array[:, 0],
        starts=array[:, 1],
        source=np.array(lengths),
    )
    if not expected:
        with pytest.raises(EmptyPlanError):
            without_trained(given_pieces, Stretches(*stretches))
        return
    left, dropped = without_trained(given_pieces, stretches)
    rests = zip(left.ids.tolist(), left.starts.tolist(), left.seqlens.tolist(), strict=True)
    assert [(sample, start, start + length) for sample, start, length in rests] == expected
    columns = (dropped.sample_ids.tolist(), dropped.starts.tolist(), dropped.num_tokens.tolist())
    assert {(i, a + n) for i, a, size in zip(*columns, strict=True) for n in range(size)} == lost
