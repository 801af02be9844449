"""A rehearsal leaves everything as it was: values, identities, random numbers; errors make no difference."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import packer
from packer.budget import HostDevice
from tests.budget.models import Breaks, Model


class Scaler:
    """What a step changes besides, with a state of its own."""

    def __init__(self) -> None:
        self.scale = torch.tensor(8.0)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]


def used(make_optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[Model, torch.optim.Optimizer]:
    """Return a model in the middle of a run: an update was made, and gradients are held."""
    model = Model()
    optimizer = make_optimizer(model.parameters())
    ids = torch.arange(40).view(4, 10)
    for _ in range(2):
        model({"input_ids": ids, "labels": ids}).backward()
        optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "gradients": [parameter.grad for parameter in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "modes": [module.training for module in model.modules()],
            "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),  # noqa: NPY002
        }
    )


def identities(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    tensors += [parameter.grad for parameter in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [id(tensor) for tensor in tensors]


def noisy(model: Model) -> Callable[[Any], torch.Tensor]:
    """Return a step that draws from every generator, and leaves the model in another mode."""

    def step(batch: Any) -> torch.Tensor:
        random.random()
        np.random.random()  # noqa: NPY002
        model.norm.momentum = 0.5
        loss = model(batch) * (1 + torch.rand(()))
        model.norm.eval()
        return loss

    return step


PLAN = packer.make_plan([5, 9, 3, 12, 7, 4], packer.PlanConfig(max_tokens=24))
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.9),
    "tensor rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ends", ["well", "in an error", "out of memory"])
def test_a_run_goes_on_as_if_nothing_had_been(name: str, ends: str) -> None:
    model, optimizer = used(OPTIMIZERS[name])
    before, same = everything(model, optimizer), identities(model, optimizer)
    scaler = Scaler()
    step: Callable[..., torch.Tensor] = noisy(model)
    device = HostDevice()
    if ends == "in an error":
        step = Breaks(step, 4, ValueError("the data are odd"))
        with pytest.raises(ValueError, match="odd"):
            packer.rehearse(PLAN, step, model=model, optimizer=optimizer, device=device, also=[scaler])
    else:
        if ends == "out of memory":
            step = Breaks(step, 4, torch.OutOfMemoryError("CUDA out of memory"))
        found = packer.rehearse(
            PLAN,
            step,
            model=model,
            optimizer=optimizer,
            device=device,
            also=[scaler],
            backward=lambda loss: (scaler.scale.mul_(2), loss.backward()),
        )
        assert found.fits == (ends == "well")
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)
    assert identities(model, optimizer) == same
    assert scaler.scale == 8


def test_a_fresh_optimizer_and_fresh_gradients_are_fresh_again() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []

    def update() -> None:
        optimizer.step()
        seen.append(len(optimizer.state))

    packer.rehearse(PLAN, model, model=model, optimizer=optimizer, device="cpu", update=update)
    assert set(seen) == {len(list(model.parameters()))}
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_models_and_optimizers_are_put_back() -> None:
    models = [Model(), Model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5) for model in models]
    before = copy.deepcopy([model.state_dict() for model in models])
    packer.rehearse(
        PLAN,
        lambda batch: models[0](batch) + models[1](batch),
        model=models,
        optimizer=optimizers,
        device="cpu",
    )
    torch.testing.assert_close([model.state_dict() for model in models], before, rtol=0, atol=0)
    assert not any(optimizer.state for optimizer in optimizers)
