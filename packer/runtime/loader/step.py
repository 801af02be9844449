"""One optimizer update as the training loop sees it: an iterator over this rank's micro-batches."""

from collections import deque
from collections.abc import Callable

from packer.errors import PlanError
from packer.runtime.batches.batch import Batch, StepInfo
from packer.runtime.loader.progress import EpochStream
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
        complaint_about: Callable[[Batch], str | None],
    ) -> None:
        """Stand at a step's beginning, or, after a resume, within it.

        Args:
            info: What the plan says of the step.
            accums: Places of the micro-batches still to come.
            stream: Where they come from.
            complaint_about: Says what is wrong where a batch's labels are not those that the plan counted.
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
        self._accums = accums
        self._stream = stream
        self._complaint_about = complaint_about
        self._buffer: deque[Batch] = deque()
        self._num_delivered = 0
        self._num_loss_tokens_read = 0
        self._is_over = False
        self._complaint: str | None = None
        self._num_loss_tokens_was_read = False

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the step's loss is a sum over: what the sum is divided by.

        Raises:
            PlanError: The plan does not know it, or the labels delivered are not those that it counted.
        """
        self._num_loss_tokens_was_read = True
        if self._complaint is not None:
            raise PlanError(self._complaint)
        return self.info.num_loss_tokens

    def count_loss_tokens(self) -> int:
        """Count this rank's labels that are not −100; what is still to come is read, and kept.

        Raises:
            PlanError: Some of the step's micro-batches never reached, or will never reach, this loop.
        """
        if self._accums.start:
            raise PlanError(
                f"step {self.index} of epoch {self.epoch} goes on after {self._accums.start} micro-batches "
                "of an earlier run, whose loss tokens are not known here; keep the step's count beside the "
                "loader's state, or resume with resume='step'"
            )
        if self._was_left:
            raise PlanError(self._left_message())
        while len(self._buffer) < len(self):
            self._buffer.append(self._read())
        return self._num_loss_tokens_read

    def leave(self) -> None:
        """Give up what was not handed out, so that the stream stands at the next step."""
        if not self._is_over:
            for _ in range(len(self) - len(self._buffer)):
                self._stream.next_batch()
            self._buffer.clear()
            self._finish()

    def __len__(self) -> int:
        """Return how many micro-batches are still to come."""
        return len(self._accums) - self._num_delivered

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
        if self._num_delivered == len(self._accums):
            if not self._is_over:
                self._finish()
            raise StopIteration
        if self._is_over:
            raise PlanError(self._left_message())
        batch = self._buffer.popleft() if self._buffer else self._read()
        self._stream.delivered(self.info, self._accums[self._num_delivered])
        self._num_delivered += 1
        return batch

    def _read(self) -> Batch:
        batch = self._stream.next_batch()
        batch.step = self.info
        if batch.info is not None:
            self._num_loss_tokens_read += batch.info.num_loss_tokens
        self._complaint = self._complaint or self._complaint_about(batch)
        if self._complaint is not None and self._num_loss_tokens_was_read:
            raise PlanError(self._complaint)
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
