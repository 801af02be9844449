"""What a rehearsal changes, copied to the host before and put back after it, also if it ends in an error."""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from packer.budget.device import Device


class Stateful(Protocol):
    """Whatever else a training step changes: a gradient scaler, a running loss."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state back."""


@contextmanager
def left_as_it_was(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], also: Sequence[Stateful], device: Device
) -> Iterator[None]:
    """Put back, when the block ends, all that training steps in it changed.

    Parameters, buffers, gradients, the optimizers' states and options, and random generators keep their
    values; tensors that were there keep their identity, so that whoever refers to them still does.

    Args:
        modules: The models.
        optimizers: What updates them.
        also: Further objects with ``state_dict`` and ``load_state_dict``.
        device: Whose generator is put back besides the host's.
    """
    parameters = _unique(parameter for module in modules for parameter in module.parameters())
    buffers = _unique(buffer for module in modules for buffer in module.buffers())
    gradients = [parameter.grad for parameter in parameters]
    kept = [_Kept(tensor) for tensor in (*parameters, *buffers, *gradients) if tensor is not None]
    states = [_OptimizerState(optimizer) for optimizer in optimizers]
    others = [copy.deepcopy(_on_host(one.state_dict())) for one in also]
    is_training = [(part, part.training) for module in modules for part in module.modules()]
    generators = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global one is what users draw from)
    on_gpu = device.torch_device.type == "cuda"
    try:
        with torch.random.fork_rng(devices=[device.torch_device] if on_gpu else []):
            yield
    finally:
        with torch.no_grad():
            for tensor in kept:
                tensor.put_back()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for state in states:
                state.put_back()
        for one, state_dict in zip(also, others, strict=True):
            one.load_state_dict(state_dict)
        for part, mode in is_training:
            part.training = mode
        random.setstate(generators[0])
        np.random.set_state(generators[1])  # noqa: NPY002


class _Kept:
    """A tensor and a copy of its values on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._values = _local(tensor).detach().to("cpu", copy=True)

    def put_back(self) -> Tensor:
        _local(self._tensor).detach().copy_(self._values)
        return self._tensor


class _OptimizerState:
    """An optimizer's states and options; what was not there before is let go."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states = {parameter: _keep(state) for parameter, state in optimizer.state.items()}
        self._groups = [
            {name: _keep(option) for name, option in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        self._optimizer.state.clear()
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = _put_back(state)
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update({name: _put_back(option) for name, option in options.items()})


def _keep(value: Any) -> Any:
    """Copy a nested value, with each tensor in it as one that knows its values."""
    if isinstance(value, Tensor):
        return _Kept(value)
    if isinstance(value, dict):
        return {name: _keep(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_keep, value))
    return copy.deepcopy(value)


def _put_back(value: Any) -> Any:
    if isinstance(value, _Kept):
        return value.put_back()
    if isinstance(value, dict):
        return {name: _put_back(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_put_back, value))
    return value


def _on_host(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _unique(tensors: Iterator[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
