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
def round_up(multiple, shapes, seqlen):
    """Return S or T for ``seqlen`` tokens: the next of ``shapes``, or if there are none the next multiple."""
    if len(shapes) > 0:
        low, high = 0, len(shapes) - 1
        while low < high:
            middle = (low + high) >> 1
            if shapes[middle] < seqlen:
                low = middle + 1
            else:
                high = middle
        return shapes[low]
    return next_multiple(multiple, seqlen)


@inline
def next_multiple(multiple, seqlen):
    """Return the next multiple; without a division, where it can be, for that takes longer than all else."""
    if multiple == 1:
        return seqlen
    return (seqlen + multiple - 1) // multiple * multiple


# Kernels hand these the bounds one by one: a tuple that holds arrays costs a hundred times the comparison.


@inline
def count_fits(max_samples, max_attention, num_samples, padded):
    """Say whether ``num_samples`` rows of ``padded`` tokens keep the bounds on samples and attention."""
    if num_samples > max_samples:
        return False
    return max_attention >= UNLIMITED or padded <= max_attention // num_samples // padded


@inline
def budget_fits(budget, real, num_samples, padded, total):
    """Say whether ``num_samples`` rows of ``padded`` tokens, ``total`` of them real, keep a budget."""
    if real:
        return total <= budget
    return num_samples * padded <= budget
