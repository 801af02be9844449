"""Several sources in one plan: shares in every stretch, passes, phases, totals."""

import contextlib
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ConfigError, EmptyPlanError, SampleTooLongError
from packer.plan import load_plan, verify_plan
from packer.planner import PlanConfig, make_plan
from tests import invariants
from tests.shares import check_shares, held


def lognormal(seed, middle, count, most=2000):
    drawn = np.random.default_rng(seed).lognormal(np.log(middle), 0.9, count)
    return np.clip(drawn, 4, most).astype(np.int32)


@pytest.fixture(scope="module")
def data():
    return {
        "web": lognormal(0, 250, 20_000),
        "code": lognormal(1, 400, 9_000),
        "chat": lognormal(2, 60, 12_000, most=400),
    }


SHARES = {"web": 0.5, "code": 0.3, "chat": 0.2}


def used(plan, epoch=0):
    """Return how often each sample is planned."""
    counts = Counter()
    for table in plan.epoch(epoch).microbatches():
        copies = np.repeat(table.is_filler | table.is_repeat, np.diff(table.offsets))
        counts.update(table.sample_ids[~copies].tolist())
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "packed"},
        {"layout": "packed", "packing": "windowed"},
        {"layout": "packed", "packing": "best-fit"},
        {"layout": "packed", "packing": "next-fit"},
        {"layout": "packed", "min_samples": 6},
        {"layout": "packed", "dp_size": 4, "grad_accum": 2, "balance": "flops"},
        {"layout": "packed", "same_seqlen": True, "sp_size": 4, "pad_multiple": 64},
        {"layout": "packed", "max_seqlen": 300, "too_long": "split"},
        {},
        {"packing": "next-fit"},
        {"dp_size": 2, "grad_accum": 4, "balance": "tokens"},
        {"num_shapes": 4},
    ],
    ids=str,
)
def test_every_stretch_has_its_shares(data, options):
    options = {"max_tokens": 4096, "grad_accum": 8, "mix": SHARES, "total_tokens": 6_000_000} | options
    plan = make_plan(data, PlanConfig(**options))
    check_shares(plan, list(SHARES.values()))
    assert plan.header["epochs"][0]["design_effect"]["source"] <= 0.5
    assert plan.header["epochs"][0]["num_tokens"] >= 6_000_000


@pytest.mark.parametrize("options", [{"layout": "packed"}, {}], ids=str)
def test_shares_of_samples(data, options):
    config = PlanConfig(
        max_tokens=4096, grad_accum=8, mix=SHARES, mix_by="samples", total_tokens=5_000_000, **options
    )
    check_shares(make_plan(data, config), list(SHARES.values()), of="samples")


def test_phases_have_shares_of_their_own(data):
    annealed = {"web": 0.1, "code": 0.3, "chat": 0.6}
    mix = [(0, SHARES), (0.5, annealed)]
    config = PlanConfig(max_tokens=4096, layout="packed", grad_accum=8, mix=mix, total_tokens=8_000_000)
    plan = make_plan(data, config)
    first, second = plan.header["phases"]
    assert first == {"first_step": 0, "shares": SHARES}
    assert second["shares"] == annealed
    num_steps = plan.epoch(0).num_steps
    assert second["first_step"] == pytest.approx(num_steps / 2, abs=2)
    check_shares(plan, list(SHARES.values()), steps=slice(second["first_step"]))
    check_shares(plan, list(annealed.values()), steps=slice(second["first_step"], None))
    assert plan.header["epochs"][0]["design_effect"]["source"] <= 0.5


def test_the_plan_ends_with_the_step_that_reaches_the_total(data):
    for options in ({"layout": "packed"}, {}, {"same_seqlen": True}, {"min_samples": 3, "too_long": "drop"}):
        for total in (1, 50_000, 1_234_567):
            config = PlanConfig(max_tokens=4096, grad_accum=4, mix=SHARES, total_tokens=total, **options)
            tokens = held(make_plan(data, config)).tokens.sum(axis=1)
            assert tokens[:-1].sum() < total <= tokens.sum()


