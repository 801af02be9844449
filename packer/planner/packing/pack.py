"""Which packing a configuration asks for, and what packed rows may need afterwards."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels.limits import UNLIMITED, Limits
from packer.options.config import PlanConfig
from packer.planner.choose.limits import limits_for
from packer.planner.choose.pieces import Pieces
from packer.planner.order.orders import histogram, permutation, subkey
from packer.planner.order.stream import Draw
from packer.planner.packing.apart import keep_apart
from packer.planner.packing.best_fit import best_fit, best_fit_in_order
from packer.planner.packing.company import with_company
from packer.planner.packing.microbatches import (
    IntArray,
    MicroBatches,
    concatenate,
    in_order_of_pieces,
    reindex,
)
from packer.planner.packing.mixed import mixed
from packer.planner.packing.next_fit import next_fit
from packer.planner.packing.pairs import windowed_pairs
from packer.planner.packing.windowed import windowed
from packer.planner.packing.wrapped import wrapped, wrapped_in_order
from packer.planner.shape import choose_shapes


def limits_of(config: PlanConfig, seqlens: IntArray) -> Limits:
    """Return the bounds of a micro-batch; in the padded layout few shapes are chosen before packing."""
    if config.num_shapes is None or config.layout == "packed":
        return limits_for(config)
    lengths, counts = histogram(seqlens)
    shapes = choose_shapes(
        lengths,
        counts,
        num_shapes=config.num_shapes,
        multiple=config.padded_multiple,
        budget=next(iter(config.budgets.values())) if config.count == "padded" else None,
        max_samples=config.max_samples or UNLIMITED,
    )
    return limits_for(config, shapes)


def pack_pieces(
    pieces: Pieces, limits: Limits, config: PlanConfig, key: np.uint64
) -> tuple[Pieces, MicroBatches]:
    """Pack all that is to be planned; return it, as the packing cut it, and the micro-batches."""
    if config.packing == "wrapped":
        return wrapped(pieces, limits, key=key)
    return pieces, pack(pieces.lengths, pieces.owners, limits, config, key)


def pack_stream(drawn: Draw, limits: Limits, config: PlanConfig, key: np.uint64) -> tuple[Draw, MicroBatches]:
    """Pack all of a stream; return it, as the packing cut it, and the micro-batches."""
    if config.packing == "wrapped":
        return wrapped_in_order(drawn, limits)
    lengths, owners = drawn.pieces.lengths, drawn.pieces.owners
    return drawn, pack(lengths, owners, limits, config, key, phase_starts=drawn.phase_starts)


def pack(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    config: PlanConfig,
    key: np.uint64,
    *,
    phase_starts: NDArray[np.int64] | None = None,
) -> MicroBatches:
    """Pack samples, none of which is cut for it, into micro-batches in the order in which these are to run.

    Args:
        lengths: (K, n) int32 lengths of the samples, one row a budget.
        owners: (n,) the sample of each piece, or its key, no two of which may meet; None where none can.
        limits: bounds of a micro-batch.
        config: the options.
        key: of all random choices.
        phase_starts: the samples stand in a random order, in which they are to be used but for their
            neighbourhood, and which phases begin where. None where the order is still to be made.
    """
    if phase_starts is not None:
        phase_starts = np.minimum(phase_starts, lengths.shape[1])
    if owners is not None and _exchanges(config):
        packs = _packed(lengths, None, limits, config, key, phase_starts)
        packs = _parted(packs, lengths, owners, limits, config, key)
    else:
        packs = _packed(lengths, owners, limits, config, key, phase_starts)
    # best-fit's packs stand in an order that is better than that of their pieces
    is_in_order = phase_starts is None or config.packing == "best-fit"
    return packs if is_in_order else in_order_of_pieces(packs, group_width(config))


def pack_in_order(
    lengths: IntArray, owners: IntArray | None, limits: Limits, config: PlanConfig
) -> MicroBatches:
    """Pack samples in the very order in which they stand, whatever packing the configuration names.

    Args:
        lengths: (K, n) int32 lengths of the samples, one row a budget.
        owners: (n,) the sample of each piece, or its key; None where none is kept from another.
        limits: bounds of a micro-batch.
        config: the options.
    """
    return next_fit(
        lengths,
        owners,
        limits,
        order="sequential",
        width=group_width(config),
        same_seqlen=config.same_seqlen,
        key=np.uint64(0),
    )


def _exchanges(config: PlanConfig) -> bool:
    """Say whether samples of one key are parted once they are packed.

    While they are packed, a sorted window or an order would end a micro-batch where a key comes again: too
    early where keys are many and micro-batches large. An order that was asked for stays.
    """
    if config.no_repeat_key is None or config.order != "random":
        return False
    return config.layout == "padded" or config.packing == "next-fit"


def _parted(
    packs: MicroBatches,
    lengths: IntArray,
    owners: IntArray,
    limits: Limits,
    config: PlanConfig,
    key: np.uint64,
) -> MicroBatches:
    """Part samples of one key that were packed together."""
    width = group_width(config)
    packs = keep_apart(
        packs,
        lengths,
        owners,
        limits,
        subkey(key, 6),
        order="random" if config.packing == "next-fit" else "seqlen",
        width=width,
        same_seqlen=config.same_seqlen,
        thorough=True,
    )
    # those that changed their micro-batch come last: no step is to be of them alone
    whole = len(packs) // width
    steps = permutation(whole, subkey(key, 7)).astype(np.int64)
    order = (steps[:, np.newaxis] * width + np.arange(width)).reshape(-1)
    order = np.append(order, np.arange(whole * width, len(packs)))
    return replace(packs, starts=packs.starts[order], sizes=packs.sizes[order])


def _packed(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    config: PlanConfig,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None,
) -> MicroBatches:
    """Pack samples in an order of their own, or in that in which they stand.

    Those that may not meet are kept apart while they are packed.
    """
    width = group_width(config)
    if config.packing == "next-fit":
        return _in_given_order(lengths, owners, limits, config, key, phase_starts is not None)
    if len(lengths) > 1:
        return windowed_pairs(
            lengths,
            limits,
            window=config.window,
            width=width,
            same_seqlen=config.same_seqlen,
            key=key,
            phase_starts=phase_starts,
        )
    if config.packing == "mixed":
        packs = mixed(lengths, owners, limits, key=key, phase_starts=phase_starts)
    elif config.packing == "best-fit":
        if phase_starts is None:
            packs = best_fit(lengths, limits, key=key)
        else:
            packs = best_fit_in_order(lengths, limits, phase_starts, key=key)
    else:
        packs = windowed(
            lengths,
            owners,
            limits,
            window=config.window,
            width=width,
            same_seqlen=config.same_seqlen,
            key=key,
            phase_starts=phase_starts,
        )
    return _amend(packs, config, lengths, owners, limits, key, phase_starts) if limits.packed else packs


def _in_given_order(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    config: PlanConfig,
    key: np.uint64,
    is_ordered: bool,
) -> MicroBatches:
    """Pack samples in their order; by length, what fills no step is not the longest, epoch after epoch."""

    def packed(part: IntArray | None) -> MicroBatches:
        chosen = lengths if part is None else np.ascontiguousarray(lengths[:, part])
        microbatches = next_fit(
            chosen,
            owners if owners is None or part is None else owners[part],
            limits,
            order="sequential" if is_ordered else config.order,
            width=group_width(config),
            same_seqlen=config.same_seqlen,
            key=key,
        )
        return microbatches if part is None else reindex(microbatches, part)

    num_samples = lengths.shape[1]
    spare = num_samples % group_width(config)
    if config.order != "seqlen" or spare in (0, num_samples):
        return packed(None)
    drawn = permutation(num_samples, subkey(key, 5)).astype(np.int64)
    whole, rest = packed(np.sort(drawn[spare:])), packed(np.sort(drawn[:spare]))
    leftover = np.concatenate([whole.leftover, rest.leftover])  # of two inputs: both count
    return replace(concatenate([whole, rest]), leftover=leftover)


def group_width(config: PlanConfig) -> int:
    """Return how many micro-batches are made together: those of a step, where rows must agree in shape.

    Packed rows agree once they are padded to the longest of the step, whatever they hold.
    """
    if config.has_shape_rule and config.layout == "padded":
        return config.microbatches_per_step
    return 1


def _amend(
    packs: MicroBatches,
    config: PlanConfig,
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None,
) -> MicroBatches:
    """See to what a packing does not look at: who is in a row, and how many at least."""
    if owners is not None and config.packing != "mixed":
        packs = keep_apart(
            packs,
            lengths,
            owners,
            limits._replace(min_samples=1),
            subkey(key, 2),
            thorough=config.no_repeat_key is not None,
        )
        order = permutation(len(packs), subkey(key, 3))
        packs = replace(packs, starts=packs.starts[order], sizes=packs.sizes[order])
    amended = with_company(packs, lengths, owners, limits, key=subkey(key, 4), phase_starts=phase_starts)
    is_moved = owners is not None or amended is not packs
    return in_order_of_pieces(amended, 1) if phase_starts is not None and is_moved else amended
