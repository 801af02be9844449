"""What a micro-batch may hold, as plain numbers that kernels understand."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.kernels._jit import inline

UNLIMITED = 2**62


class Limits(NamedTuple):
    """The bounds of one micro-batch, in int64. A sample has K lengths: one, unless budgets are several."""

    budgets: NDArray[np.int64]
    """(K,) tokens of a padded micro-batch, per length; in the packed layout (1,) the room of a row."""
    packed: bool
    """One row of samples end to end, rather than one sample a row."""
    real: bool
    """Padded layout: budgets count the samples' tokens, not the tensor's."""
    min_samples: int
    max_samples: int
    max_attention: int
    """Bounds B·S² (padded) or Σ len² (packed)."""
    multiple: int
    """S or T is a multiple of it, unless shapes say more."""
    segment_multiple: int
    """Packed layout: the room of a sample is a multiple of it."""
    shapes: NDArray[np.int64]
    """The values that S or T may take, rising; empty where any multiple will do."""


@inline
def round_up(limits, seqlen):
    """Return S or T for ``seqlen`` tokens; the largest shape must not be below."""
    shapes = limits.shapes
    if len(shapes) > 0:
        low, high = 0, len(shapes) - 1
        while low < high:
            middle = (low + high) >> 1
            if shapes[middle] < seqlen:
                low = middle + 1
            else:
                high = middle
        return shapes[low]
    if limits.multiple == 1:
        return np.int64(seqlen)
    return (np.int64(seqlen) + limits.multiple - 1) // limits.multiple * limits.multiple


@inline
def room(limits, seqlen):
    """Return what a sample takes of a packed row."""
    if limits.segment_multiple == 1:
        return np.int64(seqlen)
    return (
        (np.int64(seqlen) + limits.segment_multiple - 1) // limits.segment_multiple * limits.segment_multiple
    )


@inline
def padded_fits(limits, budget, num_samples, longest, total):
    """Say whether rows, the longest of ``longest`` tokens, ``total`` together, keep the bounds."""
    if num_samples > limits.max_samples:
        return False
    seqlen = round_up(limits, longest)
    if seqlen > 0 and seqlen > limits.max_attention // num_samples // seqlen:
        return False
    if limits.real:
        return total <= budget
    return num_samples * seqlen <= budget
