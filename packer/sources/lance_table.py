"""Lance: one version of a table, its deleted rows left out; read by the extra ``lance``.

Lance has stores of its own (``s3://``, ``gs://``, ``az://``), and threads that no forked process has.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.errors import ConfigError, MissingExtraError, PackerError, SourceError
from packer.sources.cache import BatchCache
from packer.sources.columns import find_field, split_path
from packer.sources.location import Location
from packer.sources.part import BATCH_BYTES, BATCH_ROWS, Columns, Part, Unit

_VERSIONS = "_versions"
_OF_VERSION = re.compile(r"(.+\.lance)@([0-9]+)")
_STORES = ("s3://", "gs://", "az://")
_lost_threads = False
"""This process was forked from one that had loaded Lance: it has the library, and none of its threads."""


def _note_fork() -> None:
    global _lost_threads
    _lost_threads |= "lance" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def lance_table(location: Location) -> "LancePart | None":
    """Return the table that a path names, ``TABLE.lance`` or ``TABLE.lance@VERSION``; None where it is none.

    Raises:
        SourceError: there is no such version, or a damaged one.
    """
    if location.joined(_VERSIONS).is_dir():
        return LancePart(location)
    found = _OF_VERSION.fullmatch(location.path.rstrip("/"))
    if found is None or not Location(found[1]).joined(_VERSIONS).is_dir():
        return None
    return LancePart(Location(found[1]), int(found[2]))


class LancePart(Part):
    """The rows of one version of a table, fragment by fragment."""

    format = "lance"

    def __init__(self, location: Location, version: int | None = None) -> None:
        """Read the manifest of a version.

        Args:
            location: the table.
            version: its number; None for the newest one, which stays the one that is read.
        """
        super().__init__(location)
        self._version = version
        with self._reading(f"version {version}" if version is not None else ""):
            table = self._table
            fragments = table.get_fragments()
            self._version = int(table.version)
            self._schema: pa.Schema = table.schema
            # (fragments + 1,) row at which each begins, and the number of rows
            self._edges = np.cumsum([0, *(fragment.count_rows() for fragment in fragments)], dtype=np.int64)
            described = [fragment.metadata.to_json() for fragment in fragments]
        described = [json.loads(text) if isinstance(text, str) else text for text in described]
        sizes = [
            int(file.get("file_size_bytes") or 0) for fragment in described for file in fragment["files"]
        ]
        self._num_bytes = sum(sizes)
        self._identity = {
            "num_bytes": self._num_bytes,
            "sha256": hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
        }

    def __getstate__(self) -> dict[str, Any]:
        kept = ("location", "_version", "_schema", "_edges", "_num_bytes", "_identity")
        return {name: self.__dict__[name] for name in kept}

    @property
    def schema(self) -> pa.Schema:
        """The columns of the version."""
        return self._schema

    @property
    def num_rows(self) -> int:
        """Number of rows that are not deleted."""
        return int(self._edges[-1])

    def identity(self) -> dict[str, Any]:
        """Return the size of the files, which never change, and a hash of which rows of which there are."""
        return dict(self._identity)

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut by rows, of which each has its share of the bytes."""
        step = max(int(target_bytes / self._row_bytes), 1)
        return [
            Unit(part, start, stop, start, stop - start, int((stop - start) * self._row_bytes))
            for start in range(0, self.num_rows, step)
            for stop in [min(start + step, self.num_rows)]
        ]

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Scan the fragments that the unit touches."""
        names = self._names(columns)
        step = min(max(int(BATCH_BYTES / self._row_bytes), 1), BATCH_ROWS)
        with self._reading():
            fragments = self._table.get_fragments()
        first = int(np.searchsorted(self._edges, unit.start, side="right")) - 1
        for fragment, begin, end in zip(
            fragments[first:], self._edges[first:-1].tolist(), self._edges[first + 1 :].tolist(), strict=True
        ):
            start, stop = max(unit.start, begin), min(unit.stop, end)
            if start >= stop:
                continue
            with self._reading(f"rows {start} to {stop - 1}"):
                scanner = fragment.scanner(
                    columns=names, offset=start - begin, limit=stop - start, batch_size=step
                )
                batches = iter(scanner.to_batches())
            num_rows = 0
            while True:
                with self._reading(f"rows {start} to {stop - 1}"):
                    batch = next(batches, None)
                if batch is None:
                    break
                num_rows += batch.num_rows
                yield batch
            if num_rows != stop - start:
                raise SourceError(
                    f"{self.location.path}, rows {start} to {stop - 1}: {num_rows} were found; fetch it again"
                )

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Read single rows by their places."""
        names = self._names(columns)
        distinct, places = np.unique(rows, return_inverse=True)
        with self._reading():
            batches = self._table.take(distinct.tolist(), columns=names).to_batches()
        single = [batch.slice(row, 1) for batch in batches for row in range(batch.num_rows)]
        if len(single) != len(distinct):
            raise SourceError(
                f"{self.location.path}: {len(single)} of {len(distinct)} rows were found; fetch it again"
            )
        return [single[place] for place in places.tolist()]

    def close(self) -> None:
        """Drop the table; its version stays."""
        self.__dict__.pop("_table", None)

    @property
    def _row_bytes(self) -> float:
        return max(self._num_bytes / max(self.num_rows, 1), 1.0)

    @cached_property
    def _table(self) -> Any:
        if self.location.is_remote and not self.location.path.startswith(_STORES):
            raise ConfigError(
                f"{self.location.path}: Lance reads {', '.join(_STORES)} and local folders; copy the table"
            )
        return _lance().dataset(self.location.path, version=self._version)

    def _names(self, columns: Columns) -> list[str]:
        for column in columns:
            find_field(self.schema, column, owner=self.location.path)
        return list({(split_path(self.schema, column) or [column])[0]: None for column in columns})

    @contextmanager
    def _reading(self, where: str = "") -> Iterator[None]:
        """Turn what Lance raises, panics of Rust among it, into one error."""
        try:
            yield
        except PackerError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            place = f"{self.location.path}, {where}" if where else self.location.path
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SourceError(
                f"{place}: cannot be read ({text}); check the table, or fetch it again"
            ) from error


def _lance() -> Any:
    """Return the library.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: a process was forked from the one that loaded it.
    """
    try:
        import lance
    except ImportError as error:
        raise MissingExtraError(
            f"Lance tables need the extra: pip install 'microbatch-packer[lance]' ({error})"
        ) from error
    if _lost_threads:
        raise ConfigError(
            "Lance cannot be read in a forked process; give PlanLoader multiprocessing_context='spawn' or "
            "'forkserver'"
        )
    return lance