@pytest.mark.parametrize("total_steps", [1, 2, 7, 300])
def test_a_plan_of_so_many_steps(data, total_steps):
    for options in (
        {"layout": "packed"},
        {},
        {"same_num_samples": True},
        {"layout": "packed", "mix_by": "samples"},
    ):
        config = PlanConfig(max_tokens=4096, grad_accum=4, mix=SHARES, total_steps=total_steps, **options)
        assert make_plan(data, config).epoch(0).num_steps == total_steps


def test_one_source_without_a_name_has_a_total_too():
    config = PlanConfig(max_tokens=100, total_tokens=1000)
    plan = make_plan([10, 20, 30], config)
    assert plan.header["epochs"][0]["num_tokens"] >= 1000
    (source,) = plan.header["sources"]
    assert source["passes"] == pytest.approx(1000 / 60, abs=2)
    assert source["num_passes"] == np.ceil(source["passes"])


def test_without_shares_sources_give_what_they_hold(data):
    held_by = {name: int(lengths.sum()) for name, lengths in data.items()}
    config = PlanConfig(max_tokens=4096, layout="packed", grad_accum=8)
    plan = make_plan(data, config)
    check_shares(plan, np.array(list(held_by.values())) / sum(held_by.values()))
    assert set(used(plan).values()) == {1}
    assert [source["passes"] for source in plan.header["sources"]] == [1, 1, 1]


@pytest.mark.parametrize(("repeat", "counts"), [(2.5, {2: 500, 3: 500}), (0.25, {1: 250}), (3, {3: 1000})])
def test_repeats_are_passes(repeat, counts):
    sources = {"web": np.full(4000, 10), "code": np.full(1000, 10)}
    config = PlanConfig(max_tokens=100, grad_accum=1, repeat={"code": repeat}, epochs=2)
    plan = make_plan(sources, config)
    by_epoch = []
    for epoch in range(2):
        code = {sample: count for sample, count in used(plan, epoch).items() if sample >= 4000}
        assert Counter(code.values()) == counts
        by_epoch.append({sample for sample, count in code.items() if count == max(counts)})
    assert (len(counts) == 1 and repeat > 1) or by_epoch[0] != by_epoch[1]
    assert [source["passes"] for source in plan.header["sources"]] == [1, repeat]


def test_a_source_is_used_up_before_it_is_used_again(data):
    config = PlanConfig(max_tokens=4096, layout="packed", grad_accum=8, mix=SHARES, total_tokens=3_000_000)
    plan = make_plan(data, config)
    counts = used(plan)
    for source in plan.header["sources"]:
        ids = range(source["first_id"], source["first_id"] + source["num_samples"])
        times = {counts[sample] for sample in ids}
        assert max(times) - min(times) <= 1
        assert max(times) == source["num_passes"]


def test_a_pass_is_shuffled_anew_and_keeps_its_distance():
    sources = {"web": np.full(50_000, 10), "code": np.full(4_000, 10)}
    config = PlanConfig(max_tokens=400, layout="packed", mix={"web": 0.5, "code": 0.5}, total_tokens=200_000)
    plan = make_plan(sources, config)
    ids = np.concatenate([table.sample_ids for table in plan.epoch(0).microbatches()])
    ids = ids[ids >= 50_000]
    first, second = ids[:4000], ids[4000:8000]
    assert (first != second).mean() > 0.9
    places = {sample: place for place, sample in enumerate(first.tolist())}
    apart = [
        4000 + place - places[sample] for place, sample in enumerate(second.tolist()) if sample in places
    ]
    assert min(apart) > 1000


