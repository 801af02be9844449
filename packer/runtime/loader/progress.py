"""How far an epoch was played: what was taken from those who read ahead, and what was handed out."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from packer.errors import PackerError, PlanError, StateError
from packer.plan import Plan
from packer.runtime.batches.batch import Batch, StepInfo


class Place(NamedTuple):
    """A micro-batch of this rank."""

    epoch: int
    step: int
    accum: int


class Read(NamedTuple):
    """What became of one micro-batch."""

    place: Place
    outcome: Batch | PackerError
    """The batch, or what kept it from being made."""
    fields: tuple[Any, ...] | None = None
    """What the fields of the run's samples are, as its maker settled them; None: ``input_ids`` alone."""


class Progress:
    """Where a loader stands, and which of its iterations may move it."""

    def __init__(self, plan: Plan) -> None:
        self._num_steps = [int(epoch["num_steps"]) for epoch in plan.header["epochs"]]
        self.place = Place(0, 0, 0)
        """After the micro-batch that was handed out last."""
        self.next_start = Place(0, 0, 0)
        """Where the next iteration begins."""
        self.step: StepInfo | None = None
        """The step of the micro-batch that was handed out last."""
        self.playing: int | None = None
        """The epoch of the iteration that goes on."""
        self.iteration = 0
        """The number of the one that may move it."""

    def begin(self) -> int:
        """Let an iteration begin where the next one is to; return its number, by which it moves the place."""
        self.place = self.next_start
        self.playing = self.place.epoch
        self.next_start = Place(self.playing + 1, 0, 0)
        self.iteration += 1
        return self.iteration

    def end(self) -> None:
        """End the iteration that goes on."""
        self.playing = None
        self.iteration += 1

    def go_to(self, place: Place) -> None:
        """Stand at a place, and end the iteration that goes on."""
        self.end()
        self.place = self.next_start = self._normal(place)
        self.step = None

    def resume_at(self, place: Place) -> None:
        """Stand at a place that a checkpoint tells.

        Raises:
            StateError: The plan has no such place.
        """
        num_epochs = len(self._num_steps)
        num_steps = self._num_steps[place.epoch] if place.epoch < num_epochs else 0
        if place.epoch > num_epochs or place.step > num_steps:
            raise StateError(
                f"the loader's state stands at step {place.step} of epoch {place.epoch}, and the plan has "
                f"{num_steps} steps in that epoch and {num_epochs} epochs; load what PlanLoader.state_dict() "
                "gave"
            )
        self.go_to(place)

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self._num_steps[epoch]

    def delivered(self, step: StepInfo, accum: int) -> None:
        """Stand after a micro-batch."""
        self.place = Place(step.epoch, step.index, accum + 1)
        self.step = step

    def finished(self, step: StepInfo) -> None:
        """Stand at the next step."""
        self.place = self._normal(Place(step.epoch, step.index + 1, 0))

    def _normal(self, place: Place) -> Place:
        """Return the beginning of the next epoch for the end of one."""
        at_end = place.epoch < len(self._num_steps) and place.step == self._num_steps[place.epoch]
        return Place(place.epoch + 1, 0, 0) if at_end else place


class EpochStream:
    """The micro-batches of one iteration: the one owner of what was taken from it, and of what was delivered.

    A micro-batch is asked for by its place. So nothing that happens on the way, an error that the training
    loop survives, a step that is left early, an interrupt, can let another one pass for it.

    It refers to the progress, not to the loader: in a reference cycle the worker processes would be left to
    the garbage collector, which may take down their queues first and then wait seconds for each of them.
    """

    def __init__(self, progress: Progress, iteration: int, reads: Iterator[Read]) -> None:
        self._progress = progress
        self._iteration = iteration
        self._reads = reads
        self._failed: Place | None = None
        self._failure = ""

    def take(self, epoch: int, step: int, accum: int) -> Batch:
        """Take the micro-batch of a place; earlier ones that nobody asked for are passed over.

        Raises:
            PackerError: What kept it from being made.
            PlanError: This iteration is over, broke off, or has passed the place.
        """
        if self._iteration != self._progress.iteration:
            self.require_current()
        asked = (epoch, step, accum)
        if asked == self._failed:
            raise PlanError(
                f"micro-batch {accum} of step {step} could not be made, so the step cannot be completed: "
                f"{self._failure}; go on with the next step, or load_state_dict(loader.state_dict()) to try "
                "this one again"
            )
        read = next(self._reads, None)
        while read is not None and read.place < asked:
            read = next(self._reads, None)
        if read is None:
            raise PlanError(
                "this iteration of the loader broke off at an error; load_state_dict(loader.state_dict()) "
                "lets the next one go on from there"
            )
        if read.place != asked:
            raise PlanError(
                f"micro-batch {accum} of step {step} was lost on its way, the next one is {read.place.accum} "
                f"of step {read.place.step}; load_state_dict(loader.state_dict()) reads it again"
            )
        outcome = read.outcome
        if isinstance(outcome, PackerError):
            self._failed, self._failure = read.place, str(outcome)
            try:
                raise outcome
            finally:
                del outcome, read  # or its trace, which holds this frame, would be a cycle around the workers
        return outcome

    def delivered(self, step: StepInfo, accum: int) -> None:
        """Note that a micro-batch of a step is about to be handed out."""
        if self._iteration != self._progress.iteration:
            self.require_current()
        self._progress.delivered(step, accum)

    def finished(self, step: StepInfo) -> None:
        """Note that all micro-batches of a step were handed out, or given up."""
        if self._iteration == self._progress.iteration:
            self._progress.finished(step)

    def require_current(self) -> None:
        """Refuse to go on with an iteration that is over.

        Raises:
            PlanError: Another one was begun, or the loader was moved or closed.
        """
        if self._iteration != self._progress.iteration:
            raise PlanError(
                "this iteration of the loader is over, because another one was begun, or set_epoch, "
                "load_state_dict or close called; iterate over the loader anew"
            )
