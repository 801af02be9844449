"""The learning rate of a step: the base rate, which optimizer and schedule keep, times the step's factor."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from packer.errors import ConfigError
from packer.plan import Plan
from packer.runtime.batches.batch import StepInfo

By = Literal["steps", "tokens", "samples"]

_FOLLOWED: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers that a ``PlanLR`` scales."""


@contextmanager
def scaled_lr(optimizer: Any, scale: float) -> Iterator[None]:
    """Multiply every learning rate of an optimizer while the block runs.

    Between two updates the optimizer holds the base rate, so any schedule goes with any batch size.

    Args:
        optimizer: A torch optimizer, or a framework's wrapper of one.
        scale: ``step.lr_scale``.

    Raises:
        ConfigError: It is no optimizer, or a ``PlanLR`` scales it already.
    """
    if _innermost(optimizer) in _FOLLOWED:
        raise ConfigError("a PlanLR scales this optimizer already; use either it or scaled_lr")
    base_rates = _scale(optimizer.param_groups, scale)
    try:
        yield
    finally:
        _restore(base_rates)


class HasCurrentStep(Protocol):
    """What ``PlanLR`` asks of a loader."""

    @property
    def current_step(self) -> StepInfo:
        """The step being executed."""


class PlanLR(LRScheduler):
    """The step's factor as a scheduler object, around any torch scheduler, for frameworks that want one.

    The factor is applied when ``optimizer.step()`` begins and taken back when it ends; it is looked up in the
    plan for the step that the loader is handing out. So it belongs to the step being executed, whatever the
    framework skips or repeats, and the scheduler inside reads and writes base rates only. ``step()`` is
    called where the framework would call the inner scheduler's.

    With ``by="tokens"`` or ``"samples"`` the inner schedule advances in proportion to what was consumed, such
    that it has taken as many steps as the plan has when the plan ends; over steps of equal size it advances
    as with ``by="steps"``.
    """

    def __init__(  # the base class's would take the rates over and step once
        self,
        optimizer_or_scheduler: Any,
        plan: Plan,
        loader: HasCurrentStep,
        *,
        by: By = "steps",
    ) -> None:
        """Follow a loader.

        Args:
            optimizer_or_scheduler: An optimizer, whose rate then is constant, or a scheduler that has one.
            plan: The plan that is played.
            loader: The ``PlanLoader`` that plays it.
            by: What advances the inner schedule.

        Raises:
            ConfigError: ``by`` is not known, it is neither optimizer nor scheduler, or another ``PlanLR``
                scales the optimizer already.
        """
        if by not in get_args(By):
            raise ConfigError(f"by={by!r} is not known; choose one of {', '.join(get_args(By))}")
        is_optimizer = hasattr(optimizer_or_scheduler, "param_groups")
        self._inner = None if is_optimizer else optimizer_or_scheduler
        target = _innermost(optimizer_or_scheduler)  # a scheduler holds its optimizer as a wrapper does
        self.optimizer = optimizer_or_scheduler if is_optimizer else optimizer_or_scheduler.optimizer
        self._loader = loader
        self._by = by
        last = plan.epoch(plan.num_epochs - 1)
        end = last.step(last.num_steps - 1)
        self._plan_size = {
            "steps": sum(plan.epoch(epoch).num_steps for epoch in range(plan.num_epochs)),
            "tokens": end.tokens_before + end.num_tokens,
            "samples": end.samples_before + end.num_samples,
        }
        self._inner_steps = 0
        self._used: dict[int, Any] = {}
        self._base_rates: list[tuple[dict[str, Any], Any]] = []
        if target in _FOLLOWED:
            raise ConfigError("another PlanLR scales this optimizer already; keep one")
        _FOLLOWED.add(target)
        self._hooks = [
            target.register_step_pre_hook(self._before_update),
            target.register_step_post_hook(self._after_update),
        ]

    def detach(self) -> None:
        """Let go of the optimizer: its updates use the rates that it holds, which are the base rates.

        Then another ``PlanLR``, or ``scaled_lr``, may take it over; it lives on with the inner schedule.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _restore(self._base_rates)
        self._base_rates = []
        _FOLLOWED.discard(_innermost(self.optimizer))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the inner schedule; arguments, such as a metric to watch, are passed on to it."""
        steps = 1 if self._by == "steps" else self._steps_due() - self._inner_steps
        for _ in range(steps):
            if self._inner is not None:
                self._inner.step(*args, **kwargs)
            self._inner_steps += 1

    def get_last_lr(self) -> list[Any]:
        """Return each group's rate as the last update really used it, or the first one will."""
        scale = self._loader.current_step.lr_scale
        return [self._used.get(_key(group), group["lr"] * scale) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        """Return what ``get_last_lr`` does."""
        return self.get_last_lr()

    @property
    def base_lrs(self) -> list[Any]:  # type: ignore[override]
        """Each group's rate at the start of the schedule."""
        return [group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups]

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """How often the inner schedule was advanced."""
        return self._inner_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the inner schedule's state, and how far it was advanced."""
        return {
            "inner": None if self._inner is None else self._inner.state_dict(),
            "inner_steps": self._inner_steps,
            "used": [self._used.get(_key(group)) for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of a run; the loader's position is part of the loader's own state."""
        self._inner_steps = state_dict["inner_steps"]
        groups = zip(self.optimizer.param_groups, state_dict["used"], strict=True)
        self._used = {_key(group): rate for group, rate in groups if rate is not None}
        if self._inner is not None:
            self._inner.load_state_dict(state_dict["inner"])

    def _steps_due(self) -> int:
        """Return how many steps of the inner schedule are due when the step being executed is done."""
        step = self._loader.current_step
        if self._by == "tokens":
            consumed = step.tokens_before + step.num_tokens
        else:
            consumed = step.samples_before + step.num_samples
        return consumed * self._plan_size["steps"] // self._plan_size[self._by]

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _restore(self._base_rates)  # an update that raised an error was not followed by the other hook
        self._base_rates = _scale(optimizer.param_groups, self._loader.current_step.lr_scale)
        self._used |= {_key(group): _copied(group["lr"]) for group in optimizer.param_groups}

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _restore(self._base_rates)
        self._base_rates = []


def _innermost(optimizer: Any) -> Optimizer:
    """Return the torch optimizer that a framework's wrappers hold.

    Raises:
        ConfigError: There is none.
    """
    given = optimizer
    while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
        if not hasattr(optimizer, "optimizer"):
            raise ConfigError(
                f"a {type(given).__name__} is no optimizer, and holds none as .optimizer; give a torch "
                "optimizer, or a framework's wrapper of one"
            )
        optimizer = optimizer.optimizer
    return optimizer


def _key(group: dict[str, Any]) -> int:
    """Tell a group from the others, also once a state was loaded, or where DeepSpeed shows one at a time."""
    return id(group["params"][0]) if group["params"] else 0


def _scale(groups: list[dict[str, Any]], scale: float) -> list[tuple[dict[str, Any], Any]]:
    """Multiply the groups' rates and return what they were."""
    base_rates = [(group, _copied(group["lr"])) for group in groups]
    for group, rate in base_rates:
        _set_rate(group, rate * scale)
    return base_rates


def _restore(base_rates: list[tuple[dict[str, Any], Any]]) -> None:
    for group, rate in base_rates:
        _set_rate(group, rate)


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a group's rate; a tensor keeps its identity, since captured graphs hold on to it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate
