"""Progress on stderr: a bar on a terminal, elsewhere one line a minute."""

from time import monotonic
from types import TracebackType
from typing import Self

import click
from rich import progress as bars
from rich.console import Console

from packer.analyzer import Progress

_SECONDS_BETWEEN_LINES = 60.0


class ProgressDisplay:
    """A listener of ``packer.analyze``; a context manager, so that a bar is cleared whatever happens."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = (
            bars.Progress(
                bars.TextColumn("{task.description}"),
                bars.BarColumn(bar_width=16),
                bars.TaskProgressColumn(),
                bars.TextColumn("{task.fields[rates]}"),
                bars.TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            if console.is_terminal
            else None
        )
        self._task: bars.TaskID | None = None
        self._last_line = monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the state after one more unit."""
        seconds = max(progress.seconds, 1e-9)
        rows, tokens = progress.num_rows / seconds, progress.num_tokens / seconds
        rates = f"{compact(rows)} rows/s, {compact(tokens)} tokens/s"
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(progress.stage, total=1.0, rates="")
            self._bar.update(self._task, completed=progress.fraction, description=progress.stage, rates=rates)
        elif monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = monotonic()
            left = "" if progress.seconds_left is None else f", {progress.seconds_left:.0f} s left"
            click.echo(f"{progress.stage}: {progress.fraction:.0%}, {rates}{left}", err=True)


def compact(number: float) -> str:
    """Return a number in four or five characters: 812, 9.4k, 183M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if number >= 99.5 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}T"
