"""Steps: micro-batches in rows of whole steps, and what does not fill one."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import EmptyPlanError
from packer.options.config import PlanConfig
from packer.planner.order.orders import Purpose, key_for, permutation
from packer.planner.packing.microbatches import MicroBatches


class MicroBatchSums(NamedTuple):
    """What each of M micro-batches holds."""

    tokens: NDArray[np.int64]
    longest: NDArray[np.int64]
    rooms: NDArray[np.int64]
    """Tokens with every sample padded on its own."""
    costs: NDArray[np.int64]


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


def fill_steps(
    order: NDArray[np.int64],
    microbatches: MicroBatches,
    sums: MicroBatchSums,
    config: PlanConfig,
    epoch: int,
) -> Rows:
    """Put micro-batches into rows of whole steps; apply the remainder rule to those that fill none.

    Args:
        order: (M,) micro-batches in the order in which they are to run.
        microbatches: what they are.
        sums: of each: a total counts the tokens, and a filler copies the cheapest of its step.
        config: the options.
        epoch: whose random choices are meant.

    Raises:
        EmptyPlanError: no step would be left.
    """
    size = config.microbatches_per_step
    num_microbatches = len(order)
    if config.has_total:
        return _until_total(order, sums.tokens, config)
    rest = num_microbatches % size
    if num_microbatches == 0 or (config.remainder == "drop" and num_microbatches < size):
        raise EmptyPlanError(_why_empty(num_microbatches, config))
    key = key_for(config.seed, epoch, Purpose.REMAINDER)
    if rest == 0 or config.remainder == "drop":
        left_out = order[num_microbatches - rest :]
        if rest and config.order == "seqlen" and not microbatches.in_steps:
            # not the longest, epoch after epoch
            chosen = np.sort(permutation(num_microbatches, key)[:rest])
            left_out = order[chosen]
            order = np.delete(order, chosen)
        whole = order[: num_microbatches - rest]
        none = np.zeros(len(whole), np.bool_)
        return Rows(microbatches=whole, is_filler=none, is_repeat=none, left_out=left_out)
    last = order[num_microbatches - rest :]
    missing = size - rest
    if config.remainder == "keep":
        added = np.full(missing, last[np.argmin(sums.costs[last])])
    else:
        # another micro-batch of the epoch trains twice; one of the same step where its shape must agree
        others = last if microbatches.in_steps or rest == num_microbatches else order[: len(order) - rest]
        if len(microbatches.stretches) > 1:  # whose blocks are read anyway
            others = order[-min(num_microbatches, 2 * size) :]
        added = others[np.resize(permutation(len(others), key), missing)]
    is_added = np.zeros(num_microbatches + missing, np.bool_)
    is_added[num_microbatches:] = True
    none = np.zeros_like(is_added)
    return Rows(
        microbatches=np.concatenate([order, added]),
        is_filler=is_added if config.remainder == "keep" else none,
        is_repeat=is_added if config.remainder == "fill" else none,
        left_out=order[:0],
    )


def _until_total(order: NDArray[np.int64], tokens: NDArray[np.int64], config: PlanConfig) -> Rows:
    """End with the step that reaches the total; there are micro-batches enough."""
    size = config.microbatches_per_step
    num_steps = config.total_steps
    if num_steps is None:
        # (whole · size,) -> (whole,) tokens by the end of each step
        whole = len(order) // size
        reached = np.cumsum(tokens[order[: whole * size]].reshape(whole, size).sum(axis=1))
        num_steps = int(np.searchsorted(reached, int(config.total_tokens or 0))) + 1
    rows = order[: num_steps * size]
    none = np.zeros(len(rows), np.bool_)
    return Rows(microbatches=rows, is_filler=none, is_repeat=none, left_out=order[len(rows) :])


def _why_empty(num_microbatches: int, config: PlanConfig) -> str:
    if num_microbatches == 0:
        return (
            f"no micro-batch can be made of --min-samples {config.min_samples} samples; lower --min-samples "
            "or raise --max-tokens"
        )
    return (
        f"a step takes {config.microbatches_per_step} micro-batches (--dp-size {config.dp_size} × "
        f"--grad-accum {config.accum}), but there are only {num_microbatches}; lower one of these or "
        "--max-tokens, or choose --remainder keep or fill"
    )
