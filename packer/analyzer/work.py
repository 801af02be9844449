"""What an analysis has to do: its stages over the units of a source, and the identity that lets it go on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer._version import __version__
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
from packer.samples import LengthDefinition
from packer.sources import Source, Unit

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

    @classmethod
    def over(
        cls,
        source: Source,
        definition: LengthDefinition,
        metrics: tuple[SampleMetric, ...],
        token_dtype: np.dtype[np.integer] | None,
    ) -> "Work":
        """Cut a source into units; the cut depends on the source and the definition alone."""
        units = source.units(
            list(definition.read_columns),
            target_bytes=TEXT_UNIT_BYTES if definition.is_tokenized else UNIT_BYTES,
        )
        return cls(
            source=source, units=units, definition=definition, metrics=metrics, token_dtype=token_dtype
        )

    def job(self, identity: list[dict[str, Any]]) -> dict[str, Any]:
        """Return all that the payloads depend on."""
        return {
            "version": __version__,
            "sources": identity,
            "definition": self.definition.to_json(),
            "metrics": [metric.identity for metric in self.metrics],
            "token_dtype": str(self.token_dtype),
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
            task=MeasureUnit(self.source, self.definition, self.metrics, vocabulary, self.token_dtype),
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


def _bytes_of(unit: Unit) -> int:
    return unit.num_bytes


def _totals_of(payload: memoryview) -> tuple[int, int]:
    return UnitLengths.unpack(payload).totals
