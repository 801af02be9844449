"""A progress bar on stderr for work that is counted: only on a terminal."""

import sys
from types import TracebackType
from typing import Self

from rich import progress as bars
from rich.console import Console


class Bar:
    """Call it with what is done and what there is to do; it shows times passed and left, and vanishes."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.TaskProgressColumn(),
                bars.TimeElapsedColumn(),
                bars.TextColumn("left"),
                bars.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._description, total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show how far the work has come."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
