"""How far a run is; the caller decides how to show it."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The state of a run after one more unit."""

    stage: str
    """What is being done, in a word or two."""
    fraction: float
    """Share of the stage's bytes that are done, 0 to 1; units of an earlier run included."""
    num_rows: int
    """Rows done by this run."""
    num_tokens: int
    """Tokens counted by this run."""
    seconds: float
    """Since the stage began."""
    seconds_left: float | None
    """At the pace so far; None before there is one."""


Listener = Callable[[Progress], None]


class Pace:
    """Tells a listener after every unit how far a stage is."""

    def __init__(self, stage: str, listener: Listener | None, *, total: int, done_before: int) -> None:
        """Start the clock.

        Args:
            stage: what is being done.
            listener: is called with the ``Progress``.
            total: size of the stage, in bytes or whatever measures its work.
            done_before: how much of it an earlier run has done.
        """
        self._stage = stage
        self._listener = listener
        self._total = max(total, 1)
        self._done_before = self._done = done_before
        self._num_rows = self._num_tokens = 0
        self._start = monotonic()

    def advance(self, size: int, num_rows: int, num_tokens: int) -> None:
        """Count one finished unit."""
        self._done += size
        self._num_rows += num_rows
        self._num_tokens += num_tokens
        if self._listener is None:
            return
        seconds = monotonic() - self._start
        by_this_run = self._done - self._done_before
        self._listener(
            Progress(
                stage=self._stage,
                fraction=min(1.0, self._done / self._total),
                num_rows=self._num_rows,
                num_tokens=self._num_tokens,
                seconds=seconds,
                seconds_left=seconds * (self._total - self._done) / by_this_run if by_this_run else None,
            )
        )
