"""D: what a rank's summed loss is multiplied by, so that whoever reduces the gradients leaves their sum.

A sum by hand needs 1, DDP's mean the world's size, FSDP2 what its divide factor says, ZeRO one or the other
by stage and version. Believing a table is how losses come to be off by a factor; a single backward tells.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packer.errors import ConfigError

NUM_PARAMETERS = 8
TOLERANCE = 0.02


def measure_loss_multiplier(
    model: nn.Module,
    loss_sum: Callable[[], Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    after_backward: Callable[[], Any] | None = None,
    read_gradient: Callable[[nn.Parameter], Tensor | None] | None = None,
) -> float:
    """Measure D by one backward, on every rank together, before training.

    The gradients that arrive at some small parameters on each rank are summed, and held against what the
    wrapper makes of them. Parameters are untouched, gradients cleared, random generators put back.

    Args:
        model: As it will be trained: wrapped by DDP, FSDP2, DeepSpeed or nobody.
        loss_sum: Runs the model on a batch of this rank and returns the summed loss.
        group: The ranks among which gradients are reduced; default: all.
        backward: What the training loop calls, where it is not ``loss.backward()``: ``engine.backward``.
        after_backward: What the training loop does to the gradients by hand, such as an all-reduce.
        read_gradient: The whole reduced gradient of a parameter, where it is not ``.grad``: DeepSpeed's
            ``safe_get_full_grad``.

    Returns:
        D; whole numbers come out whole.

    Raises:
        ConfigError: The ranks' gradients are not reduced at all, or not in the same way; or the loss is not
            this model's.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return 1.0
    read = read_gradient or _read_gradient
    watch = _Watch(model)
    # Compiled code was made before the hooks were there, and runs without them.
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), watch:
        # Another weight on each rank, so that gradients which were not reduced do not pass for reduced ones.
        loss = loss_sum() * (1.0 + dist.get_rank(group))
        watch.note_scale_of(loss)
        backward(loss)
    if after_backward is not None:
        after_backward()
    reduced = torch.cat([_flat(read(parameter), parameter) for parameter in watch.parameters])
    summed = watch.gradients()
    dist.all_reduce(summed, group=group)
    model.zero_grad()
    ratio = torch.dot(summed, summed) / torch.dot(reduced, summed)
    # (3,): the largest ratio, the largest of the negatives, the largest distance from a multiple of the sum
    answers = torch.stack([ratio, -ratio, (summed / ratio - reduced).norm() / reduced.norm()])
    dist.all_reduce(answers, dist.ReduceOp.MAX, group=group)
    highest, lowest, distance = answers[0].item(), -answers[1].item(), answers[2].item()
    if not (highest - lowest <= TOLERANCE * highest and distance <= TOLERANCE):
        raise ConfigError(
            "the gradients after a backward are no common multiple of the ranks' sum (between "
            f"1/{highest:.3g} and 1/{lowest:.3g} of it); wrap the model with what reduces them, or pass "
            "after_backward, or the group of the ranks that share them"
        )
    nearest = round(highest)
    return float(nearest) if nearest and abs(highest - nearest) <= TOLERANCE * nearest else highest


class _Watch:
    """Notes the gradients that arrive at a model's smallest parameters, before anybody reduces them."""

    def __init__(self, model: nn.Module) -> None:
        trained = [
            (parameter, module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        # ZeRO-3 leaves empty parameters behind and notes their size elsewhere.
        trained.sort(key=lambda entry: getattr(entry[0], "ds_numel", entry[0].numel()))
        if not trained:
            raise ConfigError("the model has no parameter to train, so there is no gradient to measure")
        self.parameters: Sequence[nn.Parameter] = [entry[0] for entry in trained[:NUM_PARAMETERS]]
        self._owners = [(module, name) for _, module, name in trained[:NUM_PARAMETERS]]
        self._arrived: list[Tensor | None] = [None] * len(self._owners)
        self._scale: Tensor | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for index, (module, name) in enumerate(self._owners):
            self._handles.append(module.register_forward_pre_hook(self._hook(index, name)))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def note_scale_of(self, loss: Tensor) -> None:
        """Note what a wrapper multiplies the loss by before it back-propagates it."""

        def note(gradient: Tensor) -> None:
            self._scale = gradient.detach().clone()

        self._handles.append(loss.register_hook(note))  # type: ignore[no-untyped-call]

    def gradients(self) -> Tensor:
        """Return the gradients of the loss as it was given, end to end, float64."""
        if self._scale is None or all(gradient is None for gradient in self._arrived):
            raise ConfigError(
                "no gradient arrived at the parameters of the model; let loss_sum run this very model, and "
                "return a loss that depends on it"
            )
        flat = [
            _flat(gradient, parameter)
            for gradient, parameter in zip(self._arrived, self.parameters, strict=True)
        ]
        return torch.cat(flat) / self._scale.double()

    def _hook(self, index: int, name: str) -> Callable[..., None]:
        """Watch the parameter as the forward finds it: FSDP2 and ZeRO-3 put another tensor in its place."""
        watched: set[int] = set()

        def note(gradient: Tensor) -> None:
            so_far = self._arrived[index]
            self._arrived[index] = gradient.detach().clone() if so_far is None else so_far + gradient.detach()

        def before_forward(module: nn.Module, *_: object) -> None:
            parameter = getattr(module, name)
            if (
                id(parameter) not in watched and parameter.requires_grad
            ):  # a recomputed forward comes by twice
                watched.add(id(parameter))
                self._handles.append(parameter.register_hook(note))

        return before_forward


def _read_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _flat(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    size = getattr(parameter, "ds_numel", parameter.numel())
    if gradient is None:  # not every rank's batch needs every parameter
        return torch.zeros(size, dtype=torch.float64, device=parameter.device)
    return gradient.detach().double().flatten()
