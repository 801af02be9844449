"""Say before the first micro-batch what the plan's order costs on this data set, where it costs much."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import PackerWarning
from packer.plan import Plan
from packer.runtime.topology import Coordinates, row_of


def warn_of_rereading(plan: Plan, dataset: Any, at: Coordinates, num_processes: int) -> None:
    """Warn where a process of this rank reads many bytes for one that it needs.

    Args:
        plan: whose first micro-batches are played.
        dataset: with ``rereading(microbatches)``, as packer's own; of others nothing is known.
        at: this rank's place.
        num_processes: that read for this rank in turn.
    """
    if at.reads_samples and hasattr(dataset, "rereading"):
        found = dataset.rereading(_samples_of_a_process(plan, at, num_processes))
        if found is not None and found.is_dear:
            warnings.warn(found.told(), PackerWarning, stacklevel=3)


def _samples_of_a_process(plan: Plan, at: Coordinates, num_processes: int) -> Iterator[NDArray[np.integer]]:
    """Yield the sample ids that the first process reads in the first epoch, a micro-batch at a time."""
    epoch = plan.epoch(0)
    step_size = plan.dp_size * plan.grad_accum
    grad_accum = step_size // at.dp_size
    for number in range(0, epoch.num_steps * grad_accum, num_processes):
        step, accum = divmod(number, grad_accum)
        yield epoch.microbatch(row_of(step, accum, at.dp_rank, at.dp_size, step_size)).sample_ids
