"""The largest step first: what is played, what the state then says, and which plans allow it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packer
from packer.errors import ConfigError, StateError
from packer.plan import Plan
from packer.runtime import PlanLoader
from tests.runtime.replays import Tokens

LENGTHS = np.random.default_rng(0).integers(1, 50, 160).tolist()


def make_plan(**options: Any) -> Plan:
    config = packer.PlanConfig(**{"max_tokens": 100, "grad_accum": 2, "epochs": 2} | options)
    return packer.make_plan(LENGTHS, config)


def loader(plan: Plan, **options: Any) -> PlanLoader:
    return PlanLoader(plan, Tokens(LENGTHS), **options)


def steps_of(played: PlanLoader) -> list[list[list[int]]]:
    """Return the sample ids of one epoch: steps, micro-batches, samples."""
    return [[batch.sample_ids.tolist() for batch in step] for step in played]


def naive_largest(plan: Plan, epoch: int) -> int:
    """Return the step that holds the largest tensor, the first of equals; then the most attention."""
    size = plan.dp_size * plan.grad_accum
    best = (-1, -1, 0)
    for row in range(plan.epoch(epoch).num_microbatches):
        found = plan.epoch(epoch).microbatch(row)
        if plan.layout == "packed":
            key = (found.padded_seqlen, sum(n * n for n in found.seqlens.tolist()))
        else:
            key = (found.num_samples * found.padded_seqlen, found.num_samples * found.padded_seqlen**2)
        if key > best[:2]:
            best = (*key, row // size)
    return best[2]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_each_epochs_largest_step_is_played_first_and_the_others_keep_their_order(layout: str) -> None:
    plan = make_plan(layout=layout)
    usual, moved = loader(plan), loader(plan, largest_first=True)
    for epoch in range(plan.num_epochs):
        steps, largest = steps_of(usual), naive_largest(plan, epoch)
        played = steps_of(moved)
        assert sorted(map(str, played)) == sorted(map(str, steps))
        first = next(place for place, step in enumerate(steps) if step == played[0])
        assert played == [steps[first], *steps[:first], *steps[first + 1 :]]
        if layout == "padded":
            assert first == largest


def test_steps_count_as_played_and_know_what_came_before() -> None:
    plan = make_plan()
    samples = tokens = 0
    played = loader(plan, largest_first=True)
    for _ in range(plan.num_epochs):
        for place, step in enumerate(played):
            assert step.index == place
            assert (step.samples_before, step.tokens_before) == (samples, tokens)
            samples += step.num_samples
            tokens += step.num_tokens
            assert sum(batch.num_tokens for batch in step) == step.num_tokens


@given(st.integers(1, 200), st.booleans())
def test_a_resumed_run_goes_on_exactly(stop: int, within: bool) -> None:
    plan = make_plan(grad_accum=2)
    first = loader(plan, largest_first=True)
    whole = [batch.sample_ids.tolist() for _ in range(2) for batch in first.microbatches()]
    before = loader(plan, largest_first=True)
    seen = 0
    for _ in range(2):
        for _ in before.microbatches():
            seen += 1
            if seen == stop:
                break
        if seen == stop:
            break
    state = before.state_dict()
    after = loader(plan, largest_first=True)
    after.load_state_dict(state, resume="microbatch" if within else "step")
    rest = [batch.sample_ids.tolist() for _ in range(after.epoch, 2) for batch in after.microbatches()]
    begun = min(stop, len(whole))
    assert rest == whole[begun if within else begun // 2 * 2 :]


def test_another_topology_plays_the_same_steps() -> None:
    plan = make_plan(grad_accum=4)
    alone = steps_of(loader(plan, largest_first=True))
    pair = [steps_of(loader(plan, largest_first=True, dp_rank=rank, dp_size=2)) for rank in range(2)]
    for step, first, second in zip(alone, *pair, strict=True):
        assert sorted(map(str, step)) == sorted(map(str, first + second))


def test_workers_play_the_same_order() -> None:
    plan = make_plan()
    with loader(plan, largest_first=True, num_workers=2) as read_ahead:
        assert steps_of(read_ahead) == steps_of(loader(plan, largest_first=True))


def test_the_order_changes_between_epochs_and_not_within() -> None:
    plan = make_plan()
    moved = loader(plan, largest_first=True)
    steps = iter(moved)
    list(next(steps))
    state = moved.state_dict()
    assert (state["version"], state["largest_first"]) == (3, True)
    next(steps)
    with pytest.raises(StateError, match="make the loader with largest_first=True"):
        loader(plan).load_state_dict(moved.state_dict() | {"microbatch": 1})
    usual = loader(plan)
    list(next(iter(usual)))
    with pytest.raises(StateError, match="make the loader with largest_first=False"):
        loader(plan, largest_first=True).load_state_dict(usual.state_dict())
    at_an_epochs_start = loader(plan)
    at_an_epochs_start.set_epoch(1)
    moved.load_state_dict(at_an_epochs_start.state_dict())
    assert moved.epoch == 1


def test_states_of_older_versions_count_as_the_plan_does() -> None:
    plan = make_plan()
    state = loader(plan).state_dict() | {"version": 2, "step": 3}
    del state["largest_first"]
    usual = loader(plan)
    usual.load_state_dict(state)
    assert usual.current_step.index == 3
    with pytest.raises(StateError, match="largest_first=False"):
        loader(plan, largest_first=True).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"order": "sequential"}, "--order sequential"),
        ({"order": "seqlen"}, "--order seqlen"),
        (
            {
                "curriculum": {
                    "schedule_type": "fixed_linear",
                    "min_difficulty": 8,
                    "max_difficulty": 50,
                    "total_curriculum_step": 4,
                    "difficulty_step": 1,
                }
            },
            "a curriculum",
        ),
    ],
)
def test_an_order_that_means_something_is_kept(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"the plan has {what}"):
        loader(make_plan(**options), largest_first=True)


def test_any_row_can_be_read_and_the_place_stays() -> None:
    plan = make_plan(grad_accum=2)
    usual = loader(plan, dp_rank=1, dp_size=2)
    for epoch, row in [(0, 0), (1, 5), (0, 3)]:
        batch = usual.read_row(epoch, row)
        expected = plan.epoch(epoch).microbatch(row)
        assert batch.sample_ids.tolist() == expected.sample_ids.tolist()
        assert batch.step.index == expected.step
    assert usual.state_dict()["step"] == 0
    assert steps_of(usual) == steps_of(loader(plan, dp_rank=1, dp_size=2))
