"""Replay: what is handed out, in which order, on which rank, and from where a run goes on."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from packer.errors import (
    ConfigError,
    LengthMismatchError,
    PlanError,
    SourceChangedError,
    SourceError,
    StateError,
)
from packer.plan import Plan, load_plan
from packer.runtime import Batch, PlanLoader
from tests.runtime.replays import BatchedTokens, Tokens, lengths, make_plan, replay, tokens_of

SEQLENS = lengths(64)


def planned(plan: Plan, epoch: int, *, dp_rank: int = 0, dp_size: int = 1) -> list[list[int]]:
    """Return one rank's sample ids by the definition of a row's place, read straight from the plan."""
    rows = [plan.epoch(epoch).microbatch(row) for row in range(plan.epoch(epoch).num_microbatches)]
    per_step = plan.dp_size * plan.grad_accum
    return [
        row.sample_ids.tolist() for index, row in enumerate(rows) if index % per_step % dp_size == dp_rank
    ]


def ids_of(loader: PlanLoader) -> list[list[int]]:
    return [ids for _, _, ids in replay(loader)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_plays_one_epoch_and_the_next_one_the_next(num_workers: int) -> None:
    plan = make_plan(SEQLENS, steps=5, epochs=2, grad_accum=3)
    loader = PlanLoader(plan, Tokens(SEQLENS), num_workers=num_workers)
    assert len(loader) == 5
    assert len(loader.microbatches()) == 15
    assert ids_of(loader) == planned(plan, 0)
    assert ids_of(loader) == planned(plan, 1)
    assert ids_of(loader) == []  # so that a script that resumes a finished run just ends
    loader.set_epoch(1)
    assert ids_of(loader) == planned(plan, 1)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_deliver_what_this_process_would(context: str, tmp_path: Any) -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=2).save(tmp_path / "plan")
    here = list(PlanLoader(plan, BatchedTokens(SEQLENS)).microbatches())
    away = PlanLoader(plan, BatchedTokens(SEQLENS), num_workers=2, multiprocessing_context=context)
    for ours, theirs in zip(here, away.microbatches(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert ours.sample_ids.tolist() == theirs.sample_ids.tolist()


def test_numbers_of_a_step_are_the_plans() -> None:
    plan = make_plan(SEQLENS, steps=3, dp_size=2, grad_accum=2)
    loader = PlanLoader(plan, Tokens(SEQLENS), dp_rank=1, dp_size=2)
    samples_before = tokens_before = 0
    for index, step in enumerate(loader):
        row = plan.epoch(0).step(index)
        assert (step.epoch, step.index, len(step)) == (0, index, 2)
        assert (
            (step.num_samples, step.num_tokens) == (row.num_samples, row.num_tokens) == (8, step.num_tokens)
        )
        assert step.num_loss_tokens == row.num_loss_tokens
        assert step.lr_scale == row.lr_scale == 1.0 + 0.5 * index
        assert (step.samples_before, step.tokens_before) == (samples_before, tokens_before)
        assert [batch.step for batch in step] == [step.info] * 2
        samples_before += step.num_samples
        tokens_before += step.num_tokens
    assert index == 2


def test_ranks_together_play_every_row_once_on_every_topology() -> None:
    plan = make_plan(SEQLENS, steps=4, dp_size=2, grad_accum=3)
    for dp_size in (1, 2, 3, 6):
        loaders = [
            PlanLoader(plan, Tokens(SEQLENS), dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)
        ]
        assert {loader.grad_accum for loader in loaders} == {6 // dp_size}
        for rank, loader in enumerate(loaders):
            assert ids_of(loader) == planned(plan, 0, dp_rank=rank, dp_size=dp_size)


def test_a_topology_that_does_not_fit_is_refused_with_those_that_do() -> None:
    plan = make_plan(SEQLENS, steps=4, dp_size=2, grad_accum=3)
    with pytest.raises(PlanError, match=r"1×6, 2×3, 3×2, 6×1, or plan again with --dp-size 4"):
        PlanLoader(plan, Tokens(SEQLENS), dp_rank=0, dp_size=4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dp_rank": 0}, "go together"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank=2 is not one of"),
        ({"sp_size": 2}, "needs sp_rank"),
        ({"pp_rank": 3, "pp_size": 2}, "pp_rank=3"),
    ],
)
def test_half_a_place_is_refused(arguments: dict[str, int], complaint: str) -> None:
    plan = make_plan(SEQLENS, steps=4, dp_size=2)
    with pytest.raises(ConfigError, match=complaint):
        PlanLoader(plan, Tokens(SEQLENS), **arguments)


def test_a_launched_process_never_takes_itself_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = make_plan(SEQLENS, steps=4, dp_size=2)
    with pytest.raises(ConfigError, match="init_process_group before PlanLoader"):
        PlanLoader(plan, Tokens(SEQLENS))
    assert PlanLoader(plan, Tokens(SEQLENS), dp_rank=1, dp_size=2).dp_rank == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_state_stands_where_batches_were_handed_out(num_workers: int) -> None:
    plan = make_plan(SEQLENS, steps=4, epochs=2, grad_accum=2)
    loader = PlanLoader(
        plan, Tokens(SEQLENS), num_workers=num_workers, prefetch_factor=4 if num_workers else None
    )
    seen = []

    def at() -> tuple[int, int, int]:
        state = loader.state_dict()
        return state["epoch"], state["step"], state["microbatch"]

    seen.append(at())
    for step in loader:
        for _ in step:
            seen.append(at())
        seen.append(at())
    expected = [(0, 0, 0)]
    for index in range(4):
        expected += [(0, index, 1), (0, index, 2), (0, index + 1, 0)]
    expected[-1] = (1, 0, 0)  # an epoch's end is the next one's beginning
    assert seen == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("resume", ["step", "microbatch"])
def test_resume_goes_on_exactly_however_often_and_reads_nothing_twice(num_workers: int, resume: str) -> None:
    plan = make_plan(SEQLENS, steps=5, epochs=2, grad_accum=3)
    whole = planned(plan, 0) + planned(plan, 1)
    played: list[list[int]] = []
    state = None
    # Interrupted after so many micro-batches: within a step, at a step's end, at the epoch's edge, past it.
    for stop_after in (2, 4, 3, 6, 1, 8, 100):
        dataset = Tokens(SEQLENS)
        loader = PlanLoader(plan, dataset, num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state, resume=resume)  # type: ignore[arg-type]
            start = (
                15 * state["epoch"]
                + 3 * state["step"]
                + (state["microbatch"] if resume == "microbatch" else 0)
            )
            del played[start:]
            assert len(played) == start
        count = 0
        while loader.epoch < 2 and count < stop_after:
            for ids in ids_until(loader, stop_after - count):
                played.append(ids)
                count += 1
        if num_workers == 0:
            assert dataset.read == [i for ids in played[len(played) - count :] for i in ids]
        state = loader.state_dict()
    assert played == whole


def ids_until(loader: PlanLoader, count: int) -> list[list[int]]:
    """Play at most ``count`` micro-batches of one epoch, then let go, as a killed run does."""
    return [ids for _, _, ids in itertools.islice(replay(loader), count)]


def test_a_step_resumes_on_another_topology_and_a_microbatch_does_not() -> None:
    plan = make_plan(SEQLENS, steps=4, dp_size=2, grad_accum=3)
    loader = PlanLoader(plan, Tokens(SEQLENS), dp_rank=0, dp_size=2)
    ids_until(loader, 4)
    state = loader.state_dict()
    assert (state["step"], state["microbatch"]) == (1, 1)
    for rank in range(3):
        other = PlanLoader(plan, Tokens(SEQLENS), dp_rank=rank, dp_size=3)
        other.load_state_dict(state)
        assert ids_of(other) == planned(plan, 0, dp_rank=rank, dp_size=3)[2:]
        with pytest.raises(StateError, match="resume='step'"):
            other.load_state_dict(state, resume="microbatch")
    state["microbatch"] = 0  # at a step's edge there is nothing to continue within
    other.load_state_dict(state, resume="microbatch")


def test_state_of_another_plan_or_version_is_refused() -> None:
    loader = PlanLoader(make_plan(SEQLENS, steps=4), Tokens(SEQLENS))
    other = PlanLoader(make_plan(SEQLENS, steps=3), Tokens(SEQLENS))
    with pytest.raises(StateError, match="another order"):
        loader.load_state_dict(other.state_dict())
    with pytest.raises(StateError, match="version 9"):
        loader.load_state_dict(loader.state_dict() | {"version": 9})
    with pytest.raises(ConfigError, match="resume='sample'"):
        loader.load_state_dict(loader.state_dict(), resume="sample")  # type: ignore[arg-type]


def test_set_epoch_keeps_a_resume_and_drops_what_persistent_workers_prefetched() -> None:
    plan = make_plan(SEQLENS, steps=5, epochs=3)
    loader = PlanLoader(plan, Tokens(SEQLENS), num_workers=2, prefetch_factor=3)
    assert ids_until(loader, 2) == planned(plan, 0)[:2]
    loader.set_epoch(2)
    assert ids_until(loader, 2) == planned(plan, 2)[:2]
    state = loader.state_dict()
    loader.set_epoch(0)
    assert ids_of(loader) == planned(plan, 0)
    loader.load_state_dict(state, resume="microbatch")
    loader.set_epoch(2)
    assert ids_of(loader) == planned(plan, 2)[2:]
    with pytest.raises(PlanError, match="epoch 7"):
        loader.set_epoch(7)


def test_a_second_iteration_ends_the_first() -> None:
    plan = make_plan(SEQLENS, steps=5, epochs=2)
    loader = PlanLoader(plan, Tokens(SEQLENS))
    first = iter(loader)
    step = next(first)
    assert ids_of(loader) == planned(plan, 1)
    with pytest.raises(PlanError, match="this iteration of the loader is over"):
        next(step)


def test_a_step_left_early_leaves_the_next_one_whole_and_is_played_once() -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=3)
    loader = PlanLoader(plan, Tokens(SEQLENS))
    seen = []
    for step in loader:
        seen.append(next(step).sample_ids.tolist())
    assert seen == planned(plan, 0)[::3]
    with pytest.raises(PlanError, match="was left 2 micro-batches before its end"):
        iter(step)


def test_a_step_is_played_once() -> None:
    step = next(iter(PlanLoader(make_plan(SEQLENS, steps=4, grad_accum=3), Tokens(SEQLENS))))
    assert len(list(step)) == 3
    with pytest.raises(PlanError, match="was played already"):
        iter(step)


def test_flat_view_counts_a_step_as_played_with_its_last_microbatch() -> None:
    plan = make_plan(SEQLENS, steps=4, grad_accum=2)
    loader = PlanLoader(plan, Tokens(SEQLENS))
    view = loader.microbatches()
    positions = []
    for batch in view:
        assert batch.step.index == loader.current_step.index
        state = view.state_dict()
        positions.append((state["step"], state["microbatch"]))
    assert positions == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (0, 0)]
    again = PlanLoader(plan, Tokens(SEQLENS)).microbatches()
    again.load_state_dict(state | {"epoch": 0, "step": 1, "microbatch": 1})
    assert [batch.sample_ids.tolist() for batch in again] == planned(plan, 0)[3:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_of_another_length_stops_the_run_with_its_id(num_workers: int) -> None:
    plan = make_plan(SEQLENS, steps=4)
    wrong = plan.epoch(0).microbatch(2).sample_ids[1]
    changed = [seqlen + 2 * (i == wrong) for i, seqlen in enumerate(SEQLENS)]
    batches = iter(PlanLoader(plan, Tokens(changed), num_workers=num_workers).microbatches())
    next(batches)
    next(batches)
    with pytest.raises(LengthMismatchError) as error:
        next(batches)
    message = str(error.value)
    assert message.startswith(
        f"sample {wrong} has {changed[wrong]} tokens and the plan was made for {SEQLENS[wrong]}"
    )
    assert "special tokens" in message
    assert "\n" not in message


def test_a_data_set_of_another_size_is_refused() -> None:
    with pytest.raises(SourceChangedError, match="63 samples and the plan was made for 64"):
        PlanLoader(make_plan(SEQLENS, steps=4), Tokens(SEQLENS[:-1]))


def test_samples_without_tokens_are_refused_by_name() -> None:
    dataset = [{"text": "abc", "id": 3}] * len(SEQLENS)
    with pytest.raises(SourceError, match="without input_ids; its fields are text, id"):
        next(iter(PlanLoader(make_plan(SEQLENS, steps=4), dataset).microbatches()))


def test_masked_labels_that_the_plan_did_not_count_do_not_pass() -> None:
    def labels(sample_id: int, seqlen: int) -> np.ndarray[Any, Any]:
        return np.where(np.arange(seqlen) < seqlen // 2, -100, tokens_of(sample_id, seqlen))

    loader = PlanLoader(make_plan(SEQLENS, steps=4), Tokens(SEQLENS, labels=labels))
    step = next(iter(loader))
    assert step.num_loss_tokens > 0
    with pytest.raises(PlanError, match="--labels-column"):
        next(step)


def test_the_loader_draws_nothing_from_the_global_generators() -> None:
    plan = make_plan(SEQLENS, steps=4, epochs=2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for _ in range(2):
        ids_of(PlanLoader(plan, Tokens(SEQLENS), num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_on_disk_is_opened_by_path_in_each_process(tmp_path: Any) -> None:
    plan = make_plan(SEQLENS, steps=4).save(tmp_path / "plan")
    for opened in (tmp_path / "plan", str(tmp_path / "plan")):
        loader = PlanLoader(opened, Tokens(SEQLENS))
        assert repr(loader).endswith(
            "dp_rank 0 of 1, 1 micro-batch a step, at epoch 0, step 0, micro-batch 0)"
        )
        assert ids_of(loader) == planned(plan, 0)
    opened = load_plan(tmp_path / "plan")
    loader = PlanLoader(opened, Tokens(SEQLENS), num_workers=1, multiprocessing_context="spawn")
    assert ids_of(loader) == planned(plan, 0)


def test_batches_travel_and_move_with_their_attributes() -> None:
    batch = next(iter(PlanLoader(make_plan(SEQLENS, steps=4), Tokens(SEQLENS)).microbatches()))
    moved = batch.to("cpu")
    assert isinstance(moved, Batch)
    assert moved.num_tokens == batch.num_tokens
    assert moved.step == batch.step
    assert dict(**batch).keys() == {"input_ids", "attention_mask", "position_ids", "labels"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = batch.nonsense
    with pytest.raises(AttributeError, match="no attribute 'num_tokens'"):
        _ = Batch({}).num_tokens
