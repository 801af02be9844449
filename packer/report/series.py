"""Quantities along the steps of a plan, in few enough points to draw."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.plan import Plan


class Series(NamedTuple):
    """A quantity over consecutive stretches of steps."""

    mean: list[float]
    low: list[float]
    """Smallest value of each stretch."""
    high: list[float]
    """Largest value of each stretch."""


def binned(values: Iterable[NDArray[np.number]], num_values: int, num_bins: int) -> Series:
    """Return mean, smallest and largest value of up to ``num_bins`` stretches of equal length.

    Args:
        values: pieces of one long array.
        num_values: how long it is.
        num_bins: the most stretches to return.
    """
    num_bins = min(num_bins, num_values)
    # (num_bins + 1,) where the stretches begin
    edges = np.linspace(0, num_values, num_bins + 1).astype(np.int64)
    total = np.zeros(num_bins)
    low, high = np.full(num_bins, np.inf), np.full(num_bins, -np.inf)
    first = 0
    for piece in values:
        at = np.searchsorted(edges, np.arange(first, first + len(piece)), side="right") - 1
        starts = np.flatnonzero(np.diff(at, prepend=-1))
        bins = at[starts]
        total[bins] += np.add.reduceat(piece.astype(np.float64), starts)
        low[bins] = np.minimum(low[bins], np.minimum.reduceat(piece, starts))
        high[bins] = np.maximum(high[bins], np.maximum.reduceat(piece, starts))
        first += len(piece)
    return Series((total / np.diff(edges)).tolist(), low.tolist(), high.tolist())


def over_steps(plan: Plan, column: str, num_bins: int) -> Series:
    """Return a column of ``steps.arrow`` along all steps of all epochs."""
    tables = (table for epoch in range(plan.num_epochs) for table in plan.epoch(epoch).steps())
    num_steps = sum(counts["num_steps"] for counts in plan.header["epochs"])
    return binned((getattr(table, column) for table in tables), num_steps, num_bins)
