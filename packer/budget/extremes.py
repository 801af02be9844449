"""The extreme micro-batches of a plan: whatever else comes is no larger than these in what memory sees."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from packer.plan import Extents, MicroBatches, Plan

_FEW_SHAPES = 16
"""A plan that asks for few shapes, and has no more, shows each: what is compiled or captured holds memory."""

_SHAPE_OPTIONS = ("num_shapes", "fixed_seqlen", "same_seqlen", "same_num_samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extreme:
    """A micro-batch of the plan, and what is extreme about it."""

    names: tuple[str, ...]
    epoch: int
    row: int
    """(step · grad_accum + accum) · dp_size + dp_rank."""
    num_rows: int
    """B; 1 in the packed layout."""
    seqlen: int
    """S, or T; of pairs of sequences the longer one's."""
    num_samples: int
    tokens: int
    """Real ones."""
    area: int
    """Tokens of the tensors, padding included."""
    attention: int
    """B·S², or Σ len² of a packed row."""

    @property
    def shape(self) -> str:
        """``B × S``, or ``1 × T``."""
        return f"{self.num_rows:,} × {self.seqlen:,}"


def find_extremes(plan: Plan) -> list[Extreme]:
    """Return the extreme micro-batches of all epochs, the smallest tensor first; each once.

    They are the largest S or T, the most samples, the largest tensor (with the most attention among equals),
    the most attention, the smallest tensor, of pairs of sequences the largest tensor of each, and, of a plan
    with few shapes, one of each.
    """
    candidates: dict[str, tuple[tuple[int, ...], int, int, Extents]] = {}
    asks_for_shapes = any(plan.config.get(option) for option in _SHAPE_OPTIONS)
    shapes: dict[tuple[int, int], tuple[int, int, Extents]] | None = {} if asks_for_shapes else None
    for epoch in range(plan.num_epochs):
        for rows in plan.epoch(epoch).microbatches():
            extents = Extents.of(rows, plan.layout)
            for name, keys in _measures(extents, rows).items():
                at = int(np.lexsort(keys[::-1])[-1])
                found = tuple(int(key[at]) for key in keys)
                if name not in candidates or found > candidates[name][0]:
                    candidates[name] = found, epoch, rows.first_row + at, _one(extents, at)
            if shapes is not None:
                shapes = _noted_shapes(shapes, extents, epoch, rows.first_row)
    found_at: dict[tuple[int, int], tuple[list[str], Extents]] = {}
    for name, (_, epoch, row, extents) in candidates.items():
        found_at.setdefault((epoch, row), ([], extents))[0].append(name)
    has_shape = {(int(e.num_rows[0]), int(e.seqlen[0])) for _, e in found_at.values()}
    for shape, (epoch, row, extents) in (shapes or {}).items():
        if shape not in has_shape:
            found_at.setdefault((epoch, row), ([], extents))[0].append("its shape")
    extremes = [
        _extreme(tuple(names), epoch, row, extents) for (epoch, row), (names, extents) in found_at.items()
    ]
    return sorted(_alike_once(extremes), key=lambda extreme: (extreme.area, extreme.attention))


def typical(plan: Plan, most: int) -> list[Extreme]:
    """Return up to ``most`` micro-batches of the first epoch, evenly along the order of their sizes."""
    tables = [(rows.first_row, Extents.of(rows, plan.layout)) for rows in plan.epoch(0).microbatches()]
    # (M,) each, over all record batches
    row = np.concatenate([first + np.arange(len(extents.area)) for first, extents in tables])
    columns = [np.concatenate(parts) for parts in zip(*(extents for _, extents in tables), strict=True)]
    extents = Extents(*columns)
    by_size: NDArray[np.intp] = np.lexsort((extents.attention, extents.area))
    count = min(most, len(by_size))
    # the middle of each of ``count`` equal parts
    places = by_size[((2 * np.arange(count) + 1) * len(by_size)) // (2 * count)]
    return [_extreme(("typical",), 0, int(row[at]), _one(extents, int(at))) for at in places]


def _measures(extents: Extents, rows: MicroBatches) -> dict[str, tuple[NDArray[np.int64], ...]]:
    """Name → keys of an order whose last is the extreme, the leading key first."""
    members = {
        f"largest {metric}": (extents.num_rows * padded, extents.area)
        for metric, padded in rows.padded_seqlens.items()
    }
    return members | {
        "largest tensor": (extents.area, extents.attention),
        "most attention": (extents.attention, extents.area),
        "longest": (extents.seqlen, extents.area, extents.attention),
        "most samples": (extents.num_samples, extents.area),
        "smallest": (-extents.area, -extents.attention),
    }


def _noted_shapes(
    shapes: dict[tuple[int, int], tuple[int, int, Extents]], extents: Extents, epoch: int, first_row: int
) -> dict[tuple[int, int], tuple[int, int, Extents]] | None:
    """Add the shapes of a table; None where there are too many."""
    pairs, places = np.unique(np.stack([extents.num_rows, extents.seqlen], 1), axis=0, return_index=True)
    if len(pairs) > _FEW_SHAPES:
        return None
    for (num_rows, seqlen), at in zip(pairs.tolist(), places.tolist(), strict=True):
        shapes.setdefault((num_rows, seqlen), (epoch, first_row + at, _one(extents, at)))
    return shapes if len(shapes) <= _FEW_SHAPES else None


def _alike_once(extremes: Iterable[Extreme]) -> list[Extreme]:
    """Join extremes that no kernel could tell apart."""
    seen: dict[tuple[int, ...], Extreme] = {}
    for extreme in extremes:
        key = (extreme.num_rows, extreme.seqlen, extreme.num_samples, extreme.attention)
        if key in seen:
            extreme = replace(seen[key], names=(*seen[key].names, *extreme.names))
        seen[key] = extreme
    return list(seen.values())


def _one(extents: Extents, at: int) -> Extents:
    return Extents(*(column[at : at + 1] for column in extents))


def _extreme(names: tuple[str, ...], epoch: int, row: int, extents: Extents) -> Extreme:
    return Extreme(
        names=names,
        epoch=epoch,
        row=row,
        num_rows=int(extents.num_rows[0]),
        seqlen=int(extents.seqlen[0]),
        num_samples=int(extents.num_samples[0]),
        tokens=int(extents.tokens[0]),
        area=int(extents.area[0]),
        attention=int(extents.attention[0]),
    )
