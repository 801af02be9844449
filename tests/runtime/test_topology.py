"""Where a rank stands: found by itself from the world or a mesh, or refused."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from packer.errors import ConfigError, PlanError
from packer.runtime import PlanLoader
from packer.runtime.topology import grad_accum_for, row_of
from tests.ranks import run_ranks
from tests.runtime.replays import Tokens, lengths, make_plan

SEQLENS = lengths(64)


def places(device: torch.device) -> dict[str, Any]:
    """On one rank of four: the place that each way of saying it gives."""
    found: dict[str, Any] = {}

    def note(name: str, plan: Any, **arguments: Any) -> None:
        try:
            loader = PlanLoader(plan, Tokens(SEQLENS), **arguments)
        except (ConfigError, PlanError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            return
        found[name] = (loader.dp_rank, loader.dp_size, loader.sp_rank, loader.sp_size, loader.grad_accum)

    plan = make_plan(SEQLENS, steps=2, dp_size=4, grad_accum=1)
    sliced = make_plan(SEQLENS, steps=2, dp_size=2, grad_accum=1, sp_size=2)
    note("world", plan)
    note("world of sp groups", sliced, sp_size=2)
    note("more accumulation", make_plan(SEQLENS, steps=2, dp_size=4, grad_accum=3))
    note("does not fit", make_plan(SEQLENS, steps=2, dp_size=3, grad_accum=2))
    note("does not divide", plan, sp_size=3)
    note("explicit", plan, dp_rank=1, dp_size=2, tp_size=2)
    note("explicit, all", sliced, dp_rank=1, dp_size=2, sp_rank=0, sp_size=2)
    note("explicit, too few", plan, dp_rank=1, dp_size=2)
    note("explicit, too many", plan, dp_rank=1, dp_size=3)
    # Half given, half derived: ranks 1 and 2 would have joined halves of different rows.
    note("halves", sliced, sp_rank=dist.get_rank() // 2, sp_size=2)
    note("stages", sliced, pp_size=2)
    note("stages, contradicted", sliced, pp_rank=dist.get_rank() % 2, pp_size=2)
    note("copies", sliced, tp_size=2)
    note("copies of slices", make_plan(SEQLENS, steps=2, sp_size=2), tp_size=2, sp_size=2)
    note("no copies", plan, tp_size=0)
    meshes = {
        "mesh of dp and sp": ((2, 2), ("dp", "sp")),
        "mesh of replicas and shards": ((2, 2), ("dp_replicate", "dp_shard")),
        "mesh of tp": ((2, 2), ("dp", "tp")),
        "mesh of stages": ((2, 2), ("pp", "dp")),
        "mesh of unknown": ((4,), ("experts",)),
        "mesh without names": ((4,), None),
    }
    for name, (shape, axes) in meshes.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        note(name, sliced, mesh=mesh)
    note(
        "mesh and more",
        plan,
        mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
        dp_rank=0,
        dp_size=4,
    )
    return found


def test_ranks_find_their_places() -> None:
    for rank, found in enumerate(run_ranks(places, 4)):
        outer, inner = divmod(rank, 2)
        assert found["world"] == (rank, 4, 0, 1, 1)
        assert found["world of sp groups"] == (outer, 2, inner, 2, 1)
        assert found["more accumulation"] == (rank, 4, 0, 1, 3)
        assert found["explicit"] == (1, 2, 0, 1, 2)
        assert found["explicit, all"] == (1, 2, 0, 2, 1)
        assert "makes 2 ranks and the world has 4" in found["explicit, too few"]
        if rank in (0, 3):
            assert found["halves"] == (outer, 2, inner, 2, 1)
        else:
            assert f"sp_rank={outer} was given, and rank {rank} of 4 is sp_rank {inner}" in found["halves"]
        assert found["stages"] == (inner, 2, 0, 1, 1)
        assert (found["stages, contradicted"] == (inner, 2, 0, 1, 1)) == (rank in (0, 3))
        assert found["copies"] == (outer, 2, 0, 1, 1)
        assert found["copies of slices"] == (0, 1, outer, 2, 1)
        assert "tp_size=0 is no number of ranks" in found["no copies"]
        assert found["mesh of dp and sp"] == (outer, 2, inner, 2, 1)
        assert "1×2, 2×1" in found["mesh of replicas and shards"]
        assert found["mesh of tp"] == (outer, 2, 0, 1, 1)
        assert found["mesh of stages"] == (inner, 2, 0, 1, 1)
        assert "1×6, 2×3, 3×2, 6×1" in found["does not fit"]
        assert "a world of 4 ranks does not divide by sp_size·pp_size·tp_size = 3" in found["does not divide"]
        assert "makes 3 ranks and the world has 4" in found["explicit, too many"]
        assert "mesh dimension 'experts'" in found["mesh of unknown"]
        assert "have no names" in found["mesh without names"]
        assert "says all coordinates" in found["mesh and more"]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5))
def test_every_topology_of_the_same_product_plays_the_same_rows(
    dp_size: int, grad_accum: int, step: int
) -> None:
    step_size = dp_size * grad_accum
    expected = list(range(step * step_size, (step + 1) * step_size))
    for other in (size for size in range(1, step_size + 1) if step_size % size == 0):
        accums = range(grad_accum_for(other, dp_size, grad_accum))
        rows = [
            row_of(step, accum, rank, other, step_size)
            for accum, rank in itertools.product(accums, range(other))
        ]
        assert rows == expected


def test_the_world_is_not_asked_where_everything_was_said() -> None:
    assert not dist.is_initialized()
    loader = PlanLoader(make_plan(SEQLENS, steps=2, dp_size=2), Tokens(SEQLENS), dp_rank=1, dp_size=2)
    assert (loader.dp_rank, loader.dp_size) == (1, 2)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_launched_processes_that_do_not_know_each_other_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=f"{name}=4 says that several processes run"):
        PlanLoader(make_plan(SEQLENS, steps=2), Tokens(SEQLENS))
    monkeypatch.setenv(name, "1")
    assert PlanLoader(make_plan(SEQLENS, steps=2), Tokens(SEQLENS)).dp_size == 1
