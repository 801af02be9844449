"""A training loop of one's own under accelerate: the plan's batches, loss and rate, on any of its backends.

Only the model and the optimizer go through ``accelerator.prepare``. The loader does not: it is sharded
already, and is no ``DataLoader`` that accelerate could shard again::

    model, optimizer = accelerator.prepare(model, optimizer)
    training = AcceleratedPlan(accelerator, plan, dataset, model=model, optimizer=optimizer)
    for step in training.loader:
        for batch in training.microbatches(step):
            training.backward(loss_sum(model, batch), step)
        optimizer.step()
        optimizer.zero_grad()

Tested with accelerate 1.15, on DDP and on ZeRO 1 and 3 of DeepSpeed 0.19.8.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from packer.errors import ConfigError
from packer.plan import Plan
from packer.runtime import Batch, PlanLoader, PlanLR, Step, StepInfo


class AcceleratedPlan:
    """A plan, played in a loop of one's own.

    While the optimizer steps, its rates are multiplied by the step's factor; between the updates any
    schedule finds the base rates. Under DeepSpeed the update happens within the step's last ``backward``,
    and ``optimizer.step()`` does nothing, as everywhere in accelerate.
    """

    def __init__(
        self, accelerator: Any, plan: Plan, dataset: Any, *, model: Any, optimizer: Any, **loader_options: Any
    ) -> None:
        """Take this process's place in the plan.

        Args:
            accelerator: The ``Accelerator``.
            plan: What to play.
            dataset: Its samples.
            model: What ``accelerator.prepare`` returned.
            optimizer: What ``accelerator.prepare`` returned.
            **loader_options: Further arguments of ``PlanLoader``.

        Raises:
            ConfigError: The ranks' places are not known, or the optimizer is none.
            PlanError: The plan does not fit this number of processes.
        """
        options: dict[str, Any] = {"device": accelerator.device} | place_of(accelerator) | loader_options
        self.loader = PlanLoader(plan, dataset, **options)
        """Hands out this process's share of each step."""
        self.num_averaged = num_averaged(accelerator)
        """Ranks that the backend averages gradients over: what the loss is multiplied by."""
        self._accelerator = accelerator
        self._model = model
        self.rate = PlanLR(optimizer, plan, self.loader)
        """Scales the rates while the optimizer steps; ``rate.get_last_lr()`` says what they were."""

    def microbatches(self, step: Step) -> Iterator[Batch]:
        """Yield a step's micro-batches; gradients are reduced, and counted as complete, with the last one."""
        while len(step):
            is_last = len(step) == 1
            self._accelerator.gradient_state._set_sync_gradients(is_last)
            # DeepSpeed's engine goes by the flag alone, and from ZeRO 2 on refuses no_sync.
            waits = not is_last and not _is_deepspeed(self._accelerator)
            with self._accelerator.no_sync(self._model) if waits else contextlib.nullcontext():
                yield next(step)
        step.leave()

    def backward(
        self, loss_sum: torch.Tensor, step: Step | StepInfo, num_loss_tokens: int | None = None
    ) -> None:
        """Add a micro-batch's share of the gradient: of the mean over all tokens of the step.

        Args:
            loss_sum: The loss summed over this rank's tokens of the micro-batch.
            step: The step it belongs to.
            num_loss_tokens: Tokens of the whole step, where ``count_loss_tokens`` had to count them.

        Raises:
            PlanError: The plan does not know the step's loss tokens.
        """
        count = step.num_loss_tokens if num_loss_tokens is None else num_loss_tokens
        loss = loss_sum * (self.num_averaged / max(count, 1))
        if _is_deepspeed(self._accelerator):
            self._accelerator.backward(loss, scale_wrt_gas=False)
        else:  # undoes a division of accelerate's
            self._accelerator.backward(loss * self._accelerator.gradient_accumulation_steps)


def place_of(accelerator: Any, *, tp_size: int | None = None) -> dict[str, int]:
    """Return where this process stands, as arguments of ``PlanLoader``.

    Ranks are laid out as accelerate lays them out: data parallel outermost, then sequence, then tensor
    parallel.

    Args:
        accelerator: The ``Accelerator``.
        tp_size: Tensor-parallel ranks, where something else than its ``ParallelismConfig`` knows them.

    Raises:
        ConfigError: Context parallelism, which cuts rows behind the loader, or a world that does not divide.
    """
    axes: Any = getattr(accelerator, "parallelism_config", None)
    if getattr(axes, "cp_size", 1) > 1:
        raise ConfigError(
            f"cp_size={axes.cp_size}: accelerate's context parallelism cuts rows behind the loader, where "
            "labels are no longer shifted across the cut; use sp_size with sp_backend='deepspeed', or a "
            "loop of your own with PlanLoader(shard='zigzag')"
        )
    sp_size = getattr(axes, "sp_size", 1)
    tp_size = getattr(axes, "tp_size", 1) if tp_size is None else tp_size
    rank, world = rank_and_world(accelerator)
    if world % (sp_size * tp_size):
        raise ConfigError(
            f"a world of {world} processes does not divide by sp_size·tp_size = {sp_size * tp_size}; "
            "start a multiple of that"
        )
    return {
        "dp_rank": rank // (sp_size * tp_size),
        "dp_size": world // (sp_size * tp_size),
        "sp_rank": rank // tp_size % sp_size,
        "sp_size": sp_size,
        "tp_size": tp_size,
    }


def num_averaged(accelerator: Any, *, tp_size: int | None = None) -> int:
    """Return how many ranks the backend averages gradients over; call it once the model is prepared."""
    if _is_deepspeed(accelerator):
        return deepspeed_averages_over(accelerator.deepspeed_engine_wrapped.engine)
    axes: Any = getattr(accelerator, "parallelism_config", None)
    tp_size = getattr(axes, "tp_size", 1) if tp_size is None else tp_size
    return rank_and_world(accelerator)[1] // tp_size


def deepspeed_averages_over(engine: Any) -> int:
    """Return how many ranks a DeepSpeed engine averages gradients over.

    Ranks that share sequences are not counted, except by the fused reduce-scatter of ZeRO 3.
    """
    ranks = int(engine.seq_dp_world_size)
    if engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter():
        return ranks
    return ranks // int(engine.sequence_parallel_size)


def rank_and_world(accelerator: Any) -> tuple[int, int]:
    """Return this process's rank and the number of processes.

    The process group is asked first: under DeepSpeed on the CPU, accelerate takes every process for the
    only one.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(accelerator.process_index), int(accelerator.num_processes)


def _is_deepspeed(accelerator: Any) -> bool:
    return str(accelerator.distributed_type).upper().endswith("DEEPSPEED")
