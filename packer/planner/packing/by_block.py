"""An order by blocks: what lies together in a file is read together, and mixed with K − 1 other blocks.

The blocks come in random order, K at a time make a group, and the samples of a group are packed as a data set
of their own. What fills no row of its group, or no whole step of one shape, goes on with the next group, so
that full rows go on over the borders. A row that holds such samples runs first in its group: what came over
is done with early.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels.limits import Limits
from packer.options.config import PlanConfig
from packer.planner.order.orders import Purpose, id_dtype, key_for, permutation, subkey
from packer.planner.packing.microbatches import IntArray, MicroBatches, concatenate, positions_of, reindex
from packer.planner.packing.pack import group_width, pack

_UNFILLED = 15 / 16
"""A row that holds less than this share of what its group's rows hold on average may wait."""
_MAX_SHARE = 32
"""One row in so many may wait, one at least: what the end of a group left unfilled."""


def pack_by_block(
    lengths: IntArray,
    owners: IntArray | None,
    edges: NDArray[np.int64],
    limits: Limits,
    config: PlanConfig,
    *,
    epoch: int,
    progress: Callable[[float], None],
) -> MicroBatches:
    """Pack the samples of ``config.shuffle_blocks`` blocks at a time.

    A row of group g holds samples of group g and, where rows were left unfilled, of group g − 1. What found
    no company (``min_samples``), or no whole step of one shape, may wait longer: until a group has enough.

    Args:
        lengths: (K, n) int32 lengths of the samples, one row a budget.
        owners: (n,) the sample of each piece; None where no sample is cut.
        edges: (B + 1,) the sample at which each block begins, and n; a block may be empty.
        limits: bounds of a micro-batch.
        config: the options.
        epoch: whose random choices are meant.
        progress: told which share of the samples is packed.

    Returns:
        The micro-batches, group by group; ``stretches`` says where each begins.
    """
    key = key_for(config.seed, epoch, Purpose.SAMPLES)
    num_samples, num_packed = lengths.shape[1], 0
    parts: list[MicroBatches] = []
    groups = list(_groups(edges, config, key_for(config.seed, epoch, Purpose.BLOCKS)))
    waiting = groups[0][:0]
    for number, own in enumerate(groups):
        drawn = np.sort(np.concatenate([waiting, own]))  # pieces of one sample next to each other
        part = pack(
            np.ascontiguousarray(lengths[:, drawn]),
            None if owners is None else owners[drawn],
            limits,
            config,
            subkey(key, number),
        )
        part = reindex(part, drawn)
        came_over = _rows_with(part, waiting, num_samples)
        if number < len(groups) - 1:
            part, came_over, waiting = _held_back(part, came_over, lengths, config)
        parts.append(_first(part, came_over, group_width(config)))
        num_packed += int(part.sizes.sum())
        progress(num_packed / num_samples)
    stretches = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return replace(concatenate(parts), stretches=stretches)


def _groups(edges: NDArray[np.int64], config: PlanConfig, key: np.uint64) -> Iterator[IntArray]:
    """Yield the samples of K blocks at a time, the blocks in random order."""
    assert config.shuffle_blocks is not None
    starts, sizes, dtype = edges[:-1], np.diff(edges), id_dtype(int(edges[-1]))
    order = permutation(len(sizes), key)
    order = order[sizes[order] > 0]
    for first in range(0, len(order), config.shuffle_blocks):
        chosen = order[first : first + config.shuffle_blocks]
        yield np.concatenate(
            [np.arange(starts[block], starts[block] + sizes[block], dtype=dtype) for block in chosen]
        )


def _rows_with(part: MicroBatches, samples: IntArray, num_samples: int) -> NDArray[np.bool_]:
    """(M,) which rows hold one of ``samples``."""
    if not len(samples):
        return np.zeros(len(part), np.bool_)
    is_wanted = np.isin(part.pieces[positions_of(part)], samples)
    row_of = np.repeat(np.arange(len(part)), part.sizes)
    return np.bincount(row_of[is_wanted], minlength=len(part)) > 0


def _held_back(
    part: MicroBatches, came_over: NDArray[np.bool_], lengths: IntArray, config: PlanConfig
) -> tuple[MicroBatches, NDArray[np.bool_], IntArray]:
    """Take out the rows that the end of a group left unfilled.

    Returns:
        The rest; which of its rows hold what came over from an earlier group; the samples that wait.
    """
    if part.in_steps:
        waits = np.zeros(len(part), np.bool_)
        waits[len(part) // group_width(config) * group_width(config) :] = True
    else:
        waits = _unfilled(part, lengths, config) & ~came_over
    rows = replace(part, starts=part.starts[waits], sizes=part.sizes[waits])
    samples = np.concatenate([part.leftover, part.pieces[positions_of(rows)]])
    stays = ~waits
    kept = replace(part, starts=part.starts[stays], sizes=part.sizes[stays], leftover=part.leftover[:0])
    return kept, came_over[stays], samples


def _unfilled(part: MicroBatches, lengths: IntArray, config: PlanConfig) -> NDArray[np.bool_]:
    """(M,) which rows hold far less than the others of their group, by the budget that they fill most."""
    waits: NDArray[np.bool_] = np.zeros(len(part), np.bool_)
    if not len(part):
        return waits
    held = np.zeros(len(part))
    for row, budget in zip(lengths, config.budgets.values(), strict=True):
        values = row[part.pieces[positions_of(part)]].astype(np.int64)
        begins = np.cumsum(part.sizes) - part.sizes
        tokens = np.add.reduceat(values, begins)
        if config.layout == "padded" and config.count == "padded":
            tokens = np.maximum.reduceat(values, begins) * part.sizes
        held = np.maximum(held, tokens / budget)
    order = np.argsort(held, kind="stable")[: max(1, len(part) // _MAX_SHARE)]
    waits[order[held[order] < _UNFILLED * held.mean()]] = True
    return waits


def _first(part: MicroBatches, is_first: NDArray[np.bool_], width: int) -> MicroBatches:
    """Move rows, or the steps of one shape that hold them, to the front; the others keep their order."""
    if not is_first.any():
        return part
    if width > 1:
        whole = len(part) // width * width
        # (steps · width,) -> (steps,) -> (M,); a step that is not whole stays the last
        steps = np.any(is_first[:whole].reshape(-1, width), axis=1)
        is_first = np.append(np.repeat(steps, width), np.zeros(len(part) - whole, np.bool_))
    order = np.argsort(~is_first, kind="stable")
    return replace(part, starts=part.starts[order], sizes=part.sizes[order])
