"""Where this process stands among the others, and which micro-batches of a step that makes its own."""

import os
from dataclasses import dataclass
from typing import NamedTuple

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
_AXES = (("dp", _DATA_AXES), ("sp", _SEQUENCE_AXES), ("pp", _PIPELINE_AXES), ("tp", _COPY_AXES))

_WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Set by the launchers: torchrun, deepspeed and accelerate; Open MPI; other MPIs."""


class Share(NamedTuple):
    """Which part of a step one rank has."""

    num_parts: int
    """Ranks among whom a step's tokens are dealt, each token to one of them: dp_size · sp_size."""
    reads_samples: bool
    """This rank has one of the parts; others may have the same one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's place: which micro-batches, which slice of each, which pipeline stage."""

    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_size: int = 1
    """Ranks that see the same batches, whichever of them this one is."""

    def __post_init__(self) -> None:
        for axis in ("dp", "sp", "pp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{axis}_rank={rank} is not one of {axis}_size={size} ranks, 0 to {size - 1}"
                )
        if self.tp_size < 1:
            raise ConfigError(f"tp_size={self.tp_size} is no number of ranks; 1 is no tensor parallelism")

    @property
    def reads_samples(self) -> bool:
        """Only the first and the last pipeline stage see tokens or labels."""
        return self.pp_rank in (0, self.pp_size - 1)

    @property
    def share(self) -> Share:
        """Which part of a step this rank has."""
        return Share(self.dp_size * self.sp_size, self.reads_samples)

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole run."""
        return self.dp_size * self.sp_size * self.pp_size * self.tp_size


def find_coordinates(
    *,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    sp_rank: int | None = None,
    sp_size: int = 1,
    pp_rank: int | None = None,
    pp_size: int = 1,
    tp_size: int = 1,
    mesh: DeviceMesh | None = None,
) -> Coordinates:
    """Find this process's place: the mesh's; or what was given; or that of ``torch.distributed``.

    A size that is not given is 1. What is given is held against the running world, and against what follows
    from it: tensor-parallel ranks are neighbours, sequence groups are runs of those, then come the
    data-parallel ranks, and pipeline stages are outermost. Another order needs a mesh, or all places.

    Raises:
        ConfigError: The place is not known, is given by halves, or contradicts the running world.
    """
    if (dp_rank is None) != (dp_size is None):
        raise ConfigError("dp_rank and dp_size go together; give both, or neither to have them discovered")
    if mesh is not None:
        if (dp_rank, sp_rank, pp_rank, sp_size, pp_size, tp_size) != (None, None, None, 1, 1, 1):
            raise ConfigError(
                "a mesh says all coordinates; leave out dp_*, sp_*, pp_* and tp_size, or the mesh"
            )
        return _from_mesh(mesh)
    sizes = {"sp_size": sp_size, "pp_size": pp_size, "tp_size": tp_size}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}={size} is no number of ranks; 1 is none of its parallelism")
    if dp_rank is None or dp_size is None:
        return _from_world(sp_rank=sp_rank, pp_rank=pp_rank, **sizes)
    for axis, rank, size in (("sp", sp_rank, sp_size), ("pp", pp_rank, pp_size)):
        if rank is None and size > 1:
            raise ConfigError(f"{axis}_size={size} needs {axis}_rank beside dp_rank and dp_size")
    coordinates = Coordinates(
        dp_rank=dp_rank, dp_size=dp_size, sp_rank=sp_rank or 0, pp_rank=pp_rank or 0, **sizes
    )
    if _is_distributed():
        _require_world(coordinates, torch.distributed.get_world_size())
    return coordinates


def _require_world(coordinates: Coordinates, world: int) -> None:
    if coordinates.num_ranks != world:
        sizes = " · ".join(f"{axis} {getattr(coordinates, f'{axis}_size')}" for axis, _ in _AXES)
        raise ConfigError(
            f"{sizes} makes {counted(coordinates.num_ranks, 'rank')} and the world has {world}; what is "
            "not given is 1: name every parallelism of the run (sp_size, pp_size, tp_size), or give a mesh"
        )


def _from_mesh(mesh: DeviceMesh) -> Coordinates:
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError('the mesh\'s dimensions have no names; give mesh_dim_names, such as ("dp", "sp")')
    unknown = sorted(set(names).difference(*(axes for _, axes in _AXES)))
    if unknown:
        raise ConfigError(
            f"mesh dimension {unknown[0]!r} is none of data ({', '.join(sorted(_DATA_AXES))}), sequence "
            f"({', '.join(sorted(_SEQUENCE_AXES))}), pipeline ({', '.join(sorted(_PIPELINE_AXES))}) and "
            f"tensor ({', '.join(sorted(_COPY_AXES))}) parallelism; rename it, or pass dp_rank and dp_size"
        )
    places: dict[str, int] = {}
    for axis, axes in _AXES:
        rank, size = 0, 1
        for dim, name in enumerate(names):  # outermost first, as ranks are laid out
            if name in axes:
                rank = rank * mesh.size(dim) + mesh.get_local_rank(dim)
                size *= mesh.size(dim)
        places |= {f"{axis}_rank": rank, f"{axis}_size": size}
    del places["tp_rank"]
    coordinates = Coordinates(**places)
    _require_world(coordinates, torch.distributed.get_world_size())
    return coordinates


def _from_world(
    *, sp_rank: int | None, pp_rank: int | None, sp_size: int, pp_size: int, tp_size: int
) -> Coordinates:
    if not _is_distributed():
        launched = next((name for name in _WORLD_VARIABLES if int(os.environ.get(name) or 1) > 1), None)
        if launched is not None:
            raise ConfigError(
                f"{launched}={os.environ[launched]} says that several processes run, but torch.distributed "
                "is not initialized, so each would play the same micro-batches; call init_process_group "
                "before PlanLoader, or pass dp_rank and dp_size"
            )
        for axis, rank, size in (("sp", sp_rank, sp_size), ("pp", pp_rank, pp_size)):
            if rank is None and size > 1:
                raise ConfigError(
                    f"{axis}_size={size} needs {axis}_rank where torch.distributed does not tell it"
                )
        return Coordinates(
            sp_rank=sp_rank or 0, sp_size=sp_size, pp_rank=pp_rank or 0, pp_size=pp_size, tp_size=tp_size
        )
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = sp_size * pp_size * tp_size
    if world % group:
        raise ConfigError(
            f"a world of {world} ranks does not divide by sp_size·pp_size·tp_size = {group}; pass a "
            "mesh, or all places"
        )
    dp_size = world // group
    # (pp, dp, sp, tp) -> rank
    lane, sp_place = divmod(rank // tp_size, sp_size)
    pp_place, dp_place = divmod(lane, dp_size)
    for axis, given, found in (("sp", sp_rank, sp_place), ("pp", pp_rank, pp_place)):
        if given not in (None, found):
            raise ConfigError(
                f"{axis}_rank={given} was given, and rank {rank} of {world} is {axis}_rank {found} where "
                f"ranks lie in the order pp, dp, sp, tp (sizes {pp_size}, {dp_size}, {sp_size}, {tp_size}), "
                "by which dp_rank would be found; pass dp_rank and dp_size too, or a mesh"
            )
    return Coordinates(
        dp_rank=dp_place,
        dp_size=dp_size,
        sp_rank=sp_place,
        sp_size=sp_size,
        pp_rank=pp_place,
        pp_size=pp_size,
        tp_size=tp_size,
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
