"""Deal: micro-batches in the order of their steps, so that every step is a sample of the whole epoch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.kernels import balance as balance_kernels
from packer.kernels import deal as kernels
from packer.options.config import PlanConfig
from packer.planner.compose.mix import Mix
from packer.planner.order.orders import Purpose, key_for, subkey
from packer.planner.order.threads import run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches

_AT_ONCE = 1 << 16
"""Micro-batches whose tokens by class are held at a time, by each thread."""


class Block(NamedTuple):
    """Micro-batches that are dealt among each other, to steps of one mix."""

    first: int
    """The first of them."""
    stop: int
    mix: Mix


def deal(
    microbatches: MicroBatches,
    sources: IntArray | None,
    costs: NDArray[np.int64],
    blocks: Sequence[Block],
    config: PlanConfig,
    epoch: int,
) -> NDArray[np.int64]:
    """Return (M,) micro-batches in the order in which they are to run.

    Only a random order is dealt, and only where micro-batches, not whole steps, were packed: an order that
    was asked for stays, and so does a curriculum's.

    Args:
        microbatches: in random order.
        sources: (n,) the source of each of their pieces; None where there is one.
        costs: (M,) what balancing evens out.
        blocks: in order; each but the last holds whole steps.
        config: the options.
        epoch: whose random choices are meant.
    """
    order = np.arange(len(microbatches), dtype=np.int64)
    is_asked_for = config.order != "random" or config.curriculum is not None
    if config.microbatches_per_step == 1 or is_asked_for or microbatches.in_steps:
        return order
    key = key_for(config.seed, epoch, Purpose.DEALING)
    for number, block in enumerate(blocks):
        if block.mix.has_classes:
            mine = key if number == 0 else subkey(key, 1 + number)
            order[block.first : block.stop] = block.first + _deal_block(
                microbatches, sources, costs[block.first : block.stop], block, config, mine
            )
    return order


def _deal_block(
    microbatches: MicroBatches,
    sources: IntArray | None,
    costs: NDArray[np.int64],
    block: Block,
    config: PlanConfig,
    key: np.uint64,
) -> NDArray[np.int64]:
    """Return the micro-batches of a block, counted from its first, in their order."""
    mix, step_size = block.mix, config.microbatches_per_step
    order = np.arange(block.stop - block.first, dtype=np.int64)
    num_steps = len(order) // step_size
    if num_steps < 2:
        return order
    starts, sizes = (part[block.first : block.stop] for part in (microbatches.starts, microbatches.sizes))
    evens_out = config.balance != "none" and config.dp_size > 1 and config.balance_steps > 1
    edges = _window_edges(
        len(order),
        microbatches.stretches - block.first,
        step_size,
        config.balance_steps if evens_out else 0,
    )
    num_windows = len(edges) - 1
    scales = mix.scales
    spread = balance_kernels.SPREAD_SHARE * mix.random_spread(num_steps)

    def work(_: int, first: int, last: int) -> None:
        inside = slice(int(edges[first]), int(edges[last]))
        hist = mix.of_microbatches(microbatches.seqlens, sources, starts[inside], sizes[inside])
        kernels.deal(hist, step_size, edges, first, last, mix.targets, scales, subkey(key, 0), order)
        if evens_out:
            balance_kernels.even_out_steps(
                hist,
                costs[inside],
                step_size,
                config.dp_size,
                edges,
                first,
                last,
                mix.targets,
                spread,
                subkey(key, 1),
                order,
            )

    marks = np.searchsorted(edges, np.arange(0, len(order), _AT_ONCE))
    run_chunks(work, np.unique(np.append(marks, num_windows)))
    return order


def _window_edges(
    num_microbatches: int, stretches: NDArray[np.int64], step_size: int, num_steps_wanted: int
) -> NDArray[np.int64]:
    """Return the (W + 1,) edges of windows of whole steps, none of which is in two stretches.

    A step that lies in two stretches is the first of the later one.
    """
    borders = np.append(np.unique(stretches // step_size), num_microbatches // step_size)
    borders = np.unique(borders.clip(0)) * step_size
    edges = [
        start + kernels.window_edges(stop - start, step_size, num_steps_wanted)
        for start, stop in pairwise(borders.tolist())
    ]
    joined = np.append(np.zeros(1, np.int64), np.concatenate([inside[1:] for inside in edges]))
    joined[-1] = num_microbatches
    return joined
