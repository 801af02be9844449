"""Deal: micro-batches in the order of their steps, so that every step is a sample of the whole epoch."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from packer.kernels import balance as balance_kernels
from packer.kernels import deal as kernels
from packer.options.config import PlanConfig
from packer.planner.compose.mix import Mix
from packer.planner.order.orders import Purpose, key_for, subkey
from packer.planner.order.threads import run_chunks
from packer.planner.packing.microbatches import MicroBatches

_AT_ONCE = 1 << 16
"""Micro-batches whose tokens by class are held at a time, by each thread."""


def deal(
    microbatches: MicroBatches, costs: NDArray[np.int64], mix: Mix, config: PlanConfig, epoch: int
) -> NDArray[np.int64]:
    """Return (M,) micro-batches in the order in which they are to run.

    Only a random order is dealt, and only where micro-batches, not whole steps, were packed: an order that
    was asked for stays, and so does a curriculum's.

    Args:
        microbatches: in random order.
        costs: (M,) what balancing evens out.
        mix: the epoch's.
        config: the options.
        epoch: whose random choices are meant.
    """
    order = np.arange(len(microbatches), dtype=np.int64)
    step_size = config.microbatches_per_step
    num_steps = len(microbatches) // step_size
    is_asked_for = config.order != "random" or config.curriculum is not None
    if step_size == 1 or num_steps < 2 or is_asked_for or microbatches.in_steps or len(mix.bounds) < 2:
        return order
    key = key_for(config.seed, epoch, Purpose.DEALING)
    evens_out = config.balance != "none" and config.dp_size > 1 and config.balance_steps > 1
    edges = _window_edges(microbatches, step_size, config.balance_steps if evens_out else 0)
    num_windows = len(edges) - 1
    spread = balance_kernels.SPREAD_SHARE * mix.random_spread(num_steps)

    def work(_: int, first: int, last: int) -> None:
        inside = slice(int(edges[first]), int(edges[last]))
        hist = mix.of_microbatches(
            microbatches.seqlens, microbatches.starts[inside], microbatches.sizes[inside]
        )
        kernels.deal(hist, step_size, edges, first, last, mix.tokens, subkey(key, 0), order)
        if evens_out:
            balance_kernels.even_out_steps(
                hist,
                costs[inside],
                step_size,
                config.dp_size,
                edges,
                first,
                last,
                mix.tokens,
                spread,
                subkey(key, 1),
                order,
            )

    marks = np.searchsorted(edges, np.arange(0, len(microbatches), _AT_ONCE))
    run_chunks(work, np.unique(np.append(marks, num_windows)))
    return order


def _window_edges(microbatches: MicroBatches, step_size: int, num_steps_wanted: int) -> NDArray[np.int64]:
    """Return the (W + 1,) edges of windows of whole steps, none of which is in two stretches.

    A step that lies in two stretches is the first of the later one.
    """
    borders = np.append(np.unique(microbatches.stretches // step_size), len(microbatches) // step_size)
    borders = np.unique(borders) * step_size
    edges = [
        start + kernels.window_edges(stop - start, step_size, num_steps_wanted)
        for start, stop in pairwise(borders.tolist())
    ]
    joined = np.append(np.zeros(1, np.int64), np.concatenate([inside[1:] for inside in edges]))
    joined[-1] = len(microbatches)
    return joined
