"""The few shapes of a plan: at most N padded lengths, chosen so that padding to them costs least."""

import numpy as np
from numpy.typing import NDArray

from packer.kernels import shapes as kernels
from packer.kernels.limits import UNLIMITED, Limits

CHARGE_DIVISOR = 4
"""A micro-batch is charged 1/4 of its budget besides its padded tokens. Without a charge every length would
get micro-batches of its own; at 1/4 there are hardly more micro-batches than the fewest, and less padding."""


def choose_shapes(
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    num_shapes: int,
    multiple: int,
    budget: int | None = None,
    max_samples: int = UNLIMITED,
) -> NDArray[np.int64]:
    """Return at most ``num_shapes`` rising shapes, the last of which holds the longest.

    Their cost is the least that so many multiples of ``multiple`` allow: the sum of all padded lengths; where
    micro-batches hold several samples, that of what a sample takes of a micro-batch of ⌊budget / S⌋, whose
    tensor is charged as packing charges it.

    Args:
        lengths: (L,) distinct lengths, rising.
        counts: (L,) how many there are of each.
        num_shapes: how many values S or T may take.
        multiple: every shape is a multiple of it.
        budget: tokens of a padded micro-batch; None for rows that are shapes themselves.
        max_samples: samples that a micro-batch may hold.
    """
    rounded = -(-lengths // multiple) * multiple
    candidates, inverse = np.unique(rounded, return_inverse=True)
    # (L,) -> (C,) how many are rounded to each candidate
    weights = np.bincount(inverse, weights=None, minlength=len(candidates)) * 0
    np.add.at(weights, inverse, counts)
    if len(candidates) <= num_shapes:
        return candidates.astype(np.int64)
    below = np.append(np.zeros(1, np.int64), np.cumsum(weights, dtype=np.int64))
    came = np.empty((num_shapes, len(candidates)), np.int32)
    kernels.choose(_costs(candidates.astype(np.int64), int(below[-1]), budget, max_samples), below, came)
    chosen, end = [], len(candidates) - 1
    for level in range(num_shapes - 1, -1, -1):
        chosen.append(int(candidates[end]))
        end = int(came[level, end]) - 1
        if end < 0:
            break
    return np.array(chosen[::-1], np.int64)


def _costs(
    shapes: NDArray[np.int64], num_samples: int, budget: int | None, max_samples: int
) -> NDArray[np.int64]:
    """Return what a sample costs that is padded to each shape, in fractions of a token."""
    if budget is None:
        return shapes
    shift = min(10, max(0, 60 - (max(int(shapes[-1]), budget) * num_samples).bit_length()))
    fitting = np.clip(budget // shapes, 1, max_samples)
    return (shapes << shift) + (budget << shift) // CHARGE_DIVISOR // fitting


def pad_to(limits: Limits, seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return S or T of micro-batches that hold ``seqlens`` tokens a row."""
    if len(limits.shapes):
        return limits.shapes[np.searchsorted(limits.shapes, seqlens)]
    if limits.multiple == 1:
        return seqlens
    return -(-seqlens // limits.multiple) * limits.multiple
