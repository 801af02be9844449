r"""Text templates: ``"{instruction}\n{input}\n{response}"`` joins columns to a text."""

from collections.abc import Mapping, Sequence
from string import Formatter

from packer.errors import ConfigError

_Line = list[tuple[str, str | None]]
"""(literal, column) pairs; the column is None behind the last literal."""


class TextTemplate:
    """A text with columns in braces; a line whose columns are all empty in a row is left out there."""

    def __init__(self, template: str) -> None:
        """Parse a template; ``{{`` and ``}}`` are braces.

        Raises:
            ConfigError: it names no column, or is none.
        """
        self._lines: list[_Line] = [[]]
        try:
            for literal, column, form, conversion in Formatter().parse(template):
                *whole, literal = literal.split("\n")
                for line in whole:
                    self._lines[-1].append((line, None))
                    self._lines.append([])
                if column is not None and (not column or form or conversion):
                    raise ValueError(f"{{{column}}} is to hold the name of a column, and nothing else")
                self._lines[-1].append((literal, column))
        except ValueError as error:
            raise ConfigError(
                f"template {template!r}: {error}; write columns as {{name}}, braces as {{{{ and }}}}"
            ) from error
        self.columns = tuple(
            dict.fromkeys(column for line in self._lines for _, column in line if column is not None)
        )
        """The columns that it joins, in their order."""
        if not self.columns:
            raise ConfigError(f"template {template!r} names no column; write columns as {{name}}")

    def render(self, values: Mapping[str, Sequence[str | None]], row: int) -> str:
        """Return the text of one row; a null is empty.

        Args:
            values: (rows,) texts by column.
            row: which of them.
        """
        lines = []
        for line in self._lines:
            found = [values[column][row] or "" for _, column in line if column is not None]
            if any(found) or not found:
                texts = iter(found)
                lines.append(
                    "".join(literal + ("" if column is None else next(texts)) for literal, column in line)
                )
        return "\n".join(lines)
