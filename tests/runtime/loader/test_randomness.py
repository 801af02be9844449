"""Random numbers of a sample's reading: those of its row, whoever reads it, when and where."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from packer.errors import ConfigError
from packer.runtime import PlanLoader
from tests.runtime.replays import Tokens, make_plan, tokens_of

SEQLENS = [8] * 48
Draws = list[tuple[float, ...]]


class Drawing(Tokens):
    """Each sample holds what was drawn for it from each of the three generators."""

    def __init__(self) -> None:
        super().__init__(SEQLENS)

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002
        return super().__getitem__(sample_id) | {"drawn": drawn, "noise": torch.rand(SEQLENS[sample_id])}


def plan_of(**options: Any) -> Any:
    return make_plan(SEQLENS, steps=3, grad_accum=4, epochs=2, sp_size=2, **options)


def draws(loader: PlanLoader) -> list[Draws]:
    return [batch["drawn"] for batch in loader.microbatches()]


def states() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, words.tolist(), rest, torch.get_rng_state().tolist()


def test_workers_or_none_and_any_topology_draw_the_same() -> None:
    whole = draws(PlanLoader(plan_of(), Drawing()))
    assert len({drawn for batch in whole for drawn in batch}) == 24
    for num_workers in (1, 2):
        assert draws(PlanLoader(plan_of(), Drawing(), num_workers=num_workers)) == whole
    for rank in range(2):
        half = draws(PlanLoader(plan_of(), Drawing(), dp_rank=rank, dp_size=2))
        assert half == whole[rank::2]


def test_epochs_seeds_and_plans_draw_other_numbers() -> None:
    loader = PlanLoader(plan_of(), Drawing())
    found = [*draws(loader), *draws(loader)]
    found += draws(PlanLoader(plan_of(), Drawing(), seed=1))
    found += draws(PlanLoader(plan_of(layout="packed"), Drawing()))
    assert len({drawn for batch in found for drawn in batch}) == 4 * 24


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resume_goes_on_with_the_same_numbers(num_workers: int) -> None:
    whole = draws(PlanLoader(plan_of(), Drawing(), seed=5))
    loader = PlanLoader(plan_of(), Drawing(), seed=5)
    batches = iter(loader.microbatches())
    for _ in range(5):
        next(batches)
    again = PlanLoader(plan_of(), Drawing(), num_workers=num_workers)
    list(again.microbatches())  # its workers were sent another seed
    again.load_state_dict(loader.state_dict(), resume="microbatch")
    assert draws(again) == whole[5:]
    assert again.state_dict()["seed"] == 5


def test_the_callers_generators_stay_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    np.random.randn()  # noqa: NPY002 (one of a pair: the other is kept)
    torch.manual_seed(1)
    before = states()
    loader = PlanLoader(plan_of(), Drawing())
    batches = iter(loader.microbatches())
    for _ in range(7):
        next(batches)
    assert states() == before


@pytest.mark.parametrize("reads_slices", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_ranks_of_a_row_draw_the_same_for_it(reads_slices: bool, num_workers: int) -> None:
    """A sample that lies on both ranks has one noise, of which each rank holds its part."""
    plan = make_plan(SEQLENS, steps=3, grad_accum=4, per_microbatch=3, layout="packed", sp_size=2)
    whole = [batch["noise"] for batch in PlanLoader(plan, Drawing()).microbatches()]
    dataset = Drawing()
    if reads_slices:
        dataset.read_slice = (
            lambda i, start, stop: {  # type: ignore[attr-defined]
                "input_ids": tokens_of(i, 8)[start:stop],
                "drawn": (),
                "noise": torch.rand(min(stop, 8) - start),
            }
        )
    halves = [
        [
            batch["noise"]
            for batch in PlanLoader(
                plan, dataset, dp_rank=0, dp_size=1, sp_rank=rank, sp_size=2, num_workers=num_workers
            ).microbatches()
        ]
        for rank in range(2)
    ]
    for row, left, right in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat([left, right], dim=1), row)


def test_a_data_set_that_begins_to_draw_late_is_noticed() -> None:
    class Late(Tokens):
        def __getitem__(self, sample_id: int) -> dict[str, Any]:
            if len(self.read) > 9:
                torch.rand(1)
            return super().__getitem__(sample_id)

    loader = PlanLoader(plan_of(), Late(SEQLENS))
    batches = iter(loader.microbatches())
    for _ in range(8):  # the eighth is watched
        next(batches)
    before = states()
    for _ in range(4):
        next(batches)
    assert states() == before


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(ConfigError, match="seed=-1"):
        PlanLoader(plan_of(), Drawing(), seed=-1)
