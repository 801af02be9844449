"""Which packing a configuration asks for, and the repairs that packed rows may need afterwards."""

from dataclasses import replace

import numpy as np

from packer.kernels.limits import Limits
from packer.planner.packing.best_fit import best_fit
from packer.planner.config import PlanConfig
from packer.planner.packing.microbatches import IntArray, MicroBatches
from packer.planner.packing.next_fit import next_fit
from packer.planner.order.orders import permutation, subkey
from packer.planner.packing.pairs import windowed_pairs
from packer.planner.packing.repair import separate, top_up
from packer.planner.packing.windowed import windowed


def pack(
    lengths: IntArray, owners: IntArray | None, limits: Limits, config: PlanConfig, key: np.uint64
) -> MicroBatches:
    """Pack samples into micro-batches, in the order in which these are to run.

    Args:
        lengths: (K, n) int32 lengths of the samples, one row a budget.
        owners: (n,) the sample of each piece; None where no sample is cut.
        limits: bounds of a micro-batch.
        config: the options.
        key: of all random choices.
    """
    width = group_width(config)
    if config.packing == "next-fit":
        return next_fit(
            lengths,
            owners,
            limits,
            order=config.order,
            width=width,
            same_seqlen=config.same_seqlen,
            key=key,
        )
    if len(lengths) > 1:
        return windowed_pairs(
            lengths, limits, window=config.window, width=width, same_seqlen=config.same_seqlen, key=key
        )
    if config.packing == "best-fit":
        packs = best_fit(lengths, limits, key=key)
    else:
        packs = windowed(
            lengths,
            owners,
            limits,
            window=config.window,
            width=width,
            same_seqlen=config.same_seqlen,
            key=key,
        )
    return _repair(packs, owners, limits, key) if limits.packed else packs


def group_width(config: PlanConfig) -> int:
    """Return how many micro-batches are made together: those of a step, where rows must agree in shape.

    Packed rows agree once they are padded to the longest of the step, whatever they hold.
    """
    if config.has_shape_rule and config.layout == "padded":
        return config.microbatches_per_step
    return 1


def _repair(packs: MicroBatches, owners: IntArray | None, limits: Limits, key: np.uint64) -> MicroBatches:
    """See to what best-fit does not look at; rows that come of it are mixed with the others."""
    repaired = top_up(packs, limits)
    if owners is not None:
        repaired = separate(repaired, owners, limits, subkey(key, 2))
    if repaired is packs:
        return packs
    order = permutation(len(repaired), subkey(key, 3))
    return replace(repaired, starts=repaired.starts[order], sizes=repaired.sizes[order])
