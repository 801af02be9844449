"""Verification of plans that mix sources: what is right is accepted, and each planted fault named."""

import numpy as np
import pytest

from packer.errors import ConfigError, PlanError, SourceChangedError
from packer.metrics import open_metrics
from packer.plan import plan_in_memory, verify_plan
from packer.plan.sources import PlanSource, source_of
from tests import invariants, plans

HEADER = "plan.json"
ROWS = "epoch-00000/microbatches.arrow"
STEPS = "epoch-00000/steps.arrow"
DROPS = "dropped.arrow"

SEQLENS = [length for seqlens in plans.MIXED.values() for length in seqlens]


def put(at, **values):
    return lambda rows: rows[at].update(values)


def option(**values):
    return lambda header: header["config"].update(values)


def source(at, **values):
    return lambda header: header["sources"][at].update(values)


def without(at):
    return lambda rows: rows.pop(at)


def also(**values):
    return lambda rows: rows.append(rows[-1] | values)


FAULTS = {
    "once too often": (ROWS, put(2, sample_ids=[9]), r"sample 9 \(row 2 of code\).* once more"),
    "once too rarely": (
        DROPS,
        without(1),
        r"sample 8 \(row 1 of code\) is planned or dropped 1 time, .* 2 ti",
    ),
    "nowhere": (DROPS, without(0), r"sample 6 \(row 6 of web\) is neither planned nor dropped"),
    "dropped too often": (DROPS, also(sample_id=7, seqlen=6, num_tokens=6), r"sample 7 .*more often than"),
    "of a source that is not passed through": (
        DROPS,
        also(sample_id=10, seqlen=4, num_tokens=4),
        r"sample 10 \(row 0 of old\) is planned and dropped more often",
    ),
    "cut short in two passes": (
        DROPS,
        also(sample_id=8, seqlen=1, num_tokens=1),
        r"sample 8 \(row 1 of code\) is",
    ),
    "unreached in every epoch": (
        DROPS,
        put(0, epoch=None),
        r"sample 6 .* dropped as unreached in every epoch",
    ),
    "unreached without a total": (
        HEADER,
        option(mix=None, total_steps=None),
        r"dropped as unreached, which takes mix, repeat",
    ),
    "other passes": (
        HEADER,
        source(0, passes=0.7),
        r"web is passed through 0.7 times .* leaves 2 .* leave 1",
    ),
    "fewer passes than are begun": (
        HEADER,
        source(1, passes=0.6),
        r"code is .* 0.6 times .* 2 passes are begun",
    ),
    "other passes than asked": (
        HEADER,
        option(repeat={"code": 1.0}, mix=None, total_steps=None),
        r"code is .* 1.66667 times .*, repeat=1$",
    ),
    "too many passes": (HEADER, option(max_passes=1.3), r"code is .* 1.66667 times .* over max_passes=1.3"),
    "too many passes of one": (HEADER, option(max_passes={"code": 1}), r"1.66667 times .* over max_passes=1"),
    "other tokens of a source": (
        HEADER,
        lambda h: h["epochs"][0]["sources"][0].update(num_tokens=28),
        r"epoch 0: sources is .*28.* in plan.json, the rows give",
    ),
    "a source's counts left out": (
        HEADER,
        lambda h: h["epochs"][0]["sources"].pop(),
        "sources has 2 entries",
    ),
    "another total": (HEADER, option(total_steps=5), r"epoch 0: it has 4 steps, total_steps=5"),
    "a total long reached": (HEADER, option(total_tokens=45, total_steps=None), r"reaches total_tokens=45"),
    "a total never reached": (HEADER, option(total_tokens=99, total_steps=None), r"reaches total_tokens=99"),
    "phases out of order": (
        HEADER,
        lambda h: h["phases"][0].update(first_step=1),
        r"phases begin at steps \[1\]",
    ),
    "a phase of a source that is not there": (
        HEADER,
        lambda h: h["phases"][0].update(shares={"pages": 1.0}),
        r"phases\[0\].shares names other sources",
    ),
    "ids that overlap": (
        HEADER,
        source(1, first_id=6),
        r"sources\[1\].first_id is 6, 7 samples are before it",
    ),
    "two of one name": (HEADER, source(1, name="web"), "3 sources have the names"),
    "another design effect": (
        HEADER,
        lambda h: h["epochs"][0]["design_effect"].update(source=0.5),
        r"design_effect.source is 0.5 in plan.json",
    ),
    "no design effect": (
        HEADER,
        lambda h: h["epochs"][0]["design_effect"].update(source=None),
        r"design_effect.source is null in plan.json",
    ),
}


