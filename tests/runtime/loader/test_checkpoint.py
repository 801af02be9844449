"""The loader's state in the checkpoints that people use: pickles, torch's distributed ones, stateful
loaders."""

import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from packer.runtime import PlanLoader
from tests.ranks import run_ranks
from tests.runtime.replays import Tokens, lengths, make_plan, replay

SEQLENS = lengths(64)
# Loading warns that state dicts of one process are read without a process group.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable"
)


def loader(**arguments: Any) -> PlanLoader:
    return PlanLoader(
        make_plan(SEQLENS, steps=5, epochs=2, dp_size=2, grad_accum=2), Tokens(SEQLENS), **arguments
    )


def advance(loader: PlanLoader, count: int) -> list[list[int]]:
    played = replay(loader)
    return [next(played)[2] for _ in range(count)]


def test_plain_values_survive_torch_save_without_trust() -> None:
    first = loader()
    advance(first, 5)
    file = io.BytesIO()
    torch.save({"loader": first.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)["loader"]
    assert state == first.state_dict()
    assert all(type(value) in (int, str, bool) for value in state.values())


@pytest.mark.skipif(
    "no_dist" not in inspect.signature(dcp.save).parameters, reason="this torch saves with ranks only"
)
def test_a_stateful_object_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    first = loader()
    assert isinstance(first, Stateful)
    advance(first, 6)
    dcp.save({"loader": first}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    second = loader()
    dcp.load({"loader": second}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert second.state_dict() == first.state_dict() | {"microbatch": 0}
    assert advance(second, 3) == advance(resumed(first), 3)


def resumed(first: PlanLoader) -> PlanLoader:
    other = loader()
    other.load_state_dict(first.state_dict())
    return other


def save_and_load(device: torch.device, path: str, saves: bool) -> list[list[int]]:
    mine = loader()
    if saves:
        advance(mine, 3)
        dcp.save({"loader": mine}, checkpoint_id=path)
        return []
    dcp.load({"loader": mine}, checkpoint_id=path)
    return [ids for _, _, ids in replay(mine)]


def test_ranks_share_one_state_and_another_number_of_them_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(save_and_load, 2, path, True)
    (alone,) = run_ranks(save_and_load, 1, path, False)
    both = run_ranks(save_and_load, 2, path, False)
    # Two ranks had played step 0 and half of step 1; one rank plays the four micro-batches of a step itself.
    whole = [ids for _, _, ids in replay(loader(dp_rank=0, dp_size=1))]
    assert alone == whole[4:]
    assert [ids for pair in zip(*both, strict=True) for ids in pair] == alone


def test_it_behaves_as_a_stateful_loader_does() -> None:
    """Checkpoint in the middle, load before iterating, the iterator goes on; the next epoch is whole."""
    expected = [batch.sample_ids.tolist() for batch in loader().microbatches()]
    first = loader().microbatches()
    batches = iter(first)
    head = [next(batches).sample_ids.tolist() for _ in range(3)]
    state = first.state_dict()
    second = loader(num_workers=1).microbatches()
    second.load_state_dict(state)
    tail = [batch.sample_ids.tolist() for batch in second]
    assert head + tail == expected
    assert len(list(second)) == len(second) == 20
    assert dist.is_initialized() is False
