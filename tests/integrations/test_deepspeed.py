"""DeepSpeed's dynamic batching with one import changed: its engine, its optimizers, its checkpoints."""

import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from packer.errors import StateError
from packer.integrations.deepspeed_loader import AnySamples, CollateAny, VariableBatchLoader
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader
from tests.integrations.processes import SCRIPTS, run_script

pytestmark = pytest.mark.frameworks

LR = 1e-3


def run_case(name: str, *arguments: object, processes: int = 2) -> list[Any]:
    return run_script(SCRIPTS / "drop_in.py", name, *arguments, processes=processes)


def step_sizes(ranks: list[list[Any]], grad_accum: int) -> list[int]:
    """Samples of each step, counted in what the ranks were handed."""
    per_rank = [[len(ids) for ids, *_ in seen] for seen in ranks]
    return [
        sum(sum(sizes[first : first + grad_accum]) for sizes in per_rank)
        for first in range(0, len(per_rank[0]), grad_accum)
    ]


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    return run_case("zero", tmp_path_factory.mktemp("zero") / "metrics")


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    return run_case("batches", tmp_path_factory.mktemp("batches") / "metrics")


def test_factor_reaches_the_real_optimizer_on_every_zero_stage_and_precision(zero):
    assert [case["case"] for case in zero[0]] == ["0", "1", "2", "3", "0bf16", "1bf16", "3bf16"]
    for cases in zip(*zero, strict=True):
        sizes = step_sizes([case["seen"] for case in cases], grad_accum=2)
        assert len(sizes) > 4
        assert len(set(sizes)) > 1, "rates that never differ show nothing"
        # train_batch_size = 1 pack × 2 accumulations × 2 ranks
        expected = [[step, pytest.approx(LR * size / 4)] for step, size in enumerate(sizes)]
        for case in cases:
            assert case["updates"] == expected
            shown = [rate for _, _, rate in case["seen"]]
            assert shown == [pytest.approx(LR * size / 4) for size in sizes for _ in range(2)]


