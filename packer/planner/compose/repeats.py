"""Repeats: what two passes bring into one step is parted, where the source is no smaller than the step."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from packer.kernels import repeats as kernels
from packer.options.config import PlanConfig
from packer.planner.order.orders import subkey
from packer.planner.order.stream import REACH, Draw, count_sources
from packer.planner.packing.microbatches import MicroBatches

_SWEEPS = 4

_STEPS_MOVED = 1 << 10
"""Steps by which dealing and sequence move a sample at most, by far."""


def part_repeats(
    rows: NDArray[np.int64],
    is_copy: NDArray[np.bool_] | None,
    microbatches: MicroBatches,
    drawn: Draw,
    phases: NDArray[np.int64],
    config: PlanConfig,
    key: np.uint64,
) -> tuple[NDArray[np.int64], int]:
    """Exchange micro-batches between steps until none holds a sample twice that it need not.

    Args:
        rows: (R,) micro-batches of whole steps.
        is_copy: (R,) rows that repeat others on purpose; None where none does.
        microbatches: what they hold.
        drawn: what they were packed from.
        phases: (H,) the first step of every phase; exchanges stay inside one.
        config: the options.
        key: of the random choices.

    Returns:
        The rows; how many of them still hold a sample of their own step once more.
    """
    if drawn.places is None or drawn.sources is None or drawn.pass_sizes is None or not len(rows):
        return rows, 0
    used = count_sources(drawn.sources, len(drawn.pass_sizes))
    rooms = np.where(used > drawn.pass_sizes, drawn.pass_sizes, -1)
    step_size = config.microbatches_per_step
    num_steps = len(rows) // step_size
    is_copy = np.zeros(len(rows), np.bool_) if is_copy is None else is_copy
    # a pass that is smaller than every step may be in each of them twice
    in_rows = microbatches.sizes[rows] * ~is_copy
    of_steps = in_rows.reshape(num_steps, step_size).sum(axis=1)
    rooms[rooms < of_steps.min()] = -1
    # nor do two passes meet that are further apart than anything is moved
    reach = REACH[str(config.packing)] + _STEPS_MOVED * int(of_steps.max())
    rooms[drawn.pass_sizes / np.maximum(used, 1) * len(drawn.pieces) > 2 * reach] = -1
    if (rooms < 0).all():
        return rows, 0
    rows, is_met = rows.copy(), np.empty(len(rows), np.bool_)
    seen = np.empty(int(drawn.places.max()) + 1, np.int64)
    held = (drawn.places, drawn.sources, microbatches.starts, microbatches.sizes)

    def count() -> int:
        return int(
            kernels.find_repeats(microbatches.pieces, *held, rows, is_copy, step_size, rooms, seen, is_met)
        )

    left = count()
    edges = np.minimum(np.append(phases, num_steps), num_steps).tolist()
    for sweep in range(_SWEEPS):
        if left == 0 or microbatches.in_steps:
            break
        for number, (first, last) in enumerate(pairwise(edges)):
            mine = subkey(subkey(key, sweep), number)
            kernels.part_repeats(
                microbatches.pieces,
                microbatches.seqlens,
                *held,
                rows,
                is_copy,
                step_size,
                rooms,
                first,
                last,
                mine,
                seen,
                is_met,
            )
        left = count()
    return rows, left
