"""What the ranks of a run tell each other; a process alone tells itself."""

from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def world_size() -> int:
    """Return how many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return which of them this process is."""
    return dist.get_rank() if world_size() > 1 else 0


def from_all(value: Value) -> list[Value]:
    """Return every rank's value, by rank; every rank calls it."""
    if world_size() == 1:
        return [value]
    values: list[Value | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]
