"""The work on one unit: read it, measure it, and pack what is worth keeping into a payload."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packer.analyzer.payload import pack_arrays, unpack_arrays
from packer.samples import LengthDefinition, measure_unit
from packer.sources import Source, Unit

_COUNTS = "@counts"  # beside the metrics, whose names begin with a letter or a digit


@dataclass(frozen=True, slots=True)
class UnitLengths:
    """The lengths of one unit, as the journal keeps them."""

    values: dict[str, NDArray[np.integer]]
    """Metric to (rows,) int64; empty where the unit has no rows."""
    num_nulls: int
    num_empties: int

    @property
    def num_rows(self) -> int:
        """Samples of the unit."""
        return self.totals[0]

    @property
    def totals(self) -> tuple[int, int]:
        """Rows and tokens, by the main metric."""
        main = next(iter(self.values.values()), np.empty(0, np.int64))
        return len(main), int(main.sum())

    def pack(self) -> bytes:
        """Return the payload."""
        return pack_arrays(self.values | {_COUNTS: np.array([self.num_nulls, self.num_empties])})

    @classmethod
    def unpack(cls, payload: memoryview) -> "UnitLengths":
        """Read a payload; the values are views of it."""
        values = unpack_arrays(payload)
        num_nulls, num_empties = values.pop(_COUNTS).tolist()
        return cls(values, num_nulls, num_empties)


@dataclass(frozen=True, slots=True)
class MeasureUnit:
    """Measures a unit of a source."""

    source: Source
    definition: LengthDefinition

    def __call__(self, unit: Unit) -> bytes:
        """Return the payload of a ``UnitLengths``."""
        batches = list(measure_unit(self.source, unit, self.definition))
        names = batches[0].lengths if batches else ()
        return UnitLengths(
            {name: np.concatenate([batch.lengths[name] for batch in batches]) for name in names},
            sum(batch.num_null for batch in batches),
            sum(batch.num_empty for batch in batches),
        ).pack()
