"""How far an epoch was played: moved by what is handed out, never by what is read ahead."""

from collections.abc import Iterator
from typing import NamedTuple

from packer.errors import PackerError, PlanError, StateError
from packer.plan import Plan
from packer.runtime.batches.batch import Batch, StepInfo


class Place(NamedTuple):
    """A micro-batch of this rank."""

    epoch: int
    step: int
    accum: int


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
        self._iteration = 0

    def begin(self) -> int:
        """Let an iteration begin where the next one is to; return its number, by which it moves the place."""
        self.place = self.next_start
        self.playing = self.place.epoch
        self.next_start = Place(self.playing + 1, 0, 0)
        self._iteration += 1
        return self._iteration

    def go_to(self, place: Place) -> None:
        """Stand at a place, and end the iteration that goes on."""
        self.place = self.next_start = self._normal(place)
        self.step = self.playing = None
        self._iteration += 1

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

    def is_current(self, iteration: int) -> bool:
        """Return whether an iteration is the one that goes on."""
        return iteration == self._iteration

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
    """The batches of one iteration; handing them out moves the loader's progress.

    It refers to the progress, not to the loader: in a reference cycle the worker processes would be left to
    the garbage collector, which may take down their queues first and then wait seconds for each of them.
    """

    def __init__(self, progress: Progress, iteration: int, batches: Iterator[Batch | PackerError]) -> None:
        self._progress = progress
        self._iteration = iteration
        self._batches = batches

    def next_batch(self) -> Batch:
        """Return the next batch, or raise what kept a worker from making it."""
        self._require_current()
        batch = next(self._batches, None)
        if batch is None:
            raise PlanError(
                "this iteration of the loader broke off at an error; load_state_dict(loader.state_dict()) "
                "lets the next one go on from there"
            )
        if isinstance(batch, PackerError):
            try:
                raise batch
            finally:
                del batch  # or its trace, which holds this frame, would be a cycle around the workers
        return batch

    def delivered(self, step: StepInfo, accum: int) -> None:
        """Note that a micro-batch of a step is about to be handed out."""
        self._require_current()
        self._progress.delivered(step, accum)

    def finished(self, step: StepInfo) -> None:
        """Note that all micro-batches of a step were handed out, or given up."""
        if self._progress.is_current(self._iteration):
            self._progress.finished(step)

    def _require_current(self) -> None:
        if not self._progress.is_current(self._iteration):
            raise PlanError(
                "this iteration of the loader is over, because another one was begun, or set_epoch or "
                "load_state_dict called; iterate over the loader anew"
            )
