"""One optimizer update as the training loop sees it: an iterator over this rank's micro-batches."""

from collections import deque

from packer.errors import PlanError
from packer.runtime.batches.batch import Batch, StepInfo
from packer.runtime.loader.labels import LabelCheck
from packer.runtime.loader.progress import EpochStream
from packer.runtime.topology import Share
from packer.wording import counted


class Step:
    """A step of the plan. Iterating over it hands out its micro-batches, each once.

    The numbers count all ranks and all micro-batches of the step, fillers left out.
    """

    def __init__(
        self,
        info: StepInfo,
        accums: range,
        stream: EpochStream,
        *,
        share: Share,
        labels: LabelCheck,
    ) -> None:
        """Stand at a step's beginning, or, after a resume, within it.

        Args:
            info: What the plan says of the step.
            accums: Places of the micro-batches still to come.
            stream: Where they come from.
            share: Which part of the step is this rank's.
            labels: Holds the labels of its micro-batches against the plan.
        """
        self.info = info
        self.epoch = info.epoch
        self.index = info.index
        """The step's number in its epoch, from 0."""
        self.num_samples = info.num_samples
        """The batch size."""
        self.num_tokens = info.num_tokens
        """Real tokens."""
        self.max_seqlen = info.max_seqlen
        """The longest sample."""
        self.lr_scale = info.lr_scale
        """What the learning rate of this update is multiplied by."""
        self.samples_before = info.samples_before
        """Samples of all earlier steps, earlier epochs included."""
        self.tokens_before = info.tokens_before
        """Tokens of all earlier steps, earlier epochs included."""
        self.share = share
        self._first = accums.start
        self._end = accums.stop
        self._next = accums.start
        """The micro-batch that is handed out next."""
        self._stream = stream
        self._labels = labels
        self._buffer: deque[Batch] = deque()
        self._is_over = False
        self._was_counted = False

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the step's loss is a sum over: what the sum is divided by.

        Raises:
            PlanError: The plan does not know it, or the labels are not those that it counted.
        """
        if self._labels.complaint is not None:
            raise PlanError(self._labels.complaint)
        return self.info.num_loss_tokens

    def count_loss_tokens(self) -> int:
        """Count this rank's labels that are not −100; what is still to come is read, and kept.

        Whoever counts need not agree with the plan, so the step's labels are no longer held against it.

        Raises:
            PlanError: Some of the step's micro-batches never reached, or will never reach, this loop.
        """
        if self._first:
            raise PlanError(
                f"step {self.index} of epoch {self.epoch} goes on after {self._first} micro-batches "
                "of an earlier run, whose loss tokens are not known here; keep the step's count beside the "
                "loader's state, or resume with resume='step'"
            )
        if self._was_left:
            raise PlanError(self._left_message())
        self._was_counted = True
        while len(self._buffer) < len(self):
            self._buffer.append(self._take(self._next + len(self._buffer)))
        return self._labels.num_loss_tokens

    def leave(self) -> None:
        """Give up what was not handed out."""
        if not self._is_over:
            self._buffer.clear()
            self._finish()

    def __len__(self) -> int:
        """Return how many micro-batches are still to come."""
        return self._end - self._next

    def __bool__(self) -> bool:
        """A step is a step, also when all its micro-batches were handed out."""
        return True

    def __iter__(self) -> "Step":
        if self._was_left:
            raise PlanError(self._left_message())
        if self._is_over:
            raise PlanError(
                f"step {self.index} of epoch {self.epoch} was played already; a step hands out its "
                "micro-batches once, keep them in a list to see them again"
            )
        return self

    def __next__(self) -> Batch:
        if self._next == self._end:
            if not self._is_over:
                self._finish()
            raise StopIteration
        if self._is_over:
            raise PlanError(self._left_message())
        if not self._buffer:
            self._buffer.append(self._take(self._next))
        if self._labels.complaint is not None and not self._was_counted:
            raise PlanError(self._labels.complaint)
        batch = self._buffer.popleft()
        self._stream.delivered(self.info, self._next)
        self._next += 1
        return batch

    def _take(self, accum: int) -> Batch:
        batch = self._stream.take(self.epoch, self.index, accum)
        batch.step = self.info
        self._labels.note(batch, is_last=accum + 1 == self._end)
        return batch

    @property
    def _was_left(self) -> bool:
        return self._is_over and len(self) > 0

    def _left_message(self) -> str:
        return (
            f"step {self.index} of epoch {self.epoch} was left {len(self)} micro-batches before its end, "
            "because the next step was asked for, or leave() called; play each step before the next"
        )

    def _finish(self) -> None:
        self._is_over = True
        self._stream.finished(self.info)

    def __repr__(self) -> str:
        return (
            f"Step({self.index} of epoch {self.epoch}: {counted(self.num_samples, 'sample')}, "
            f"{counted(self.num_tokens, 'token')})"
        )
