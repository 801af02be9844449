"""A ``datasets.Dataset`` in the caller's hands: its rows in its own order, after ``select`` and ``shuffle``.

Its table is read by its own indices mapping, untouched by its format. It pickles as ``datasets`` has it: what
lies in files as their paths, what is in memory whole.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeGuard

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import ConfigError
from packer.sources.cache import BatchCache
from packer.sources.columns import find_field, split_path
from packer.sources.location import Location, reading
from packer.sources.part import BATCH_BYTES, BATCH_ROWS, Columns, Part, Unit

_EDGE_ROWS = 16


class DatasetObject(Protocol):
    """What is asked of a ``datasets.Dataset``."""

    @property
    def data(self) -> Any:
        """The table, before its indices mapping."""

    @property
    def format(self) -> dict[str, Any]:
        """How rows are delivered."""

    def __len__(self) -> int: ...

    def with_format(self, type: str | None = None, columns: list[str] | None = None) -> Any:  # noqa: A002
        """Return the data set with rows in another form."""


def is_dataset_object(given: object) -> TypeGuard[DatasetObject]:
    """Whether something is a ``datasets.Dataset``.

    Raises:
        ConfigError: it is another thing of ``datasets``: several splits, or a stream.
    """
    names = {kind.__name__ for kind in type(given).__mro__ if kind.__module__.split(".")[0] == "datasets"}
    if "DatasetDict" in names and isinstance(given, dict):
        splits = ", ".join(map(repr, given))
        raise ConfigError(f"a DatasetDict holds several splits ({splits}); give one of them: dataset[SPLIT]")
    if names & {"IterableDataset", "IterableDatasetDict"}:
        raise ConfigError(
            "a stream of datasets cannot be asked for samples by their place; load it with streaming=False, "
            "or save it to Parquet"
        )
    return "Dataset" in names


class DatasetObjectPart(Part):
    """The rows of one ``datasets.Dataset``."""

    format = "huggingface"

    def __init__(self, dataset: DatasetObject) -> None:
        """Take a data set as it is now.

        Raises:
            ConfigError: it has a transform, so that its rows are not those of its table.
        """
        super().__init__(Location(f"the datasets.Dataset of {len(dataset)} rows"))
        if dataset.format["type"] == "custom":
            raise ConfigError(
                "the data set has a transform, which is not stored; apply it with map, or measure what it "
                "gives with packer.analyze_dataset"
            )
        self._dataset = dataset

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "_dataset": self._dataset}

    @property
    def schema(self) -> pa.Schema:
        """The columns of its table."""
        return self._dataset.data.schema

    @property
    def num_rows(self) -> int:
        """Number of rows, as ``len`` has it."""
        return len(self._dataset)

    def identity(self) -> dict[str, Any]:
        """Return a hash of the first and last rows and of the whole indices mapping; there is no size."""
        return {"num_bytes": None, "sha256": self._sha256}

    @cached_property
    def _sha256(self) -> str:
        last = range(max(self.num_rows - _EDGE_ROWS, 0), self.num_rows)
        rows = sorted({*range(min(_EDGE_ROWS, self.num_rows)), *last})
        names = [(field.name, str(field.type)) for field in self.schema]
        digest = hashlib.sha256(repr((names, self.num_rows)).encode())
        if rows:
            digest.update(repr(self._table(tuple(self.schema.names), rows).to_pylist()).encode())
        indices = getattr(self._dataset, "_indices", None)
        if indices is not None:
            for chunk in indices.column(0).chunks:
                digest.update(chunk.cast(pa.int64()).to_numpy())
        return digest.hexdigest()

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut by rows, of which each has its share of the table's bytes."""
        step = max(int(target_bytes / self._row_bytes), 1)
        return [
            Unit(part, start, stop, start, stop - start, int((stop - start) * self._row_bytes))
            for start in range(0, self.num_rows, step)
            for stop in [min(start + step, self.num_rows)]
        ]

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield the rows as the table has them, or gathered where a mapping says so."""
        step = min(max(int(BATCH_BYTES / self._row_bytes), 1), BATCH_ROWS)
        names = self._names(columns)
        for start in range(unit.start, unit.stop, step):
            yield from self._table(names, slice(start, min(start + step, unit.stop))).to_batches()

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Gather the rows."""
        batches = self._table(self._names(columns), rows.tolist()).to_batches()
        return [batch.slice(row, 1) for batch in batches for row in range(batch.num_rows)]

    def close(self) -> None:
        """Keep everything: the data set is the caller's."""

    @property
    def _row_bytes(self) -> float:
        table = self._dataset.data
        return max(float(table.nbytes / max(table.num_rows, 1)), 1.0)

    def _names(self, columns: Columns) -> tuple[str, ...]:
        for column in columns:
            find_field(self.schema, column, owner=self.location.path)
        return tuple({(split_path(self.schema, column) or [column])[0]: None for column in columns})

    def _table(self, names: tuple[str, ...], rows: slice | list[int]) -> pa.Table:
        with reading(self.location):
            return self._dataset.with_format("arrow", columns=list(names))[rows]
