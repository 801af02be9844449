"""An error that the training loop survives costs its step, and moves nothing else by a micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from packer.errors import PackerError, PlanError, SourceError
from packer.runtime import PlanLoader, PlannedShape
from tests import plans
from tests.runtime.replays import Tokens

# 24 samples of 10 tokens, two a micro-batch, two micro-batches a step.
PLAN = plans.plan_in_memory(
    plans.facts([10] * 24, grad_accum=2),
    [plans.epoch([plans.Row(pieces=[(2 * i, 10), (2 * i + 1, 10)]) for i in range(12)], grad_accum=2)],
    dropped=plans.drops(),
)


class Broken(Tokens):
    """A sample, of step 1's first micro-batch unless told otherwise, cannot be read."""

    def __init__(self, broken: int = 5) -> None:
        super().__init__([10] * 24)
        self.broken = broken

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        if sample_id == self.broken:
            raise OSError("shard 7 is gone")
        return super().__getitem__(sample_id)


def collate_without_5(samples: Sequence[Mapping[str, Any]], shape: PlannedShape) -> dict[str, Any]:
    ids = torch.tensor([sample["input_ids"].tolist() for sample in samples])
    if (ids[:, 0] == 5 * 31 + 1).any():  # sample 5's first token
        raise ZeroDivisionError("no such thing")
    return {"input_ids": ids, "labels": ids.clone()}


WAYS: list[Callable[[int], PlanLoader]] = [
    lambda workers: PlanLoader(PLAN, Broken(), num_workers=workers),
    lambda workers: PlanLoader(PLAN, Broken(), num_workers=workers, device="cpu"),
    lambda workers: PlanLoader(PLAN, Tokens([10] * 24), num_workers=workers, collate=collate_without_5),
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make_loader", WAYS, ids=["data set", "data set, moved", "collate"])
def test_the_next_step_is_the_planned_one(make_loader: Callable[[int], PlanLoader], num_workers: int) -> None:
    loader = make_loader(num_workers)
    delivered: dict[int, list[list[int]]] = {}
    failures = []
    for step in loader:
        delivered[step.index] = []
        try:
            for batch in step:
                delivered[step.index].append(batch.sample_ids.tolist())
                assert batch.step is step.info
                assert loader.current_step is step.info
        except PackerError as error:
            failures.append(str(error))
            continue
    assert delivered == {
        step: [] if step == 1 else [[4 * step, 4 * step + 1], [4 * step + 2, 4 * step + 3]]
        for step in range(6)
    }
    assert len(failures) == 1
    assert "shard 7 is gone" in failures[0] or "ZeroDivisionError: no such thing" in failures[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_asking_again_gives_no_other_micro_batch(num_workers: int) -> None:
    loader = PlanLoader(PLAN, Broken(), num_workers=num_workers)
    steps = iter(loader)
    assert len(list(next(steps))) == 2
    step = next(steps)
    with pytest.raises(SourceError, match="shard 7 is gone"):
        next(step)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"micro-batch 0 of step 1 could not be made.*shard 7 is gone"):
            next(step)
    assert loader.state_dict()["step"] == 1
    assert [batch.sample_ids.tolist() for batch in next(steps)] == [[8, 9], [10, 11]]


def test_what_is_given_up_is_not_asked_for() -> None:
    """A step that is left before its broken micro-batch never hears of it."""
    seen = [next(step).sample_ids.tolist() for step in PlanLoader(PLAN, Broken(6))]
    assert seen == [[4 * step, 4 * step + 1] for step in range(6)]


def test_an_interrupt_while_a_micro_batch_is_read_loses_none() -> None:
    class Interrupted(Tokens):
        is_interrupted = False

        def __getitem__(self, sample_id: int) -> dict[str, Any]:
            if sample_id == 5 and not self.is_interrupted:
                self.is_interrupted = True
                raise KeyboardInterrupt
            return super().__getitem__(sample_id)

    steps = iter(PlanLoader(PLAN, Interrupted([10] * 24)))
    next(steps)
    step = next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(step)
    assert [batch.sample_ids.tolist() for batch in step] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_counting_over_a_broken_micro_batch_keeps_those_before_it(num_workers: int) -> None:
    step = next(iter(PlanLoader(PLAN, Broken(2), num_workers=num_workers)))
    with pytest.raises(SourceError, match="shard 7 is gone"):
        step.count_loss_tokens()
    assert next(step).sample_ids.tolist() == [0, 1]
    with pytest.raises(PlanError, match="micro-batch 1 of step 0 could not be made"):
        next(step)
