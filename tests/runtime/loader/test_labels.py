"""Labels are held against the plan in every micro-batch: none passes that another plan counted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import packer
from packer.errors import PlanError
from packer.plan import Plan
from packer.runtime import PlanLoader, count_loss_tokens
from tests import plans
from tests.runtime.replays import Tokens

SEQLENS = [6, 6, 6, 6]
PLACES: list[dict[str, int]] = [
    {"dp_rank": 0, "dp_size": 1},
    {"dp_rank": 0, "dp_size": 1, "sp_rank": 0, "sp_size": 2},
]


def plan_of(loss_tokens: list[int] | None) -> Plan:
    """One sample a micro-batch, two a step; the steps' loss tokens, or what follows from the lengths."""
    rows = [plans.Row(pieces=[(i, 6)]) for i in range(4)]
    epoch = plans.epoch(rows, grad_accum=2)
    facts = plans.facts(SEQLENS, grad_accum=2, sp_size=2)
    if loss_tokens is not None:
        facts = replace(facts, loss_tokens="labels")
        epoch = replace(epoch, step_num_loss_tokens=np.array(loss_tokens))
    return plans.plan_in_memory(facts, [epoch], dropped=plans.drops())


def answers(length: int) -> Callable[[int, int], Any]:
    """Labels of which the last so many count."""
    return lambda _, seqlen: np.where(np.arange(seqlen) >= seqlen - length, 7, -100)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("places", PLACES, ids=["rows", "slices"])
def test_a_plan_of_lengths_refuses_masked_labels_at_the_first_micro_batch(
    places: dict[str, int], num_workers: int
) -> None:
    loader = PlanLoader(plan_of(None), Tokens(SEQLENS, labels=answers(2)), num_workers=num_workers, **places)
    step = next(iter(loader))
    for _ in range(2):  # asked again, it is as wrong as before
        with pytest.raises(PlanError, match=r"0 of step 0 \(samples 0\) is over .*--labels-column"):
            next(step)
    assert loader.state_dict()["microbatch"] == 0
    assert count_loss_tokens(step) == (0 if "sp_size" in places else 4)  # the cure, also afterwards
    assert len(list(step)) == 2
    with pytest.raises(PlanError, match="made without labels"):
        _ = step.num_loss_tokens


@pytest.mark.parametrize("places", PLACES, ids=["rows", "slices"])
def test_whole_labels_agree_with_a_plan_of_lengths(places: dict[str, int]) -> None:
    loader = PlanLoader(plan_of(None), Tokens(SEQLENS, labels=answers(6)), **places)
    assert len(list(loader.microbatches())) == 4


@pytest.mark.parametrize("places", PLACES, ids=["rows", "slices"])
def test_a_data_set_without_labels_is_none_that_was_analyzed_with_them(places: dict[str, int]) -> None:
    loader = PlanLoader(plan_of([4, 4]), Tokens(SEQLENS), **places)
    with pytest.raises(PlanError, match=r"has no labels, so every token.*the plan counted 4 in all"):
        next(next(iter(loader)))
    # Where every token is one, labels need not be given.
    assert len(list(PlanLoader(plan_of([10, 10]), Tokens(SEQLENS), **places).microbatches())) == 4


@pytest.mark.parametrize(
    ("length", "place", "complaint"),
    [(5, 0, "brings the step's labels to 5 on this rank"), (1, 1, "leaves the step with 2 labels")],
)
def test_more_or_fewer_labels_than_a_step_has_are_refused(length: int, place: int, complaint: str) -> None:
    step = next(iter(PlanLoader(plan_of([4, 4]), Tokens(SEQLENS, labels=answers(length)))))
    for _ in range(place):
        next(step)
    with pytest.raises(PlanError, match=f"{place} of step 0 .* {complaint}, and the plan counted 4"):
        next(step)


def test_the_planned_labels_are_played_by_one_rank_and_by_two() -> None:
    dataset = Tokens(SEQLENS, labels=answers(2))
    for dp_size in (1, 2):
        for dp_rank in range(dp_size):
            loader = PlanLoader(plan_of([4, 4]), dataset, dp_rank=dp_rank, dp_size=dp_size)
            assert [batch.num_loss_tokens for batch in loader.microbatches()] == [2] * (4 // dp_size)


def test_labels_of_a_users_collate_are_counted_too() -> None:
    def collate(samples: Any, shape: Any) -> dict[str, Any]:
        ids = torch.tensor(np.array([sample["input_ids"] for sample in samples]))
        return {"input_ids": ids, "labels": torch.full_like(ids, -100)}

    with pytest.raises(PlanError, match="is over 0 labels"):
        next(iter(PlanLoader(plan_of(None), Tokens(SEQLENS), collate=collate).microbatches()))
    # What it calls otherwise nobody can count.
    loader = PlanLoader(plan_of(None), Tokens(SEQLENS), collate=lambda s, _: {"targets": torch.ones(1)})
    assert len(list(loader.microbatches())) == 4


@pytest.mark.parametrize("wrong", [1, 3, 6])
@pytest.mark.parametrize("dp_rank", [0, 1])
def test_every_rank_holds_its_own_micro_batches_to_the_labels_of_the_plan(dp_rank: int, wrong: int) -> None:
    """Two ranks, whose sum would be right: one label too few in one, one too many in the other."""
    config = packer.PlanConfig(max_tokens=6, dp_size=2, order="sequential")
    plan = packer.make_plan(SEQLENS, config, loss_tokens=[2, 2, 2, 2])
    right = PlanLoader(plan, Tokens(SEQLENS, labels=answers(2)), dp_rank=dp_rank, dp_size=2)
    assert [batch.num_loss_tokens for step in right for batch in step] == [2, 2]
    labels = [answers(wrong if sample % 2 == dp_rank else 4 - wrong) for sample in range(4)]
    mixed = Tokens(SEQLENS, labels=lambda sample, seqlen: labels[sample](sample, seqlen))
    loader = PlanLoader(plan, mixed, dp_rank=dp_rank, dp_size=2)
    with pytest.raises(PlanError, match=f"is over {min(wrong, 5)} labels, and the plan counted 2"):
        next(next(iter(loader)))
