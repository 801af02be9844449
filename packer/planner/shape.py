"""The few shapes of a plan: at most N padded lengths, chosen so that padding to them costs least."""

import numpy as np
from numpy.typing import NDArray

from packer.kernels import shapes as kernels
from packer.kernels.limits import Limits


def choose_shapes(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], *, num_shapes: int, multiple: int
) -> NDArray[np.int64]:
    """Return at most ``num_shapes`` rising shapes, the last of which holds the longest.

    The sum of all padded lengths is the least that so many multiples of ``multiple`` allow.

    Args:
        lengths: (L,) distinct lengths, rising.
        counts: (L,) how many there are of each.
        num_shapes: how many values S or T may take.
        multiple: every shape is a multiple of it.
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
    kernels.choose(candidates.astype(np.int64), below, came)
    chosen, end = [], len(candidates) - 1
    for level in range(num_shapes - 1, -1, -1):
        chosen.append(int(candidates[end]))
        end = int(came[level, end]) - 1
        if end < 0:
            break
    return np.array(chosen[::-1], np.int64)


def pad_to(limits: Limits, seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return S or T of micro-batches that hold ``seqlens`` tokens a row."""
    if len(limits.shapes):
        return limits.shapes[np.searchsorted(limits.shapes, seqlens)]
    if limits.multiple == 1:
        return seqlens
    return -(-seqlens // limits.multiple) * limits.multiple
