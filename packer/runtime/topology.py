"""Where this process stands among the others, and which micro-batches of a step that makes its own."""

import os
from dataclasses import dataclass

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from packer.errors import ConfigError, PlanError
from packer.wording import counted

_DATA_AXES = frozenset(
    {"dp", "ddp", "fsdp", "data", "data_parallel", "dp_replicate", "dp_shard", "replicate", "shard"}
)
_SEQUENCE_AXES = frozenset({"sp", "cp", "sequence_parallel", "context_parallel"})
_PIPELINE_AXES = frozenset({"pp", "pipe", "pipeline"})
_COPY_AXES = frozenset({"tp", "model", "tensor", "tensor_parallel"})
"""Ranks along these see the same batches."""

_WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Set by the launchers: torchrun, deepspeed and accelerate; Open MPI; other MPIs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's place: which micro-batches, which slice of each, which pipeline stage."""

    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "sp", "pp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{axis}_rank={rank} is not one of {axis}_size={size} ranks, 0 to {size - 1}"
                )

    @property
    def reads_samples(self) -> bool:
        """Only the first and the last pipeline stage see tokens or labels."""
        return self.pp_rank in (0, self.pp_size - 1)


def find_coordinates(
    *,
    dp_rank: int | None,
    dp_size: int | None,
    sp_rank: int | None,
    sp_size: int,
    pp_rank: int,
    pp_size: int,
    mesh: DeviceMesh | None,
) -> Coordinates:
    """Find this process's place: what was given, else the mesh's, else that of ``torch.distributed``.

    Raises:
        ConfigError: The place is not known, is given by halves, or does not fit the running world.
    """
    if (dp_rank is None) != (dp_size is None):
        raise ConfigError("dp_rank and dp_size go together; give both, or neither to have them discovered")
    if mesh is not None:
        if dp_rank is not None or sp_rank is not None or (sp_size, pp_size) != (1, 1):
            raise ConfigError("a mesh says all coordinates; leave out dp_*, sp_* and pp_*, or the mesh")
        return _from_mesh(mesh)
    if dp_rank is None or dp_size is None:
        return _from_world(sp_rank=sp_rank, sp_size=sp_size, pp_rank=pp_rank, pp_size=pp_size)
    if sp_size > 1 and sp_rank is None:
        raise ConfigError(f"sp_size={sp_size} needs sp_rank beside dp_rank and dp_size")
    coordinates = Coordinates(
        dp_rank=dp_rank,
        dp_size=dp_size,
        sp_rank=sp_rank or 0,
        sp_size=sp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
    )
    ranks = dp_size * sp_size * pp_size
    if _is_distributed() and torch.distributed.get_world_size() % ranks:
        raise ConfigError(
            f"dp_size·sp_size·pp_size = {ranks} does not divide the world of "
            f"{torch.distributed.get_world_size()} ranks; dp_size is world / (tp·cp·sp·pp)"
        )
    return coordinates


def _from_mesh(mesh: DeviceMesh) -> Coordinates:
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError('the mesh\'s dimensions have no names; give mesh_dim_names, such as ("dp", "sp")')
    unknown = sorted(set(names) - _DATA_AXES - _SEQUENCE_AXES - _PIPELINE_AXES - _COPY_AXES)
    if unknown:
        raise ConfigError(
            f"mesh dimension {unknown[0]!r} is none of data ({', '.join(sorted(_DATA_AXES))}), sequence "
            f"({', '.join(sorted(_SEQUENCE_AXES))}), pipeline ({', '.join(sorted(_PIPELINE_AXES))}) and "
            f"tensor ({', '.join(sorted(_COPY_AXES))}) parallelism; rename it, or pass dp_rank and dp_size"
        )
    places: dict[str, int] = {}
    for axis, axes in (("dp", _DATA_AXES), ("sp", _SEQUENCE_AXES), ("pp", _PIPELINE_AXES)):
        rank, size = 0, 1
        for dim, name in enumerate(names):  # outermost first, as ranks are laid out
            if name in axes:
                rank = rank * mesh.size(dim) + mesh.get_local_rank(dim)
                size *= mesh.size(dim)
        places |= {f"{axis}_rank": rank, f"{axis}_size": size}
    return Coordinates(**places)


def _from_world(*, sp_rank: int | None, sp_size: int, pp_rank: int, pp_size: int) -> Coordinates:
    """Sequence groups are contiguous ranks, pipeline stages outermost; other orders need a mesh."""
    if not _is_distributed():
        launched = next((name for name in _WORLD_VARIABLES if int(os.environ.get(name) or 1) > 1), None)
        if launched is not None:
            raise ConfigError(
                f"{launched}={os.environ[launched]} says that several processes run, but torch.distributed "
                "is not initialized, so each would play the same micro-batches; call init_process_group "
                "before PlanLoader, or pass dp_rank and dp_size"
            )
        if sp_size > 1 and sp_rank is None:
            raise ConfigError(f"sp_size={sp_size} needs sp_rank where torch.distributed does not tell it")
        return Coordinates(sp_rank=sp_rank or 0, sp_size=sp_size, pp_rank=pp_rank, pp_size=pp_size)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world % (sp_size * pp_size):
        raise ConfigError(
            f"a world of {world} ranks does not divide by sp_size·pp_size = {sp_size * pp_size}; pass a "
            "mesh, or dp_rank and dp_size"
        )
    dp_size = world // (sp_size * pp_size)
    return Coordinates(
        dp_rank=rank // sp_size % dp_size,
        dp_size=dp_size,
        sp_rank=rank % sp_size if sp_rank is None else sp_rank,
        sp_size=sp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
    )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def grad_accum_for(dp_size: int, planned_dp_size: int, planned_grad_accum: int) -> int:
    """Return how many micro-batches each of ``dp_size`` ranks plays for the step to stay the same.

    Raises:
        PlanError: The step does not divide; the message lists the topologies that fit.
    """
    step_size = planned_dp_size * planned_grad_accum
    if step_size % dp_size == 0:
        return step_size // dp_size
    fitting = [f"{size}×{step_size // size}" for size in range(1, step_size + 1) if step_size % size == 0]
    raise PlanError(
        f"the plan has {counted(step_size, 'micro-batch')} a step (dp_size {planned_dp_size} × grad_accum "
        f"{planned_grad_accum}), which {counted(dp_size, 'data-parallel rank')} cannot share evenly; run "
        f"dp_size × grad_accum = {', '.join(fitting)}, or plan again with --dp-size {dp_size}"
    )


def row_of(step: int, accum: int, dp_rank: int, dp_size: int, step_size: int) -> int:
    """Return the row of a micro-batch: the flat place accum·D + rank within a step does not depend on D."""
    return step * step_size + accum * dp_size + dp_rank
