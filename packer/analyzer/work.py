"""What an analysis has to do: its stages over the units of a source, and the identity that lets it go on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer._version import __version__
from packer.analyzer.keys import KeyColumn
from packer.analyzer.sample_metrics import SampleMetric
from packer.analyzer.tasks import (
    LENGTHS,
    VOCABULARY,
    CountVocabulary,
    MeasureUnit,
    UnitLengths,
    add_vocabulary,
    vocabulary_totals,
)
from packer.jobs.executors import Executor
from packer.jobs.journal import Journal
from packer.jobs.progress import Listener
from packer.jobs.stages import Stage
from packer.metrics import Blocks
from packer.samples import LengthDefinition
from packer.sources import Source, Unit
from packer.sources.part import BLOCK_BYTES, PartBlocks

UNIT_BYTES = 16 << 20
TEXT_UNIT_BYTES = 2 << 20
"""Busy for about a second: long enough for all threads of a tokenizer, short enough to deal out evenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One analysis, up to the writing of files."""

    source: Source
    units: list[Unit]
    definition: LengthDefinition
    metrics: tuple[SampleMetric, ...]
    token_dtype: np.dtype[np.integer] | None
    keys: tuple[KeyColumn, ...]

    @classmethod
    def over(
        cls,
        source: Source,
        definition: LengthDefinition,
        metrics: tuple[SampleMetric, ...],
        token_dtype: np.dtype[np.integer] | None,
        keys: tuple[KeyColumn, ...],
    ) -> "Work":
        """Cut a source into units; the cut depends on the source and the definition alone."""
        units = source.units(
            list(definition.read_columns),
            target_bytes=TEXT_UNIT_BYTES if definition.is_tokenized else UNIT_BYTES,
        )
        return cls(
            source=source,
            units=units,
            definition=definition,
            metrics=metrics,
            token_dtype=token_dtype,
            keys=keys,
        )

    def job(self, identity: list[dict[str, Any]]) -> dict[str, Any]:
        """Return all that the payloads depend on."""
        return {
            "version": __version__,
            "sources": identity,
            "definition": self.definition.to_json(),
            "metrics": [metric.identity for metric in self.metrics],
            "token_dtype": str(self.token_dtype),
            "keys": [[key.name, key.column] for key in self.keys],
            "num_units": len(self.units),
        }

    def run(self, journal: Journal, executor: Executor, listener: Listener | None) -> int:
        """Fill the journal; return how many units an earlier run had done."""
        num_reused = 0
        vocabulary: NDArray[np.int64] | None = None
        if any(metric.needs.vocabulary for metric in self.metrics):
            counting: Stage[Unit] = Stage(
                number=VOCABULARY,
                name="counting",
                task=CountVocabulary(self.source, self.definition),
                units=self.units,
                size_of=_bytes_of,
                count=vocabulary_totals,
            )
            num_reused += counting.run(journal, executor, listener)
            vocabulary = add_vocabulary(journal.payload(VOCABULARY, n) for n in range(len(self.units)))
        measuring: Stage[Unit] = Stage(
            number=LENGTHS,
            name="measuring",
            task=MeasureUnit(
                self.source, self.definition, self.metrics, vocabulary, self.token_dtype, self.keys
            ),
            units=self.units,
            size_of=_bytes_of,
            count=_totals_of,
        )
        return num_reused + measuring.run(journal, executor, listener)

    def lengths(self, journal: Journal) -> Iterator[UnitLengths]:
        """Yield what the units came to, in order."""
        return (UnitLengths.unpack(journal.payload(LENGTHS, n)) for n in range(len(self.units)))

    def with_row_counts(self, identity: list[dict[str, Any]], journal: Journal) -> list[dict[str, Any]]:
        """Return the identities with each file's row count, which of some formats only reading tells."""
        rows = [0] * len(identity)
        for unit, lengths in zip(self.units, self.lengths(journal), strict=True):
            rows[unit.part] += lengths.num_rows
        return [file | {"num_rows": num_rows} for file, num_rows in zip(identity, rows, strict=True)]

    def blocks(self, journal: Journal) -> Blocks:
        """Return how the samples lie in files; of a file without blocks, the units that it was read in."""
        of_length = self.definition.kind == "length"  # the tokens are in another column
        parts = self.source.blocks(() if of_length else list(self.definition.read_columns))
        measured: dict[int, list[tuple[int, int]]] = {}
        for unit, lengths in zip(self.units, self.lengths(journal), strict=True):
            if parts[unit.part] is None:
                measured.setdefault(unit.part, []).append(
                    (lengths.num_rows, max(unit.num_bytes, lengths.num_bytes))
                )
        rows, num_bytes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, part in enumerate(parts):
            if part is None:
                part = _joined(measured.get(number, []))
            holds = part.rows > 0
            rows.append(part.rows[holds])
            num_bytes.append(part.num_bytes[holds])
        ends = np.cumsum(np.concatenate(rows))
        return Blocks(
            firsts=np.concatenate([[0], ends[:-1]]).astype(np.int64),
            num_bytes=np.concatenate(num_bytes).astype(np.int64),
            num_samples=int(ends[-1]),
        )


def _joined(units: list[tuple[int, int]]) -> PartBlocks:
    """Return consecutive (rows, bytes) of one file, joined until they reach ``BLOCK_BYTES``."""
    blocks: list[tuple[int, int]] = []
    for rows, num_bytes in units:
        if blocks and blocks[-1][1] < BLOCK_BYTES:
            blocks[-1] = (blocks[-1][0] + rows, blocks[-1][1] + num_bytes)
        else:
            blocks.append((rows, num_bytes))
    found = np.array(blocks, np.int64).reshape(-1, 2)
    return PartBlocks(found[:, 0], found[:, 1])


def _bytes_of(unit: Unit) -> int:
    return unit.num_bytes


def _totals_of(payload: memoryview) -> tuple[int, int]:
    return UnitLengths.unpack(payload).totals
