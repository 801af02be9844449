"""Options that several commands share, and a command whose help shows its options in groups."""

from collections.abc import Callable
from typing import Any

import click


class GroupedOption(click.Option):
    """An option that belongs to a group of the help text."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command that lists its options group by group, in the order in which the groups appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section a group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def grouped(group: str, *names: str, default: Any = None, **attributes: Any) -> Decorator:
    """Return an option in a group; a default that says something is shown."""
    if default is not None and not attributes.get("is_flag"):
        attributes.setdefault("show_default", True)
    return click.option(*names, cls=GroupedOption, group=group, default=default, **attributes)
