"""Work that one process does for many: the others wait as long as it takes, and hear of its failure."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from packer.errors import PackerError

_PATIENCE = timedelta(days=7)
"""Measuring a data set may take longer than a training group waits for a collective."""


class Together:
    """The processes of a run, or this one alone; open it with ``together``."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)

    def run(self, mine: bool, work: Callable[[], Any]) -> None:
        """Do ``work`` on those processes whose turn it is, and leave once it is done everywhere.

        Raises:
            PackerError: The work failed, here or elsewhere: every process raises.
        """
        failure: BaseException | None = None
        if mine:
            try:
                work()
            except Exception as error:
                failure = error
        told = failure if isinstance(failure, PackerError) else _as_packer_error(failure, self.rank)
        failures = [error for error in self.gather(told) if error is not None]
        if failure is not None:
            raise failure
        if failures:
            raise failures[0]

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has, in the order of ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def share(self, value: Any) -> Any:
        """Return what the first process has."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]


def sum_over_processes(values: Sequence[float]) -> list[float]:
    """Return each number's sum over the training's processes, which all call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(values)
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    totals = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return [float(total) for total in totals.tolist()]


@contextmanager
def together() -> Iterator[Together]:
    """Open a group of all processes that waits for days, over the network and on no GPU."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield Together(None)
        return
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        yield Together(group)
    finally:
        dist.destroy_process_group(group)


def _as_packer_error(error: BaseException | None, rank: int) -> PackerError | None:
    """Return what can be told other processes of an error whose class they may not be able to unpickle."""
    if error is None:
        return None
    return PackerError(f"rank {rank} failed, see there: {type(error).__name__}: {error}")
