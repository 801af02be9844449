"""The order in which the steps of an epoch are played: the plan's, or with its largest step first.

A run that is to fail for want of memory then fails in its first step. The largest step is the one that holds
the micro-batch with the largest tensor, on whichever rank; among equals, the one with the most attention.
"""

from packer.errors import ConfigError
from packer.plan import Epoch, Extents, MicroBatch, Plan, StepRow

_ORDERS_OF_THE_USER = ("sequential", "seqlen")


class LargestFirst:
    """An epoch whose largest step comes first, and the others in the plan's order behind it.

    Steps and rows are counted as they are played.
    """

    def __init__(self, epoch: Epoch, *, layout: str, step_size: int) -> None:
        """Find the largest step; all rows of the epoch are read once."""
        self._epoch = epoch
        self._step_size = step_size
        largest: tuple[int, int, int] | None = None
        for rows in epoch.microbatches():
            extents = Extents.of(rows, layout)
            at = extents.largest()
            found = (int(extents.area[at]), int(extents.attention[at]), int(rows.step[at]))
            if largest is None or found[:2] > largest[:2]:
                largest = found
        self.first_step = 0 if largest is None else largest[2]
        """The step that is played first, as the plan counts."""

    @property
    def num_steps(self) -> int:
        """Optimizer updates."""
        return self._epoch.num_steps

    def step(self, step: int) -> StepRow:
        """Return a step by its place in the order of playing; what comes before it counts in that order."""
        planned = self._epoch.step(self._planned(step))
        if step == 0:
            first = self._epoch.step(0)
            return planned._replace(samples_before=first.samples_before, tokens_before=first.tokens_before)
        if step > self.first_step:
            return planned
        largest = self._epoch.step(self.first_step)
        return planned._replace(
            samples_before=planned.samples_before + largest.num_samples,
            tokens_before=planned.tokens_before + largest.num_tokens,
        )

    def microbatch(self, row: int) -> MicroBatch:
        """Return a micro-batch; its row counts the steps in the order of playing."""
        return self._epoch.microbatch(self.planned_row(row))

    def planned_row(self, row: int) -> int:
        """Return the row of the plan that is played as ``row``."""
        step, within = divmod(row, self._step_size)
        return self._planned(step) * self._step_size + within

    def _planned(self, step: int) -> int:
        if step == 0:
            return self.first_step
        return step - 1 if step <= self.first_step else step


def open_epoch(plan: Plan, epoch: int, *, largest_first: bool) -> Epoch | LargestFirst:
    """Open an epoch as it is played.

    Raises:
        PlanError: The plan has no such epoch.
    """
    opened = plan.epoch(epoch)
    if not largest_first:
        return opened
    return LargestFirst(opened, layout=plan.layout, step_size=plan.dp_size * plan.grad_accum)


def require_free_order(plan: Plan) -> None:
    """Refuse to move a step of a plan whose order is the user's own.

    Raises:
        ConfigError: It is ordered, or has a curriculum.
    """
    order = plan.config.get("order")
    if order in _ORDERS_OF_THE_USER or plan.config.get("curriculum") is not None:
        what = f"--order {order}" if order in _ORDERS_OF_THE_USER else "a curriculum"
        raise ConfigError(
            f"largest_first plays the largest step before its turn, and the plan has {what}, whose order "
            "means something; leave it out, and play the extremes before the run with packer.rehearse"
        )
