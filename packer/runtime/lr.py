"""The learning rate of a step: the base rate, which optimizer and schedule keep, times the factor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def scaled_lr(optimizer: Any, scale: float) -> Iterator[None]:
    """Multiply every learning rate of an optimizer while the block runs.

    Schedules that read the rate between two updates find the base rate, so any of them goes with any batch
    size.

    Args:
        optimizer: A torch optimizer, or a framework's wrapper with ``param_groups``.
        scale: ``step.lr_scale``.
    """
    groups = list(optimizer.param_groups)
    base_rates = [_copied(group["lr"]) for group in groups]
    try:
        for group in groups:
            _set_rate(group, group["lr"] * scale)
        yield
    finally:
        for group, rate in zip(groups, base_rates, strict=True):
            _set_rate(group, rate)


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a group's rate; a tensor keeps its identity, since captured graphs hold on to it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate
