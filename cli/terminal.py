"""Rich output on stdout: as wide as the terminal, and of one width where it goes into a file or a pipe."""

from rich.console import Console, RenderableType

PIPE_WIDTH = 110


def print_rich(what: RenderableType) -> None:
    """Print something rich."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(what)