def test_an_epoch_holds_every_sample_once_and_the_next_one_is_the_same(zero):
    handed_out = [[ids for ids, *_ in rank[0]["seen"]] for rank in zero]
    for seen in handed_out:
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    ids = [i for seen in handed_out for batch in seen[: len(seen) // 2] for i in batch]
    assert len(ids) == len(set(ids)) > 80


def test_an_update_that_overflows_skips_its_own_factor_only(tmp_path):
    for cases in zip(*run_case("overflow", tmp_path / "metrics"), strict=True):
        sizes = step_sizes([case["seen"] for case in cases], grad_accum=2)
        for case in cases:
            assert 0 < case["skipped"] < len(sizes)
            made = [step for step, _ in case["updates"]]
            assert len(made) == len(sizes) - case["skipped"]
            assert case["updates"] == [[step, pytest.approx(LR * sizes[step] / 4)] for step in made]


def test_batches_and_rates_are_deepspeeds(batches):
    for rank in batches:
        ours, theirs = rank["ours"], rank["theirs"]
        assert [batch[:2] for batch in ours] == [batch[:2] for batch in theirs]
        assert [rate for *_, rate in ours] == pytest.approx([rate for *_, rate in theirs])


def test_packs_random_order_workers_and_a_loader_of_deepspeeds_own(batches):
    for rank in batches:
        lengths = [shape[1] * shape[0] for _, shape, _ in rank["packs"]]
        assert max(len(ids) for ids, *_ in rank["packs"]) <= 8
        assert max(lengths) > 24, "two packs are collated together"
        assert [ids for ids, *_ in rank["random"]] == rank["io"]
        assert rank["io"] != sorted(rank["io"])
    ids = [i for rank in batches for batch, *_ in rank["random"] for i in batch]
    assert len(ids) == len(set(ids)) > 60


def test_a_checkpoint_keeps_place_and_factor(tmp_path):
    for rank in run_case("checkpoint", tmp_path):
        for case in rank:
            whole, rest = case["whole"], case["rest"]
            played = whole["steps"] + 3
            assert rest["seen"] == whole["seen"][2 * played :]
            assert rest["updates"] == [
                [step, pytest.approx(rate)] for step, rate in whole["updates"] if step >= played
            ]
            assert rest["updates"][0][1] > 0
            assert rest["weights"] == pytest.approx(whole["weights"], rel=1e-6)


def test_two_pipeline_stages_give_deepspeeds_losses_and_rates(tmp_path):
    ours = run_case("pipeline", tmp_path / "metrics", "ours", 2)
    theirs = run_case("pipeline", tmp_path / "metrics", "theirs", 2)
    for own, other in zip(ours, theirs, strict=True):
        assert own["losses"] == pytest.approx(other["losses"])
        assert own["updates"] == [[step, pytest.approx(rate)] for step, rate in other["updates"]]


def test_a_stage_in_the_middle_keeps_step_without_data(tmp_path):
    first, middle, last = run_case("pipeline", tmp_path / "metrics", "ours", 3, processes=3)
    assert len({rate for _, rate in first["updates"]}) > 1
    assert middle["updates"] == first["updates"] == last["updates"]
    assert middle["states"] == first["states"] == last["states"]


class Point(NamedTuple):
    ids: torch.Tensor
    count: int


def play(collate: Any, **options: Any) -> VariableBatchLoader:
    plan = make_plan([2, 3, 4], PlanConfig(max_tokens=4, count="real", order="sequential"))
    samples = AnySamples([torch.full((n,), n) for n in (2, 3, 4)], np.array([2, 3, 4]))
    return VariableBatchLoader(PlanLoader(plan, samples, collate=CollateAny(collate, None)), **options)


def test_batches_of_any_type_are_pinned_as_torch_does_where_there_is_an_accelerator(monkeypatch):
    kinds = {
        Point: lambda samples: Point(samples[0], 1),
        OrderedDict: lambda samples: OrderedDict(ids=samples[0]),
        list: None,
    }
    for kind, collate in kinds.items():
        assert [type(batch) for batch in play(collate, pin_memory=True)] == [kind] * 3
    pinned = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(len(self)) or self)
    for kind, collate in kinds.items():
        pinned.clear()
        assert [type(batch) for batch in play(collate, pin_memory=True)] == [kind] * 3
        assert pinned == [2, 3, 4]
    assert len(list(play(None))) == len(pinned), "without pin_memory nothing more is pinned"


def test_a_state_of_other_filter_ids_is_refused():
    state = play(None, chosen="these").state_dict()
    play(None, chosen="these").load_state_dict(state)
    for chosen in ("those", None):
        with pytest.raises(StateError, match="other dataset_filter_ids"):
            play(None, chosen=chosen).load_state_dict(state)


def test_one_process_makes_metrics_and_plan_and_failures_reach_all(tmp_path):
    ranks = run_case("metrics", tmp_path)
    for number, rank in enumerate(ranks):
        once, again = rank["found"]["shared"]
        assert once == again
        assert any(name.endswith("plan.json") for name, *_ in once)
        assert any(f"unshared{number}" in name for name, *_ in rank["found"][f"unshared{number}"][0])
        refusals = rank["refusals"]
        assert refusals.keys() == {
            *("differ", "missing", "count", "disabled", "empty", "minimum", "budget", "bounds", "ids")
        }
        for told in refusals.values():
            assert "--" not in told, "the user has written DeepSpeed's keys, and no command line"
        assert "the same metrics_path" in refusals["differ"]
        assert "batch_seqlens_fn" in refusals["missing"]
        assert "90 samples, and the data set has 91" in refusals["count"]
        assert '"enabled": true' in refusals["disabled"]
        assert "90 samples, 90 of them longer than max_tokens=2" in refusals["empty"]
        assert "min_batch_size=30 samples; raise max_tokens, or lower min_batch_size" in refusals["minimum"]
        assert "max_tokens is 0" in refusals["budget"]
        assert "min_batch_size 3 is over max_batch_size 2" in refusals["bounds"]
        assert "names sample 90, and the data set has 90" in refusals["ids"]
    for one, other in itertools.pairwise(ranks):
        assert one["refusals"].keys() == other["refusals"].keys()
