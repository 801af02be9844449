"""Steps: micro-batches in rows, what does not fill a step, and work evened out over the ranks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packer.errors import EmptyPlanError
from packer.kernels import balance as kernels
from packer.planner.config import PlanConfig
from packer.planner.order.orders import Purpose, key_for, permutation, subkey
from packer.planner.packing.microbatches import MicroBatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """R = steps · E rows of a plan, row = (step·A + accum)·D + dp_rank."""

    microbatches: NDArray[np.int64]
    """(R,) the micro-batch of each row."""
    is_filler: NDArray[np.bool_]
    """(R,)"""
    is_repeat: NDArray[np.bool_]
    """(R,)"""
    left_out: NDArray[np.int64]
    """Micro-batches that fill no step."""
    in_order: bool = False
    """Row r holds micro-batch r."""


def arrange(
    microbatches: MicroBatches, costs: NDArray[np.int64], config: PlanConfig, epoch: int
) -> tuple[Rows, float | None]:
    """Put micro-batches into rows.

    Args:
        microbatches: in the order in which they are to run.
        costs: (M,) what balancing evens out.
        config: the options.
        epoch: whose random choices are meant.

    Returns:
        The rows, and the imbalance of the ranks of a slot before balancing; None where nothing was balanced.

    Raises:
        EmptyPlanError: no step would be left.
    """
    rows = _fill_steps(microbatches, costs, config, epoch)
    if config.balance == "none" or config.dp_size == 1:
        return rows, None
    before = kernels.imbalance(costs, rows.microbatches, config.dp_size)
    return _balance(rows, microbatches, costs, config, epoch), before


def _fill_steps(microbatches: MicroBatches, costs: NDArray[np.int64], config: PlanConfig, epoch: int) -> Rows:
    """Apply the remainder rule."""
    size = config.microbatches_per_step
    num_microbatches = len(microbatches)
    rest = num_microbatches % size
    order = np.arange(num_microbatches, dtype=np.int64)
    if num_microbatches == 0 or (config.remainder == "drop" and num_microbatches < size):
        raise EmptyPlanError(_why_empty(num_microbatches, config))
    if rest == 0:
        none = np.zeros(num_microbatches, np.bool_)
        return Rows(microbatches=order, is_filler=none, is_repeat=none, left_out=order[:0], in_order=True)
    key = key_for(config.seed, epoch, Purpose.REMAINDER)
    if config.remainder == "drop":
        left_out = order[num_microbatches - rest :]
        in_order = True
        if config.order == "seqlen" and not microbatches.in_steps:
            left_out = np.sort(permutation(num_microbatches, key)[:rest].astype(np.int64))
            order = np.delete(order, left_out)
            in_order = False
        none = np.zeros(num_microbatches - rest, np.bool_)
        return Rows(
            microbatches=order[: len(none)],
            is_filler=none,
            is_repeat=none,
            left_out=left_out,
            in_order=in_order,
        )
    last = order[num_microbatches - rest :]
    missing = size - rest
    if config.remainder == "keep":
        added = np.full(missing, last[np.argmin(costs[last])])
    else:
        # another micro-batch of the epoch trains twice; one of the same step where its shape must agree
        others = last if microbatches.in_steps or rest == num_microbatches else order[: len(order) - rest]
        chosen = permutation(len(others), key)
        added = others[np.resize(chosen, missing)]
    is_added = np.zeros(num_microbatches + missing, np.bool_)
    is_added[num_microbatches:] = True
    none = np.zeros_like(is_added)
    return Rows(
        microbatches=np.concatenate([order, added]),
        is_filler=is_added if config.remainder == "keep" else none,
        is_repeat=is_added if config.remainder == "fill" else none,
        left_out=order[:0],
    )


def _balance(
    rows: Rows, microbatches: MicroBatches, costs: NDArray[np.int64], config: PlanConfig, epoch: int
) -> Rows:
    """Exchange micro-batches between the rows of a few steps, so that the ranks of a slot work alike."""
    size = config.microbatches_per_step
    num_steps = len(rows.microbatches) // size
    fixed = config.has_shape_rule or config.order != "random"
    num_windows = num_steps if fixed else max(1, num_steps // config.balance_steps)
    marks = np.arange(num_windows, dtype=np.int64) * num_steps // num_windows
    # fillers and repeats stay in the last step, a harder sample behind the step that admits it
    is_added = rows.is_filler | rows.is_repeat
    last = [num_steps - 1] if is_added.any() else []
    edges = np.unique(np.concatenate([marks, np.array([*microbatches.barriers, *last, num_steps], np.int64)]))
    keys = subkey(key_for(config.seed, epoch, Purpose.COLUMNS), 0) + np.arange(
        len(edges) - 1, dtype=np.uint64
    )
    positions = np.arange(len(rows.microbatches), dtype=np.int64)
    kernels.balance(
        costs[rows.microbatches],
        positions,
        edges * size,
        config.dp_size,
        keys,
        np.zeros(config.dp_size, np.int64),
    )
    return Rows(
        microbatches=rows.microbatches[positions],
        is_filler=rows.is_filler[positions],
        is_repeat=rows.is_repeat[positions],
        left_out=rows.left_out,
    )


def _why_empty(num_microbatches: int, config: PlanConfig) -> str:
    if num_microbatches == 0:
        return (
            f"no micro-batch can be made of --min-samples {config.min_samples} samples; lower --min-samples "
            "or raise --max-tokens"
        )
    return (
        f"a step takes {config.microbatches_per_step} micro-batches (--dp-size {config.dp_size} × "
        f"--grad-accum {config.grad_accum}), but there are only {num_microbatches}; lower one of these or "
        "--max-tokens, or choose --remainder keep or fill"
    )