def test_a_good_plan_is_accepted_and_by_the_independent_check_too(tmp_path):
    plans.mixed_plan().save(tmp_path / "plan")
    assert verify_plan(tmp_path / "plan").num_samples == 12
    invariants.check(tmp_path / "plan", SEQLENS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(tmp_path, fault):
    name, edit, message = FAULTS[fault]
    plans.mixed_plan().save(tmp_path / "plan")
    plans.forge(tmp_path / "plan", name, edit)
    with pytest.raises(PlanError, match=message) as caught:
        verify_plan(tmp_path / "plan")
    assert "\n" not in str(caught.value)
    with pytest.raises((AssertionError, KeyError, ValueError, TypeError)):
        invariants.check(tmp_path / "plan", SEQLENS)


def repeating(rows, num_samples, num_passes):
    """Return a plan of one named source of samples of two tokens, in steps of two micro-batches."""
    facts = plans.PlanFacts(
        config=plans.config(
            max_tokens=20, dp_size=2, order="random", packing="windowed", repeat={"a": float(num_passes)}
        ),
        sources=[
            PlanSource(
                name="a",
                num_samples=num_samples,
                num_tokens=2 * num_samples,
                passes=float(num_passes),
                num_passes=num_passes,
            )
        ],
        lr_base=1.0,
        loss_tokens="seqlen - 1",
    )
    pieces = [plans.Row(pieces=[(i, 2) for i in row]) for row in rows]
    return plan_in_memory(facts, [plans.epoch(pieces, dp_size=2)], dropped=plans.drops())


@pytest.mark.parametrize("pieces_per_batch", [1 << 18, 1])
def test_a_sample_twice_in_a_step_is_refused_unless_its_source_is_smaller(
    tmp_path, pieces_per_batch, monkeypatch
):
    monkeypatch.setattr("packer.plan.schema.PIECES_PER_BATCH", pieces_per_batch)
    apart = repeating([[0, 1], [2], [3], [0, 1], [3], [2]], 4, 2)
    verify_plan(apart)
    smaller = repeating([[0, 1], [0, 1]], 2, 2)
    verify_plan(smaller)
    smaller.save(tmp_path / "smaller")
    invariants.check(tmp_path / "smaller", [2, 2])
    wrong = repeating([[0, 1], [2], [3], [0, 2], [3], [1]], 4, 2)
    verify_plan(wrong)
    wrong = repeating([[0, 1], [0], [3], [2, 2], [3], [1]], 4, 2)
    with pytest.raises(
        PlanError,
        match=r"step 0, sample 0 \(row 0 of a\): .* in it twice, which holds 3 samples, .* has 4",
    ):
        verify_plan(wrong)
    wrong.save(tmp_path / "plan")
    with pytest.raises(AssertionError):
        invariants.check(tmp_path / "plan", [2] * 4)


def test_more_passes_than_a_byte_counts():
    rows = [[i % 2, (i + 1) % 2] for i in range(600)]
    verify_plan(repeating(rows, 2, 600))
    rows[-1] = [0, 0]
    with pytest.raises(PlanError, match=r"sample 0 .*once more, its source is passed through 600 times"):
        verify_plan(repeating(rows, 2, 600))
    # 256 times too often and 256 times too rarely: the same counts in a byte
    rows = [[0]] * 257 + [[1]] * 257
    with pytest.raises(PlanError, match=r"once more, its source is passed through 1 time|is planned twice"):
        verify_plan(repeating([*rows], 2, 1))


@pytest.mark.parametrize("by", ["tokens", "samples"])
def test_each_phase_has_its_shares(tmp_path, by):
    """Steps of two micro-batches: 20 of one sample each of a and b, then 20 of two of a and one of b."""
    length = {"a": 4, "b": 4 if by == "samples" else 12}
    num = {"a": 60, "b": 40}
    sources = [
        PlanSource(name=name, first_id=first, num_samples=num[name], num_tokens=num[name] * length[name])
        for name, first in (("a", 0), ("b", 60))
    ]
    pieces = [[[(i, length["a"])], [(60 + i, length["b"])]] for i in range(20)]
    pieces += [
        [[(20 + 2 * i, length["a"]), (21 + 2 * i, length["a"])], [(80 + i, length["b"])]] for i in range(20)
    ]
    shares = [{"a": 0.25, "b": 0.75}, {"a": 0.4, "b": 0.6}]
    if by == "samples":
        shares = [{"a": 0.5, "b": 0.5}, {"a": 2 / 3, "b": 1 / 3}]
    phases = [{"first_step": 20 * at, "shares": each} for at, each in enumerate(shares)]
    rows = [plans.Row(pieces=row) for step in pieces for row in step]
    planned = plans.epoch(rows, dp_size=2)
    of_source = [[(n, int(i >= 60)) for row in step for i, n in row] for step in pieces]
    lengths = [[n for n, _ in step] for step in of_source]
    planned.design_effect.update(
        seqlen=invariants.design_effect(lengths, [0, 20]),
        source=invariants.design_effect_of(of_source, [0, 20]),
    )
    mix = [{"start": 0.5 * at, "shares": each} for at, each in enumerate(shares)]
    facts = plans.PlanFacts(
        config=plans.config(max_tokens=20, dp_size=2, order="random", packing="windowed")
        | {"mix": mix, "mix_by": by, "total_steps": 40},
        sources=sources,
        phases=phases,
        lr_base=1.0,
        loss_tokens="seqlen - 1",
    )
    plan = plan_in_memory(facts, [planned], dropped=plans.drops())
    assert verify_plan(plan).with_shares
    plan.save(tmp_path / "good")
    invariants.check(tmp_path / "good")
    plans.forge(tmp_path / "good", HEADER, lambda h: h["phases"][1].update(shares=shares[0]))
    with pytest.raises(PlanError, match=rf"epoch 0, from step 20 on: a has .* {by}, its share is 0"):
        verify_plan(tmp_path / "good")
    with pytest.raises(AssertionError):
        invariants.check(tmp_path / "good")


def test_pieces_tile_a_sample_in_every_pass(tmp_path):
    def cut(rows, lost=()):
        facts = plans.PlanFacts(
            config=plans.config(
                layout="packed", max_tokens=6, max_seqlen=6, too_long="split", order="random", packing="mixed"
            )
            | {"repeat": {"a": 2.0}},
            sources=[PlanSource(name="a", num_samples=2, num_tokens=12, passes=2.0, num_passes=2)],
            max_seqlen=6,
            lr_base=1.0,
            loss_tokens="seqlen - 1",
        )
        pieces = [plans.Row(pieces=row) for row in rows]
        planned = plans.epoch(pieces, layout="packed", cut=True, dropped=plans.drops(*lost))
        return plan_in_memory(facts, [planned], dropped=plans.drops())

    first = [[(0, 6, 0)], [(0, 4, 6), (1, 2, 0)]]
    good = cut([*first, [(0, 5, 0)], [(0, 5, 5)], [(1, 2, 0)]])
    verify_plan(good)
    good.save(tmp_path / "plan")
    invariants.check(tmp_path / "plan", [10, 2])
    verify_plan(cut([*first, [(0, 6, 0)], [(1, 2, 0)]], [(0, 10, 4, "unreached")]))
    with pytest.raises(PlanError, match=r"sample 0 \(row 0 of a\) has tokens in more pieces than its source"):
        verify_plan(cut([*first, [(0, 5, 0)], [(0, 5, 4)], [(1, 2, 0)]]))
    with pytest.raises(PlanError, match=r"leave a gap|more or fewer tokens"):
        verify_plan(cut([*first, [(0, 6, 0)], [(1, 2, 0)]]))


class TestMetrics:
    """A plan of three sources, held against their metrics."""

    @pytest.fixture
    def metrics(self, tmp_path):
        return {
            name: plans.write_metric(tmp_path / name, "seqlen", seqlens)
            for name, seqlens in plans.MIXED.items()
        }

    def test_those_of_each_source(self, metrics):
        assert verify_plan(plans.mixed_plan(), metrics=metrics).with_metrics

    def test_another_length_is_named_by_source_and_row(self, metrics, tmp_path):
        metrics["code"] = plans.write_metric(tmp_path / "other", "seqlen", [6, 1, 8])
        with pytest.raises(PlanError, match=r"sample 9 \(row 2 of code\): 9 tokens are planned, .* say 8"):
            verify_plan(plans.mixed_plan(), metrics=metrics)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (lambda m: {"web": m["web"]}, ConfigError, "for 'code', .* add --metrics code=METRICS"),
            (
                lambda m: m | {"x": m["web"]},
                ConfigError,
                "given for 'x', the plan's sources are web, code, old",
            ),
            (lambda m: m["web"], ConfigError, "3 sources: give metrics for each: --metrics web=METRICS --m"),
            (
                lambda m: m | {"web": m["code"], "code": m["web"]},
                SourceChangedError,
                "source 'web' of the plan is of 7 samples, .* has 3",
            ),
        ],
        ids=["missing", "foreign", "one", "swapped"],
    )
    def test_others_are_refused_by_name(self, metrics, change, error, message):
        with pytest.raises(error, match=message):
            verify_plan(plans.mixed_plan(), metrics=change(metrics))

    def test_a_fingerprint_that_differs(self, metrics):
        plan = plans.mixed_plan()
        plan.header["sources"][1]["fingerprint"] = open_metrics(metrics["web"]).fingerprint
        with pytest.raises(SourceChangedError, match="source 'code' of the plan was made from metrics"):
            verify_plan(plan, metrics=metrics)


def test_ids_count_through_sources_of_any_size():
    sources = [PlanSource(first_id=a, num_samples=n, num_tokens=0) for a, n in [(0, 2), (2, 0), (2, 3)]]
    assert source_of(np.arange(5), sources).tolist() == [0, 0, 2, 2, 2]