def test_no_bound_on_passes_is_exceeded(data):
    options = {"max_tokens": 4096, "mix": SHARES, "total_tokens": 6_000_000}
    with pytest.raises(
        ConfigError, match=r"pass .* times through chat, over --max-passes 1; .* \(to [\d,]+ tokens\)"
    ):
        make_plan(data, PlanConfig(max_passes=1, **options))
    make_plan(data, PlanConfig(max_passes={"web": 2}, **options))


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (
            {"a": [5], "b": [5]},
            {"mix": {"a": 0.5, "c": 0.5}},
            "names source 'c', and there is only 2 sources",
        ),
        ({"a": [5], "b": [5]}, {"mix": {"a": 1}}, "gives source 'b' no share"),
        ([5, 5], {"mix": {"a": 1}}, "the one source has no name"),
        ({"a": [5], "b": [0]}, {"mix": {"a": 0.5, "b": 0.5}}, "nothing is left of source 'b'"),
        ({"a": [5], "b": [5]}, {"max_passes": {"c": 1}}, "--max-passes names source 'c'"),
    ],
)
def test_what_is_refused_of_sources(sources, options, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(sources, PlanConfig(max_tokens=10, total_tokens=100, **options))


shares_of = st.sampled_from([[1.0], [0.5, 0.5], [0.999, 0.001], [0.2, 0.3, 0.5], [0.0, 1.0]])


@st.composite
def mixtures(draw):
    """Odd sources and odd wishes."""
    shares = draw(shares_of)
    names = [f"s{number}" for number in range(len(shares))]
    sizes = st.sampled_from([1, 2, 3, 17, 60])
    sources = {
        name: draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))
        for name, size in zip(names, [draw(sizes) for _ in names], strict=True)
    }
    mix = dict(zip(names, shares, strict=True))
    start = draw(st.sampled_from([None, 0.001, 0.5, 0.999]))
    if start is not None:
        mix = [(0, mix), (start, dict(zip(names, shares[::-1], strict=True)))]
    wish = draw(st.sampled_from(["mix", "mix", "repeat", "total", "none"]))
    options = {}
    if wish == "mix":
        options |= {"mix": mix, "mix_by": draw(st.sampled_from(["tokens", "samples"]))}
    if wish in ("mix", "total"):
        total = draw(st.sampled_from([("total_tokens", 1), ("total_tokens", 3000), ("total_steps", 5)]))
        options[total[0]] = total[1]
    if wish == "repeat":
        options["repeat"] = {names[0]: draw(st.sampled_from([0.5, 1.0, 2.5, 40.0]))}
    return sources, options


others = st.fixed_dictionaries(
    {},
    optional={
        "layout": st.just("packed"),
        "packing": st.sampled_from(["windowed", "mixed", "next-fit", "best-fit"]),
        "dp_size": st.sampled_from([2, 3]),
        "grad_accum": st.sampled_from([2, 5]),
        "same_num_samples": st.just(True),
        "same_seqlen": st.just(True),
        "max_samples": st.just(3),
        "min_samples": st.just(2),
        "max_seqlen": st.just(7),
        "too_long": st.sampled_from(["drop", "truncate", "split"]),
        "balance": st.sampled_from(["tokens", "flops"]),
        "remainder": st.sampled_from(["keep", "fill"]),
        "seed": st.integers(0, 3),
        "num_shapes": st.just(2),
        "filter_min": st.just(3),
        "lr_scaling": st.just("linear"),
    },
)


@settings(max_examples=50, deadline=None)
@given(mixtures(), others)
def test_odd_mixtures_are_planned_or_refused(mixture, options):
    sources, wishes = mixture
    refusals = (ConfigError, EmptyPlanError, SampleTooLongError)
    with contextlib.suppress(*refusals), tempfile.TemporaryDirectory() as folder:
        config = PlanConfig(max_tokens=60, **wishes, **options)
        make_plan(sources, config, out=Path(folder, "plan"))
        seqlens = np.concatenate([np.asarray(lengths) for lengths in sources.values()])
        invariants.check(Path(folder, "plan"), seqlens)
        verify_plan(load_plan(Path(folder, "plan")))


@pytest.mark.parametrize("seed", range(12))
def test_a_source_of_a_few_micro_batches_loses_nothing_to_a_number_of_steps(seed):
    seqlens = np.random.default_rng(seed).integers(1, 60, 128)
    plan = make_plan(seqlens, PlanConfig(max_tokens=400, dp_size=2, grad_accum=2, total_steps=13))
    assert verify_plan(plan).num_steps == 13
