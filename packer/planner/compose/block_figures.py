"""What an order by blocks asks of the loader, and what it gives up: figures of one epoch, for its summary."""

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.kernels import mix as kernels
from packer.metrics import Blocks
from packer.options.config import PlanConfig
from packer.planner.order.orders import histogram
from packer.planner.packing.microbatches import IntArray

_AT_ONCE = 1 << 22


def block_figures(
    blocks: Blocks,
    sample_ids: IntArray,
    seqlens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    is_filler: NDArray[np.bool_],
    config: PlanConfig,
) -> dict[str, Any]:
    """Return the figures as ``PlannedEpoch.figures`` documents them.

    Args:
        blocks: of the source.
        sample_ids: (P,) in the order of their rows.
        seqlens: (P,)
        offsets: (R + 1,) row r holds samples ``offsets[r]:offsets[r + 1]``.
        is_filler: (R,) rows that train nothing; they are read as well.
        config: the options.
    """
    assert config.shuffle_blocks is not None
    step_size = config.microbatches_per_step
    num_steps = len(is_filler) // step_size
    first, last = _lifetimes(blocks, sample_ids, offsets[::step_size])
    used = last >= 0
    count, num_bytes = np.zeros((2, num_steps + 1), np.int64)
    for change, size in ((count, np.ones(len(blocks), np.int64)), (num_bytes, blocks.num_bytes)):
        np.add.at(change, first[used], size[used])
        np.subtract.at(change, last[used] + 1, size[used])
    # a stretch begins with the first of each K blocks that the plan comes to
    borders = np.append(np.unique(np.sort(first[used])[:: config.shuffle_blocks]), num_steps)
    within, between = _effects(seqlens, offsets, is_filler, step_size, borders)
    return {
        "num_blocks": len(blocks),
        "open_blocks": int(np.cumsum(count).max()),
        "open_bytes": int(np.cumsum(num_bytes).max()),
        "design_effect_of_steps": within,
        "design_effect_of_stretches": between,
    }


def _lifetimes(
    blocks: Blocks, sample_ids: IntArray, step_offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (B,) first and the (B,) last step that reads each block; −1 where none does."""
    first, last = np.full((2, len(blocks)), -1, np.int64)
    starts = np.arange(0, len(sample_ids), _AT_ONCE)
    for lifetimes, rising in ((last, True), (first, False)):
        for start in starts if rising else starts[::-1]:
            stop = min(int(start) + _AT_ONCE, len(sample_ids))
            of_piece = blocks.of(sample_ids[start:stop])
            step = np.searchsorted(step_offsets, np.arange(start, stop), side="right") - 1
            # of several values for one place the last is kept
            lifetimes[of_piece if rising else of_piece[::-1]] = step if rising else step[::-1]
    return first, last


def _effects(
    seqlens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    is_filler: NDArray[np.bool_],
    step_size: int,
    edges: NDArray[np.int64],
) -> tuple[float | None, float | None]:
    """Return the design effect of the steps inside their stretches, and of the stretches in the epoch.

    The squares of the one and of the other add up to those of the epoch's steps. Each is divided by what
    random samples would give.
    """
    trained = seqlens[np.repeat(~is_filler, np.diff(offsets))] if is_filler.any() else seqlens
    lengths, counts = histogram(trained)
    bounds, _ = kernels.length_classes(lengths, counts)
    num_steps, num_stretches = int(edges[-1]), len(edges) - 1
    if num_steps == num_stretches or len(bounds) < 2:
        return None, None
    fillers = is_filler if is_filler.any() else np.empty(0, np.bool_)
    tokens = np.zeros((num_stretches, len(bounds)), np.int64)
    squares = np.zeros((len(bounds), 2), np.uint64)
    concentration = np.zeros(2, np.uint64)
    for stretch in range(num_stretches):
        kernels.sum_steps(
            seqlens,
            np.empty(0, np.int32),
            bounds,
            offsets,
            fillers,
            step_size,
            edges[stretch],
            edges[stretch + 1],
            tokens[stretch],
            squares,
            concentration,
        )
    whole = int(tokens.sum())
    of_steps = Fraction((int(concentration[0]) << 32) + int(concentration[1]), whole << 32)
    of_stretches = sum((_evenness(row) for row in tokens.tolist()), Fraction(0)) / whole
    of_epoch = _evenness(tokens.sum(axis=0).tolist()) / whole
    expected = kernels.random_spread(lengths, counts, bounds, num_steps) / num_steps
    # quotients are rounded down: steps of one mix would come out a hair below nothing
    within = float(max(of_steps - of_stretches, Fraction(0))) / expected / (num_steps - num_stretches)
    if num_stretches < 2:
        return within, None
    return within, float(of_stretches - of_epoch) / expected / (num_stretches - 1)


def _evenness(tokens: list[int]) -> Fraction:
    """Return Σ h_k² / W."""
    return Fraction(sum(part * part for part in tokens), max(1, sum(tokens)))
