"""From options to the bounds of a micro-batch as kernels understand them."""

import numpy as np
from numpy.typing import NDArray

from packer.kernels.limits import UNLIMITED, Limits
from packer.options.bounds import full_row, row_room
from packer.options.config import PlanConfig


def limits_for(config: PlanConfig, shapes: NDArray[np.int64] | None = None) -> Limits:
    """Return the bounds of one micro-batch.

    Args:
        config: the options.
        shapes: the values that S may take, where ``num_shapes`` chose them.
    """
    packed = config.layout == "packed"
    if shapes is None:
        shapes = np.array([config.fixed_seqlen] if config.fixed_seqlen else [], np.int64)
    room, segment_multiple = row_room(config)
    if config.packing == "wrapped":
        room = full_row(config)
    return Limits(
        budgets=np.array([room] if packed else list(config.budgets.values()), np.int64),
        packed=packed,
        real=config.count == "real",
        min_samples=config.min_samples,
        max_samples=config.max_samples or UNLIMITED,
        max_attention=config.max_attention or UNLIMITED,
        multiple=config.padded_multiple,
        segment_multiple=segment_multiple,
        shapes=shapes,
    )
