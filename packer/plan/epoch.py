"""What the planner hands to the plan writer: one epoch as plain arrays."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedEpoch:
    """One epoch's micro-batches in the order of their rows, row = (step·A + accum)·D + dp_rank.

    M micro-batches, P pieces (a piece is a sample, or a part of one that was cut), T steps.
    """

    sample_ids: NDArray[np.integer]
    """(P,) int32, or int64 where the data set needs it: samples in the order of their micro-batches."""
    seqlens: NDArray[np.int32]
    """(P,) tokens of each piece, after any cut."""
    starts: NDArray[np.int32] | None
    """(P,) offset of the piece in its sample; None where no sample of the plan is cut."""
    offsets: NDArray[np.int64]
    """(M + 1,) micro-batch m holds pieces offsets[m]:offsets[m + 1]."""
    padded_seqlens: NDArray[np.int32]
    """(M,) S of the padded layout, T of the packed one."""
    costs: NDArray[np.int64]
    """(M,) the cost that balancing evens out; tokens where it was off."""
    is_filler: NDArray[np.bool_]
    """(M,) a masked copy: all labels −100, counts for nothing."""
    is_repeat: NDArray[np.bool_]
    """(M,) a repeated micro-batch that trains and counts."""
    step_num_samples: NDArray[np.int64]
    """(T,) the batch size: samples, fillers left out."""
    step_num_tokens: NDArray[np.int64]
    """(T,) real tokens, fillers left out."""
    step_num_loss_tokens: NDArray[np.int64] | None
    """(T,) loss tokens, fillers left out; None where the plan cannot know them."""
    step_max_seqlen: NDArray[np.int32]
    """(T,) longest piece of the step."""
    lr_scales: NDArray[np.float64]
    """(T,) learning-rate factor."""
    dropped: "DroppedSamples"
    """What this epoch leaves out, beyond what every epoch leaves out."""
    num_loss_tokens: NDArray[np.int64] | None = None
    """(M,) loss tokens of each micro-batch, 0 for fillers, where labels were counted; else None."""
    padded_seqlens_by_metric: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    """Per metric (M,): S of each member of a pair of sequences, for plans with several budgets."""
    design_effect: dict[str, float | None] = field(default_factory=lambda: {"seqlen": None, "source": None})
    """How much more the steps differ in their mix than steps of random samples would, by ``seqlen`` and by
    ``source``: 1 as random ones, 16 as steps of a 16th of their size; None where there is one class."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What only the planner knows of the epoch, as plain JSON, for the summary and verification:
    ``lower_bound`` and ``num_packed`` (micro-batches), ``rank_imbalance_before`` (max/mean − 1 over the ranks
    of a slot, before balancing), ``curriculum_raises``: where the pool ran dry, as ``{"step", "as_of",
    "beyond"}``. From ``step`` on, counted over all epochs, to the end of this one the epoch may use what the
    schedule admits at step ``as_of``, if that is later; with ``beyond`` n > 0 all that the schedule ever
    admits, and the n next difficulties. ``blocks``, of an order by blocks: ``num_blocks`` of the source;
    ``open_blocks`` and ``open_bytes``, the most that are open at a step, from the first step that reads of a
    block to the last; how much more than random samples the steps differ from their stretch of the epoch
    (``design_effect_of_steps``), and the stretches from the epoch (``design_effect_of_stretches``). A stretch
    begins with the step that first reads of the 0th, the K-th, the 2K-th … block that the epoch comes to.
    ``key_max_count``: rows, copies left out, that hold the most frequent value of ``no_repeat_key``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedSamples:
    """Samples, or ends of samples, that are not planned, each with its reason."""

    sample_ids: NDArray[np.integer]
    """(K,)"""
    seqlens: NDArray[np.int64]
    """(K,) the sample's whole length."""
    num_tokens: NDArray[np.int64]
    """(K,) the tokens lost: the whole length, or what a truncation cut off."""
    reasons: NDArray[np.uint8]
    """(K,) index into ``DROP_REASONS``."""
    starts: NDArray[np.int64] | None = None
    """(K,) the first token lost, each one the first of so many; None where no sample of the plan is cut."""

    def taken(self, lines: NDArray[np.integer]) -> "DroppedSamples":
        """Return these lines, one or more times."""
        return DroppedSamples(
            sample_ids=self.sample_ids[lines],
            seqlens=self.seqlens[lines],
            num_tokens=self.num_tokens[lines],
            reasons=self.reasons[lines],
            starts=None if self.starts is None else self.starts[lines],
        )


DROP_REASONS = (
    "filtered",
    "empty",
    "too_long",
    "truncated",
    "remainder",
    "min_samples",
    "trained",
    "unreached",
)
"""In the order of their codes; a plan knows them up to the last that it may need."""
