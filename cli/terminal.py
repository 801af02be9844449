"""Results on stdout: as wide as the terminal; in a file or a pipe, lines as they are, tables of one width."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPE_WIDTH = 110
COMMAND = "Next: "
"""Begins a line that holds a command: it is copied whole, so it is never broken."""


def print_rich(what: "RenderableType") -> None:
    """Print something rich."""
    from rich.console import Console  # plain lines go without

    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(what)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; on a terminal, those that are too long for it are broken between words."""
    if sys.stdout.isatty():
        lines = fitted(lines, shutil.get_terminal_size().columns)
    click.echo("\n".join(lines))


def fitted(lines: Iterable[str], width: int) -> Iterator[str]:
    """Break lines between words so that none is over ``width``, and indent what was broken off."""
    for line in lines:
        if len(line) <= width or line.startswith(COMMAND):
            yield line
        else:
            indent = " " * (len(line) - len(line.lstrip()) + 4)
            yield from textwrap.wrap(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
