"""The ``packer`` command: imports a subcommand when it is called, and turns errors into exit codes."""

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from packer._version import __version__
from packer.errors import ConfigError, PackerError
from packer.wording import on_one_line

# Help texts stand here, so that ``packer --help`` imports nothing but click.
_COMMANDS = {
    "analyze": "Measure the length of every sample of a data set.",
    "plan": "Pack the samples into micro-batches and steps.",
    "inspect": "Show what a plan does: on the terminal, or as a page for a browser.",
    "verify": "Check every invariant of a plan from its files.",
    "compare": "Show what differs between two plans.",
    "materialize": "Write the samples in the order in which a plan reads them.",
    "export": "Write a plan as DeepSpeed's lists, NumPy arrays or Parquet.",
    "doctor": "Show versions and the machine, and test kernels and files: for a bug report.",
}


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own names and are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in the order in which data flows."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"{__package__}.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; of one that there is not, say which was meant."""
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            close = get_close_matches(name, _COMMANDS, n=1)
            guess = f"did you mean {close[0]!r}? There" if close else "there"
            ctx.fail(f"no command is named {on_one_line(name)!r}; {guess} are {', '.join(_COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of ours becomes one line and an exit code."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.UsageError(on_one_line(str(error))) from error
        except PackerError as error:
            raise click.ClickException(on_one_line(str(error))) from error


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="packer")
def cli() -> None:
    """Decide, before training, which samples every rank sees in every micro-batch of every step.

    \b
    packer analyze x.parquet --tokens-column ids --out metrics
    packer plan metrics --out plan --max-tokens 16384
    packer verify plan
    """  # noqa: D301 (click wants the real control character)


def main() -> None:
    """Entry point of the console scripts."""
    cli.main(prog_name="packer" if sys.argv[0].endswith("__main__.py") else None)


if __name__ == "__main__":
    main()
