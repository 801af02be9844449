"""How far a run is; the caller decides how to show it."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The state of a run, after one more unit or within a long one."""

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


_SECONDS_BETWEEN_LOOKS = 0.5


class _Done(NamedTuple):
    """How much of something is done."""

    size: int = 0
    num_rows: int = 0
    num_tokens: int = 0


class Pace:
    """Tells a listener how far a stage is: after every unit, and now and then within one that takes long."""

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
        self._done_before = done_before
        self._finished = _Done(done_before)
        self._under_way: dict[int, _Done] = {}
        self._start = self._told = monotonic()

    def advance(self, number: int, size: int, num_rows: int, num_tokens: int) -> None:
        """Count one finished unit."""
        self._under_way.pop(number, None)
        self._finished = _Done(*map(sum, zip(self._finished, (size, num_rows, num_tokens), strict=True)))
        self._tell()

    def look_into(self, number: int, size: int, num_rows: int, num_tokens: int) -> None:
        """Note how much of a unit is done; tell it if the listener has waited for long."""
        self._under_way[number] = _Done(size, num_rows, num_tokens)
        if monotonic() - self._told >= _SECONDS_BETWEEN_LOOKS:
            self._tell()

    def _tell(self) -> None:
        if self._listener is None:
            return
        self._told = monotonic()
        done = _Done(*map(sum, zip(self._finished, *self._under_way.values(), strict=True)))
        seconds = self._told - self._start
        by_this_run = done.size - self._done_before
        self._listener(
            Progress(
                stage=self._stage,
                fraction=min(1.0, done.size / self._total),
                num_rows=done.num_rows,
                num_tokens=done.num_tokens,
                seconds=seconds,
                seconds_left=seconds * (self._total - done.size) / by_this_run if by_this_run else None,
            )
        )
