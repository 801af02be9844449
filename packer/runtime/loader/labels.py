"""The labels that a step delivers, held against those that the plan counted."""

from collections.abc import Sequence

from packer.plan import PlanSource
from packer.plan.sources import with_rows
from packer.runtime.batches.batch import Batch, BatchInfo, StepInfo


class LabelCheck:
    """Counts one rank's loss tokens of a step, and says where they cannot be the planned ones.

    A plan says how many there are in every micro-batch, but not in a slice of one. Where it says it of a step
    only, what one rank has of it may not be more, and if it has all of it, not less.
    """

    def __init__(
        self, step: StepInfo, *, has_all: bool, are_counted: bool, sources: Sequence[PlanSource]
    ) -> None:
        """Begin with a step, of which this rank has all or not; its plan was made with labels or without."""
        self._step = step
        self._sources = sources
        self._has_all = has_all
        self._are_counted = are_counted
        self.num_loss_tokens = 0
        """Labels other than −100 so far."""
        self.complaint: str | None = None
        """What is wrong with them; the first that was found."""

    def note(self, batch: Batch, *, is_last: bool) -> None:
        """Take a micro-batch's labels into account."""
        info = batch.info
        if info is None:
            return
        self.num_loss_tokens += info.num_loss_tokens
        if self.complaint is None and info.num_loss_tokens != info.planned_loss_tokens:
            complaint = self._complaint_about(info, is_last=is_last)
            self.complaint = None if complaint is None else with_rows(complaint, self._sources)

    def _complaint_about(self, info: BatchInfo, *, is_last: bool) -> str | None:
        planned = self._step.planned_loss_tokens
        if planned is None or info.labels_from is None:
            return None
        samples = ", ".join(map(str, info.sample_ids[:4].tolist())) + (" …" if info.num_samples > 4 else "")
        where = f"micro-batch {info.accum} of step {self._step.index} (samples {samples})"
        if info.planned_loss_tokens is not None and self._are_counted:
            return (
                f"the loss of {where} is over {info.num_loss_tokens:,} labels, and the plan counted "
                f"{info.planned_loss_tokens:,}; the likely cause is a data set with other labels than were "
                "analyzed, or with none: give that one, or analyze and plan again"
            )
        if info.planned_loss_tokens is not None:
            return (
                f"the loss of {where} is over {info.num_loss_tokens:,} labels, and the plan, made without "
                f"labels, counted {info.planned_loss_tokens:,}: analyze with --labels-column and plan again, "
                "or call packer.count_loss_tokens(step, group) before the step's first micro-batch and "
                "divide by what it returns"
            )
        counts_all = planned == self._step.num_tokens - self._step.num_samples
        if info.labels_from == "input_ids" and not counts_all:
            what = "has no labels, so every token would be one"
        elif self.num_loss_tokens > planned:
            what = f"brings the step's labels to {self.num_loss_tokens:,} on this rank"
        elif is_last and self._has_all and self.num_loss_tokens < planned:
            what = f"leaves the step with {self.num_loss_tokens:,} labels"
        else:
            return None
        return (
            f"{where} {what}, and the plan counted {planned:,} in all of the step; the likely cause is "
            "a data set with other labels than were analyzed: give that one, or analyze and plan again"
        )
