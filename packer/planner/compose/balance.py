"""Balance: the ranks of a slot, which work at the same time, get micro-batches of like cost."""

import numpy as np
from numpy.typing import NDArray

from packer.kernels import balance as kernels
from packer.options.config import PlanConfig
from packer.plan.counts import time_lost
from packer.planner.compose.steps import Rows
from packer.planner.order.orders import Purpose, key_for
from packer.planner.order.threads import chunk_edges, run_chunks


def balance(
    rows: Rows, costs: NDArray[np.int64], config: PlanConfig, epoch: int
) -> tuple[Rows, float | None]:
    """Rearrange the rows inside each step, so that its samples stay its own.

    Args:
        rows: whole steps.
        costs: (M,) of all micro-batches.
        config: the options.
        epoch: whose random choices are meant.

    Returns:
        The rows, and how much longer the ranks would have taken than with even work; None where nothing was
        balanced.
    """
    if config.balance == "none" or config.dp_size == 1:
        return rows, None
    step_size = config.microbatches_per_step
    of_rows = costs[rows.microbatches]
    before, _ = time_lost(of_rows, config.dp_size, config.accum)
    positions = np.arange(len(of_rows), dtype=np.int64)
    key = key_for(config.seed, epoch, Purpose.BALANCE)
    run_chunks(
        lambda _, first, last: kernels.even_out_slots(
            of_rows, step_size, config.dp_size, first, last, key, positions
        ),
        chunk_edges(len(of_rows) // step_size, min_chunk=1 << 10),
    )
    balanced = Rows(
        microbatches=rows.microbatches[positions],
        is_filler=rows.is_filler[positions],
        is_repeat=rows.is_repeat[positions],
        left_out=rows.left_out,
    )
    return balanced, before
