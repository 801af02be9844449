"""Repeats: what two passes bring into one step is parted, where the source is no smaller than the step."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels import repeats as kernels
from packer.options.config import PlanConfig
from packer.planner.compose.steps import Rows
from packer.planner.order.orders import Purpose, key_for, subkey
from packer.planner.order.stream import Draw
from packer.planner.packing.microbatches import MicroBatches

_SWEEPS = 4


def part_repeats(
    rows: Rows,
    microbatches: MicroBatches,
    drawn: Draw,
    phases: NDArray[np.int64],
    config: PlanConfig,
    epoch: int,
) -> tuple[Rows, int]:
    """Exchange micro-batches between steps until none holds a sample twice that it need not.

    Args:
        rows: whole steps.
        microbatches: what they hold.
        drawn: what they were packed from.
        phases: (H,) the first step of every phase; exchanges stay inside one.
        config: the options.
        epoch: whose random choices are meant.

    Returns:
        The rows; how many of them still hold a sample of their own step once more.
    """
    if drawn.places is None or drawn.sources is None or drawn.pass_sizes is None:
        return rows, 0
    used = np.bincount(drawn.sources, minlength=len(drawn.pass_sizes))
    rooms = np.where(used > drawn.pass_sizes, drawn.pass_sizes, -1)
    step_size = config.microbatches_per_step
    num_steps = len(rows.microbatches) // step_size
    is_copy = rows.is_filler | rows.is_repeat
    # a pass that is smaller than every step may be in each of them twice
    in_rows = microbatches.sizes[rows.microbatches] * ~is_copy
    rooms[rooms < in_rows.reshape(num_steps, step_size).sum(axis=1).min()] = -1
    if (rooms < 0).all():
        return rows, 0
    order, is_met = rows.microbatches.copy(), np.empty(len(is_copy), np.bool_)
    seen = np.empty(int(drawn.places.max()) + 1, np.int64)

    def found() -> int:
        return int(
            kernels.find_repeats(
                microbatches.pieces,
                drawn.places,
                drawn.sources,
                microbatches.starts,
                microbatches.sizes,
                order,
                is_copy,
                step_size,
                rooms,
                seen,
                is_met,
            )
        )

    key = key_for(config.seed, epoch, Purpose.REPEATS)
    left = found()
    for sweep in range(_SWEEPS):
        if left == 0 or microbatches.in_steps:
            break
        for number, (first, last) in enumerate(zip(phases, np.append(phases[1:], num_steps), strict=True)):
            kernels.part_repeats(
                microbatches.pieces,
                drawn.places,
                drawn.sources,
                microbatches.starts,
                microbatches.sizes,
                order,
                is_copy,
                step_size,
                rooms,
                min(int(first), num_steps),
                min(int(last), num_steps),
                subkey(subkey(key, sweep), number),
                seen,
                is_met,
            )
        left = found()
    return replace(rows, microbatches=order), left
