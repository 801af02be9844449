"""Progress on stderr: a bar on a terminal, elsewhere a line a minute."""

import sys
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 60.0
WIDE = 100
"""Columns of a terminal from which on there is room for a long bar."""
NARROW = 80
"""Columns below which there is no room for details: a bar of two lines leaves its traces."""


class ProgressDisplay:
    """Shows how far a piece of work is; a context manager, so that a bar is cleared whatever happens.

    It shows the times passed and left, and counts them on where the work is long silent.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._fraction = 0.0
        self._detail = ""
        self._start = monotonic()
        self._ends_at: float | None = None
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._over = Event()
        self._lines: Thread | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._show_bar()
        else:
            self._lines = Thread(target=self._tell_now_and_then, daemon=True)
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._lines.join()

    def show(
        self, fraction: float, *, stage: str | None = None, left: float | None = None, detail: str = ""
    ) -> None:
        """Say how far the work is.

        Args:
            fraction: share of it that is done, 0 to 1.
            stage: what is being done, from now on.
            left: seconds; default: at the pace so far.
            detail: what else there is to say, in a few words.
        """
        now = monotonic()
        if left is None and fraction > 0:
            left = (now - self._start) * (1 / fraction - 1)
        self._stage = stage or self._stage
        self._fraction, self._detail = fraction, detail
        self._ends_at = None if left is None else now + left
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=fraction, description=self._stage, detail=detail)

    def count(self, done: int, total: int) -> None:
        """Say how far work is that is counted."""
        self.show(done / max(total, 1))

    def line(self) -> str:
        """Return the state in a line of text."""
        detail = f", {self._detail}" if self._detail else ""
        return f"{self._stage}: {self._fraction:.0%}{detail}, {self._times()}"

    def _times(self) -> str:
        now = monotonic()
        passed = f"{_clock(now - self._start)} passed"
        return passed if self._ends_at is None else f"{passed}, {_clock(self._ends_at - now)} left"

    def _tell_now_and_then(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_LINES):
            click.echo(self.line(), err=True)

    def _show_bar(self) -> None:
        from rich import progress as bars  # only a terminal waits for it
        from rich.console import Console
        from rich.text import Text

        times = self._times

        class Times(bars.ProgressColumn):
            def render(self, task: bars.Task) -> Text:
                return Text(times())

        console = Console(stderr=True)
        details = [] if console.width < NARROW else [bars.TextColumn("{task.fields[detail]}")]
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=16 if console.width >= WIDE else 6),
            bars.TaskProgressColumn(),
            *details,
            Times(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(self._stage, total=1.0, detail="")
        self._bar.start()


def _clock(seconds: float) -> str:
    """Return a time as people read it: 0:07, 12:30, 3:05:00."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def compact(number: float) -> str:
    """Return a number in four or five characters: 812, 9.4k, 183M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if number >= 99.5 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}T"
