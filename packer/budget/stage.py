"""The user's training, set up as in the middle of a step: gradients held, the optimizer's state allocated."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from packer.budget import ranks
from packer.budget.device import Device, Peak, is_out_of_memory
from packer.budget.snapshot import Stateful, left_as_it_was
from packer.errors import ConfigError, PlanError
from packer.runtime.batches.batch import Batch
from packer.runtime.rate_and_loss import scaled_lr

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is rehearsed, as the user hands it over."""

    train_step: Callable[[Batch], Tensor]
    """From a micro-batch to its loss."""
    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    also: Sequence[Stateful] = field(default=())
    """What else a step changes and can put back."""
    backward: Callable[[Tensor], Any] = Tensor.backward
    update: Callable[[], Any] | None = None
    """What the loop calls for an update, where it is not ``optimizer.step()``."""

    @classmethod
    def of(cls, train_step: Callable[[Batch], Tensor], model: Any, optimizer: Any, **more: Any) -> "Training":
        """Take one model or several, one optimizer or several.

        Raises:
            ConfigError: They are none.
        """
        modules = (model,) if isinstance(model, nn.Module) else tuple(model)
        optimizers = (optimizer,) if hasattr(optimizer, "param_groups") else tuple(optimizer)
        for kind, parts, sign in (
            ("model", modules, "parameters"),
            ("optimizer", optimizers, "param_groups"),
        ):
            if not parts or not all(hasattr(part, sign) for part in parts):
                raise ConfigError(
                    f"{kind}= is to be a torch {kind} or several of them; what a run takes is measured with "
                    "the optimizer's state allocated, and all is put back as it was"
                )
        return cls(train_step=train_step, modules=modules, optimizers=optimizers, **more)

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is on the device before the first micro-batch."""
        for module in self.modules:
            for tensor in (*module.parameters(), *module.buffers()):
                yield tensor
                if tensor.grad is not None:
                    yield tensor.grad
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


class Stage:
    """Plays micro-batches through a training and measures them."""

    def __init__(self, training: Training, device: Device) -> None:
        self._training = training
        self._device = device
        self.can_fail = ranks.world_size() == 1
        """Running out of memory is survived; several ranks would wait for the one that did."""

    @contextmanager
    def set(self) -> Iterator[None]:
        """Leave everything as it was when the block ends."""
        training, device = self._training, self._device
        device.note(training.tensors())
        with left_as_it_was(training.modules, training.optimizers, training.also, device):
            try:
                yield
            finally:
                self._let_gradients_go()
        device.release()

    def warm_up(self, batch: Batch) -> bool:
        """Play a micro-batch, allocate the optimizer's state, and play another: gradients are held now."""
        self._play(batch)
        self.update()
        self._play(batch)
        return True

    def constant(self) -> int:
        """Return the bytes that are taken now, between two micro-batches."""
        self._device.reset_peak()
        return self._device.peak().allocated

    def play(self, batch: Batch) -> tuple[Peak, float]:
        """Play a micro-batch while gradients are held; return its peak and its seconds.

        Raises:
            ConfigError: ``train_step`` returned no loss.
        """
        self._device.reset_peak()
        start = time.perf_counter()
        self._play(batch)
        self._device.synchronize()
        seconds = time.perf_counter() - start
        return self._device.peak(), seconds

    def update(self) -> tuple[Peak, float]:
        """Update with a rate of 0, so that weights stay; return its peak and its seconds."""
        self._device.reset_peak()
        start = time.perf_counter()
        with ExitStack() as still:
            for optimizer in self._training.optimizers:
                still.enter_context(scaled_lr(optimizer, 0.0))
            if self._training.update is not None:
                self._training.update()
            else:
                for optimizer in self._training.optimizers:
                    optimizer.step()
        self._device.synchronize()
        seconds = time.perf_counter() - start
        return self._device.peak(), seconds

    def lap(self, batches: Sequence[Batch]) -> float:
        """Play micro-batches one after the other, as a step does, without waiting between them; seconds."""
        self._device.synchronize()
        start = time.perf_counter()
        for batch in batches:
            self._play(batch)
        self._device.synchronize()
        return time.perf_counter() - start

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """Return what ``work`` returns, or None if memory did not do; what it took is given back then.

        Raises:
            PlanError: Memory did not do on one of several ranks, for which the others wait.
        """
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self.can_fail:
                raise PlanError(
                    f"rank {ranks.rank()} ran out of memory, and {ranks.world_size()} ranks cannot go on "
                    "without it; begin with a plan of smaller --max-tokens, or on one rank"
                ) from error
        # Only here, where the error is gone, nothing holds the tensors of the frames that it came through.
        self._device.release()
        return None

    def _play(self, batch: Batch) -> None:
        loss = self._training.train_step(batch)
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            is_tensor = isinstance(loss, Tensor)
            found = f"tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
            raise ConfigError(
                f"train_step returned a {found}; let it return the micro-batch's loss, one number that has "
                "gradients, and leave backward and the update to the rehearsal"
            )
        self._training.backward(loss)

    def _let_gradients_go(self) -> None:
        for module in self._training.modules:
            for parameter in module.parameters():
                parameter.grad = None


def gigabytes(num_bytes: float) -> str:
    """Return bytes for a person: ``139.8 GB``, ``12.3 MB``."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
