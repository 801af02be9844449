"""How memory and time grow with a micro-batch: a constant, a part by its tokens, a part by its attention."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Sized(Protocol):
    """What a micro-batch's cost depends on."""

    @property
    def area(self) -> int:
        """Tokens of its tensors."""

    @property
    def attention(self) -> int:
        """B·S², or Σ len²."""


class Size(NamedTuple):
    """The size of a micro-batch by itself."""

    area: int
    attention: int


NOTHING = Size(0, 0)
"""No micro-batch at all: what is there before one comes is a measurement, too."""


class Law(NamedTuple):
    """constant + per_token · area + per_square · attention; no part is negative."""

    constant: float
    per_token: float
    per_square: float = 0.0

    @classmethod
    def fit(cls, sizes: Sequence[Sized], costs: Sequence[float]) -> "Law | None":
        """Fit what was measured; None where it says nothing of growth.

        The part of attention is taken in only where the measurements tell it from that of the tokens.
        """
        area = np.array([size.area for size in sizes], np.float64)
        attention = np.array([size.attention for size in sizes], np.float64)
        cost = np.array(costs, np.float64)
        if len(set(area.tolist())) < 2 and len(set(attention.tolist())) < 2:
            return None
        columns = [np.ones_like(area), area, attention]
        for parts in ((0, 1, 2), (0, 1), (0, 2)):
            found = _solve([columns[part] for part in parts], cost)
            if found is not None:
                coefficients = dict(zip(parts, found, strict=True))
                return cls(*(coefficients.get(part, 0.0) for part in range(3)))
        return None

    def cost(self, size: Sized) -> float:
        """Return what a micro-batch costs."""
        return self.constant + self.per_token * size.area + self.per_square * size.attention

    def misfit(self, sizes: Sequence[Sized], costs: Sequence[float]) -> float:
        """Return the largest error over what was measured, as a share of it."""
        return max(abs(self.cost(size) / cost - 1) for size, cost in zip(sizes, costs, strict=True))

    def attention_share(self, size: Sized) -> float:
        """Return which share of what grows is its attention's."""
        growing = self.cost(size) - self.constant
        return self.per_square * size.attention / growing if growing > 0 else 0.0


def _solve(columns: list[NDArray[np.float64]], cost: NDArray[np.float64]) -> list[float] | None:
    """Solve least squares; None where the measurements are too few or too alike, or a part is negative."""
    scales = [float(np.abs(column).max()) or 1.0 for column in columns]
    matrix = np.stack([column / scale for column, scale in zip(columns, scales, strict=True)], axis=1)
    found, _, rank, singular = np.linalg.lstsq(matrix, cost, rcond=None)
    if rank < len(columns) or singular[-1] < 1e-3 * singular[0] or (found[1:] < 0).any():
        return None
    return [max(float(value) / scale, 0.0) for value, scale in zip(found, scales, strict=True)]
