"""How few packed rows there can be."""

import numpy as np
from numpy.typing import NDArray

from packer.kernels.limits import Limits


def lower_bound(lengths: NDArray[np.int64], counts: NDArray[np.int64], limits: Limits) -> int:
    """Return max(⌈Σ/C⌉, L2, ⌈n/max_samples⌉) rows for a histogram of lengths.

    L2 (Martello and Toth 1990): for any k, samples over C − k sit alone, those over C/2 each open a row, and
    what those of k to C/2 take beyond the room that the latter leave needs further rows.

    Args:
        lengths: (L,) distinct lengths, rising.
        counts: (L,) samples of each.
        limits: bounds of a row.
    """
    capacity = int(limits.budgets[0])
    rooms = -(-lengths // limits.segment_multiple) * limits.segment_multiple
    number = np.append(np.zeros(1, np.int64), np.cumsum(counts))
    filled = np.append(np.zeros(1, np.int64), np.cumsum(counts * rooms))
    num_samples, total = int(number[-1]), int(filled[-1])
    half = np.searchsorted(rooms, capacity // 2, side="right")
    # every k that changes a class: the distinct rooms up to C/2, and 0
    small = np.append(np.zeros(1, np.int64), rooms[:half])
    least = np.searchsorted(rooms, small, side="left")
    alone = np.searchsorted(rooms, capacity - small, side="right")
    medium = number[alone] - number[half]
    beyond = (filled[half] - filled[least]) - (medium * capacity - (filled[alone] - filled[half]))
    martello_toth = num_samples - number[half] + np.maximum(0, -(-beyond // capacity))
    return max(
        -(-total // capacity), int(martello_toth.max(initial=0)), -(-num_samples // limits.max_samples)
    )
