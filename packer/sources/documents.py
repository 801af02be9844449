"""Documents of ``.bin/.idx`` pairs: the sequences between two entries of the document index, end to end."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_arrow, to_numpy
from packer.errors import ConfigError, SourceError
from packer.sources.cache import BatchCache
from packer.sources.indexed import TOKENS_COLUMN, IndexedPart
from packer.sources.part import BATCH_ROWS, Columns, Part, Unit, cut_rows
from packer.sources.source import Source

_INDEX_BYTES = 12  # of a sequence: its size and its pointer


def by_document(source: Source) -> Source:
    """Return the rows of a source of ``.bin/.idx`` pairs document by document.

    Raises:
        ConfigError: a file is no such pair.
        SourceError: a document index that does not tell where the documents are.
    """
    if other := next((part for part in source.parts if part.format != IndexedPart.format), None):
        raise ConfigError(
            f"{other.location.path} is no .bin/.idx pair, which alone has documents; leave them out"
        )
    return Source([part if isinstance(part, DocumentsPart) else DocumentsPart(part) for part in source.parts])


class DocumentsPart(Part):
    """One pair; row i is its document i."""

    format = IndexedPart.format

    def __init__(self, sequences: Part) -> None:
        """Check that the document index covers every sequence.

        Args:
            sequences: the pair.
        """
        assert isinstance(sequences, IndexedPart)
        super().__init__(sequences.location)
        self._sequences = sequences
        edges = self._edges
        ends = edges[[0, -1]].tolist() if len(edges) else []
        if ends != [0, sequences.num_rows] or (np.diff(edges) < 0).any():
            found = f"goes from {ends[0]} to {ends[1]}" if ends else "is empty"
            raise SourceError(
                f"{self.location.path}: its document index {found}, and there are {sequences.num_rows} "
                "sequences, so it does not tell where documents end; analyze sequences, without --documents, "
                "or build it again"
            )
        self._num_rows = len(edges) - 1
        if not self.location.is_remote:
            self.close()  # of thousands of pairs, those in use alone are mapped

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("location", "_sequences", "_num_rows")}

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """(documents + 1,) sequence at which each begins, and the number of sequences."""
        return self._sequences.document_index

    @property
    def schema(self) -> pa.Schema:
        """One list column, ``input_ids``."""
        return self._sequences.schema

    @property
    def num_rows(self) -> int:
        """Number of documents."""
        return self._num_rows

    def identity(self) -> dict[str, Any]:
        """Return that of the pair."""
        return self._sequences.identity()

    def units(self, part: int, columns: Sequence[str], target_bytes: int) -> list[Unit]:
        """Cut the index between documents."""
        return cut_rows(part, self._edges * _INDEX_BYTES, target_bytes) if self._num_rows else []

    def read(self, unit: Unit, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield lists over the mapped file; of a remote file the lengths alone, over nulls."""
        first = unit.first_row or 0
        stop = first + (unit.num_rows or 0)
        for start in range(first, stop, BATCH_ROWS):
            yield self._batch(start, min(start + BATCH_ROWS, stop))

    def take(self, rows: NDArray[np.int64], columns: Columns, cache: BatchCache) -> list[pa.RecordBatch]:
        """Slice the mapped file; of a remote one only the bytes of the documents are fetched."""
        if not self.location.is_remote:
            return [self._batch(row, row + 1) for row in rows.tolist()]
        batches = []
        for start, stop in self._edges[np.stack([rows, rows + 1], axis=1)].tolist():
            pieces = self._sequences.take(np.arange(start, stop), columns, cache)
            values = [piece.column(TOKENS_COLUMN).flatten() for piece in pieces]
            batches.append(_lists([0], [sum(map(len, values))], _joined(values, self.schema)))
        return batches

    def place_of_row(self, row: int) -> str:
        """Name the document."""
        return f"document {row}"

    def close(self) -> None:
        """Unmap both files."""
        self.__dict__.pop("_edges", None)
        self._sequences.close()

    def _batch(self, start: int, stop: int) -> pa.RecordBatch:
        """Return the documents ``[start, stop)``: over the file, if the sequences of each lie end to end."""
        edges = self._edges[start : stop + 1] - self._edges[start]
        first, num_sequences = int(self._edges[start]), int(edges[-1])
        views = [
            batch.column(TOKENS_COLUMN)
            for batch in self._sequences.read(
                Unit(0, first, first + num_sequences, first, num_sequences, 0), {TOKENS_COLUMN: None}
            )
        ]
        # (sequences + 1,): the last for documents without any
        starts = np.concatenate([*(to_numpy(view.offsets) for view in views), [0]]).astype(np.int64)
        sizes = np.concatenate([*(to_numpy(view.sizes) for view in views), [0]]).astype(np.int64)
        before = np.cumsum(sizes) - sizes
        lengths = np.diff(before[edges])
        values = views[0].values if views else _joined([], self.schema)
        # (sequences,) where it would begin, were its document in one piece
        document = np.repeat(np.arange(stop - start), np.diff(edges))
        anchors = starts[edges[:-1]]
        at_home = anchors[document] + before[:-1] - before[edges[:-1]][document] == starts[:-1]
        if (at_home | (sizes[:-1] == 0)).all():
            return _lists(anchors, lengths, values)
        order = np.repeat(starts - before, sizes) + np.arange(sizes.sum())
        return _lists(before[edges[:-1]], lengths, values.take(to_arrow(order)))


def _lists(starts: Any, lengths: Any, values: pa.Array) -> pa.RecordBatch:
    buffers = [None, pa.py_buffer(np.array(starts, np.int64)), pa.py_buffer(np.array(lengths, np.int64))]
    lists = pa.Array.from_buffers(pa.large_list_view(values.type), len(lengths), buffers, children=[values])
    return pa.RecordBatch.from_arrays([lists], names=[TOKENS_COLUMN])


def _joined(values: list[pa.Array], schema: pa.Schema) -> pa.Array:
    return pa.concat_arrays(values) if values else pa.array([], schema.field(TOKENS_COLUMN).type.value_type)
