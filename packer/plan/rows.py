"""Rows of a plan's tables as a reader gives them out: one at a time, or a record batch of them as arrays."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MicroBatch(NamedTuple):
    """One row of ``microbatches.arrow``; the arrays are views of the mapped file and cannot be written."""

    step: int
    """Step within the epoch."""
    accum: int
    dp_rank: int
    sample_ids: NDArray[np.integer]
    """(B,) int32 or int64."""
    seqlens: NDArray[np.int32]
    """(B,) tokens as planned: after a cut."""
    starts: NDArray[np.int32] | None
    """(B,) first token of each piece in its sample; None where no sample of the plan is cut."""
    num_samples: int
    num_tokens: int
    """Real tokens."""
    max_seqlen: int
    padded_seqlen: int
    """S of the padded layout, T of the packed one."""
    cost: int
    is_filler: bool
    """A masked copy that keeps the ranks in step: all its labels are −100."""
    is_repeat: bool
    """A repeated micro-batch that trains and counts."""
    padded_seqlens: Mapping[str, int]
    """Metric → S, for plans with several budgets; empty otherwise."""
    num_loss_tokens: int | None
    """Labels that count, 0 in a filler; None where none were counted."""


class StepRow(NamedTuple):
    """One row of ``steps.arrow``; fillers count for nothing in it."""

    num_samples: int
    """The batch size."""
    num_tokens: int
    num_loss_tokens: int | None
    """None where the plan cannot know them."""
    max_seqlen: int
    lr_scale: float
    samples_before: int
    """Samples of all steps before this one, earlier epochs included."""
    tokens_before: int


class MicroBatches(NamedTuple):
    """Consecutive rows of ``microbatches.arrow`` as arrays: M micro-batches with P pieces."""

    first_row: int
    step: NDArray[np.int64]
    """(M,)"""
    accum: NDArray[np.int32]
    dp_rank: NDArray[np.int32]
    offsets: NDArray[np.int32]
    """(M + 1,) micro-batch m holds pieces offsets[m]:offsets[m + 1] of the three arrays below."""
    sample_ids: NDArray[np.integer]
    """(P,)"""
    seqlens: NDArray[np.int32]
    """(P,)"""
    starts: NDArray[np.int32] | None
    """(P,)"""
    num_samples: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    max_seqlen: NDArray[np.int32]
    padded_seqlen: NDArray[np.int32]
    cost: NDArray[np.int64]
    is_filler: NDArray[np.bool_]
    is_repeat: NDArray[np.bool_]
    padded_seqlens: Mapping[str, NDArray[np.int32]]
    """Metric → (M,)"""
    num_loss_tokens: NDArray[np.int64] | None


class Steps(NamedTuple):
    """Consecutive rows of ``steps.arrow`` as arrays of T steps."""

    first_step: int
    step: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_loss_tokens: NDArray[np.int64] | None
    max_seqlen: NDArray[np.int32]
    lr_scale: NDArray[np.float64]
    samples_before: NDArray[np.int64]
    tokens_before: NDArray[np.int64]


class Dropped(NamedTuple):
    """Consecutive rows of ``dropped.arrow`` as arrays."""

    epoch: NDArray[np.int32]
    """−1: every epoch."""
    sample_id: NDArray[np.integer]
    seqlen: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    reason: NDArray[np.int8]
    """Index into ``DROP_REASONS``."""
    start: NDArray[np.int64] | None
    """The first token lost; None where no sample of the plan is cut, or an older packer cut it."""
