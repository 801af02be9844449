"""The learning-rate factor of a step: a function of its size, relative to a base.

``linear`` multiplies the rate with the batch (Goyal et al. 2017, for SGD); ``sqrt`` keeps the variance of the
update (Krizhevsky 2014; for Adam: Malladi et al. 2022).
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError
from packer.options.config import PlanConfig


def mean_size(sizes: Iterable[tuple[NDArray[np.int64], NDArray[np.bool_]]]) -> float:
    """Return the mean size of a step, over the full ones of all epochs; over all, where none is full.

    Args:
        sizes: per epoch the (T,) sizes, and whether each step is full: without filler or repeat.
    """
    full_sum = full_count = total_sum = total_count = 0
    for size, is_full in sizes:
        full_sum += int(size[is_full].sum())
        full_count += int(is_full.sum())
        total_sum += int(size.sum())
        total_count += len(size)
    if full_count:
        return full_sum / full_count
    return total_sum / max(total_count, 1)


def lr_scales(sizes: NDArray[np.int64], base: float | None, config: PlanConfig) -> NDArray[np.float64]:
    """Return the (T,) factors of steps of the given sizes; 1 where the rate is not scaled."""
    if config.lr_scaling == "none":
        return np.ones(len(sizes))
    if not base:
        raise ConfigError(
            f"--lr-by {config.lr_by} finds nothing to count: the mean over the steps is 0; give --lr-base, "
            "or choose --lr-by tokens"
        )
    scales = sizes / np.float64(base)
    if config.lr_scaling == "sqrt":
        scales = np.sqrt(scales)
    if config.lr_max_scale is not None:
        scales = np.minimum(scales, config.lr_max_scale)
    return scales
