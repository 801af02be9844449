"""Options that several commands share, and a command whose help shows its options in groups."""

from collections.abc import Callable
from pathlib import Path
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
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "Help"), []).append(record)
        for group, records in sorted(groups.items(), key=lambda item: item[0] == "Help"):
            with formatter.section(group):
                formatter.write_dl(records)


class PlanPath(click.Path):
    """A plan: a folder, or a URL, which a path would not keep as it is."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path, or the text of a URL."""
        return value if isinstance(value, str) and "://" in value else super().convert(value, param, ctx)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def grouped(group: str, *names: str, **attributes: Any) -> Decorator:
    """Return an option in a group; its default, if it has one, is shown."""
    return click.option(
        *names, cls=GroupedOption, group=group, show_default="default" in attributes, **attributes
    )
