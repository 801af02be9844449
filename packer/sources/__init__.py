"""Data sets on disk or behind a URL, as rows: cut into units of work, read in order, or taken at random.

One file a format. `open_source` finds the files and their formats; a `Source` is their rows, end to end; a
`Unit` is a piece of work that any process can read.
"""

from packer.sources.columns import find_field, storage_type, take_column
from packer.sources.documents import by_document
from packer.sources.opening import Given, open_source
from packer.sources.part import Columns, OnError, Part, Unit
from packer.sources.skipped import skipped_rows, without_rows
from packer.sources.source import Source

__all__ = [
    "Columns",
    "Given",
    "OnError",
    "Part",
    "Source",
    "Unit",
    "by_document",
    "find_field",
    "open_source",
    "skipped_rows",
    "storage_type",
    "take_column",
    "without_rows",
]
