"""Say before the first micro-batch what the plan's order costs on this data set, where it costs much."""

import warnings
from typing import Any

from packer.errors import PackerWarning
from packer.plan import Plan
from packer.plan.rereading import samples_of_a_process
from packer.runtime.topology import Coordinates


def warn_of_rereading(plan: Plan, dataset: Any, at: Coordinates, num_processes: int) -> None:
    """Warn where a process of this rank reads many bytes for one that it needs.

    Args:
        plan: whose first micro-batches are played.
        dataset: with ``rereading(microbatches)``, as packer's own; of others nothing is known.
        at: this rank's place.
        num_processes: that read for this rank in turn.
    """
    if at.reads_samples and hasattr(dataset, "rereading"):
        found = dataset.rereading(samples_of_a_process(plan, at.dp_rank, at.dp_size, num_processes))
        if found is not None and found.is_dear:
            warnings.warn(found.told(), PackerWarning, stacklevel=3)
