"""How far planning is; the caller decides how to show it.

Compiled passes do not call back: what is told is the phase, epoch by epoch, and how far writing is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic


class Phase(StrEnum):
    """What planning does, in order; all but the first and the last once an epoch."""

    CHECK = "checking the metrics"
    PACK = "packing"
    LAY_OUT = "laying out"
    WRITE = "writing"
    FLUSH = "flushing to disk"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanProgress:
    """The state of a plan in the making."""

    phase: Phase
    epoch: int | None
    """Whose phase it is; None where it is of no epoch."""
    num_epochs: int
    num_samples: int
    """Of the source, each epoch."""
    fraction: float
    """Share of the time that is over, 0 to 1, by estimate; it never falls."""
    seconds: float
    """Since planning began."""
    seconds_left: float | None
    """By estimate: a phase takes as long as it took before, or in proportion to those that are known. None
    before there is one."""

    @property
    def stage(self) -> str:
        """The phase in words: ``packing epoch 2 of 3``."""
        if self.epoch is None or self.num_epochs == 1:
            return str(self.phase)
        return f"{self.phase} epoch {self.epoch + 1} of {self.num_epochs}"


Listener = Callable[[PlanProgress], None]

_USUAL = {Phase.CHECK: 0.4, Phase.PACK: 4.0, Phase.LAY_OUT: 2.0, Phase.WRITE: 3.5, Phase.FLUSH: 1.0}
"""How long a phase of one epoch takes beside the others, before any is known."""


class Pace:
    """Tells a listener where planning stands, and learns from each phase how long those to come will take."""

    def __init__(self, listener: Listener | None, *, num_samples: int, num_epochs: int) -> None:
        self._listener = listener
        self._num_samples = num_samples
        self._num_epochs = num_epochs
        self._left = {phase: float(num_epochs) for phase in Phase} | {Phase.CHECK: 1.0, Phase.FLUSH: 1.0}
        self._spent = dict.fromkeys(Phase, 0.0)
        self._done = dict.fromkeys(Phase, 0.0)
        self._phase = Phase.CHECK
        self._epoch: int | None = None
        self._share = 0.0
        self._start = self._last = monotonic()
        self._fraction = 0.0

    def survey_first(self) -> None:
        """Expect every epoch to be packed and laid out once before any is written."""
        self._left[Phase.PACK] += self._num_epochs
        self._left[Phase.LAY_OUT] += self._num_epochs

    def begin(self, phase: Phase, epoch: int | None = None) -> None:
        """End the phase so far, and begin another."""
        self._count(1.0)
        self._phase, self._epoch, self._share = phase, epoch, 0.0
        self._tell()

    def advance(self, share: float) -> None:
        """Say which share of the phase is done."""
        self._count(share)
        self._tell()

    def _count(self, share: float) -> None:
        now = monotonic()
        self._spent[self._phase] += now - self._last
        self._last = now
        self._done[self._phase] += share - self._share
        self._left[self._phase] = max(self._left[self._phase] - (share - self._share), 0.0)
        self._share = share

    def _tell(self) -> None:
        if self._listener is None:
            return
        seconds = self._last - self._start
        seconds_left = None
        if any(self._done.values()):
            seconds_left = sum(left * self._seconds_of(phase) for phase, left in self._left.items())
            self._fraction = max(self._fraction, seconds / max(seconds + seconds_left, 1e-9))
        self._listener(
            PlanProgress(
                phase=self._phase,
                epoch=self._epoch,
                num_epochs=self._num_epochs,
                num_samples=self._num_samples,
                fraction=self._fraction,
                seconds=seconds,
                seconds_left=seconds_left,
            )
        )

    def _seconds_of(self, phase: Phase) -> float:
        """Return how long one whole phase takes."""
        if self._done[phase] > 0:
            return self._spent[phase] / self._done[phase]
        known = [other for other, done in self._done.items() if done > 0]
        usual = sum(_USUAL[other] * self._done[other] for other in known)
        return _USUAL[phase] * sum(self._spent[other] for other in known) / usual
