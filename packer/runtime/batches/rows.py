"""Data sets that are asked for whole micro-batches: one of these, as the data set of its own samples."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np

from packer.errors import PackerError, SourceError
from packer.plan import MicroBatch
from packer.runtime.batches.fields import Sample


class MicroBatchDataset(Protocol):
    """What the loader asks of a data set that lies in the order of one plan."""

    rows_ahead: int
    """How many rows it wants to be named ahead of the one that is read, to fetch them meanwhile."""

    def read_microbatch(self, epoch: int, row: int, /) -> Sequence[Sample]:
        """Return the samples, or pieces, of a row of the plan, in its order."""

    def prefetch(self, epoch: int, rows: Sequence[int], /) -> None:
        """Begin to fetch rows: the one that is read now, and those after it."""

    def require_plan(self, fingerprint: str, /) -> None:
        """Raise an error if it is not that plan's order."""


def reads_microbatches(dataset: Any) -> TypeGuard[MicroBatchDataset]:
    """Whether a data set offers ``read_microbatch(epoch, row)``."""
    return hasattr(dataset, "read_microbatch")


class RowSamples:
    """The samples of one micro-batch, asked for as those of any data set are: by id, and by slice.

    So whoever makes tensors of samples need not know where they come from.
    """

    def __init__(self, samples: Sequence[Sample], planned: MicroBatch, *, copies: bool) -> None:
        self._samples = samples
        self._ids: list[int] = planned.sample_ids.tolist()
        self._starts = [0] * len(self._ids) if planned.starts is None else planned.starts.tolist()
        self._copies = copies

    def __getitem__(self, sample_id: int) -> Sample:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Sample]:
        """Return samples, those of the whole micro-batch in its order."""
        if list(sample_ids) == self._ids:
            found = list(self._samples)
        else:
            found = [self._samples[self._ids.index(sample_id)] for sample_id in sample_ids]
        return [_copied(sample) for sample in found] if self._copies else found

    def read_slice(self, sample_id: int, start: int, stop: int) -> Sample:
        """Return tokens ``[start, stop)`` of a sample, those of them that stand in this micro-batch."""
        # The last piece that begins there or before: a sample may have several in a row of tokens.
        begin, at = max(
            (begin, at)
            for at, (own, begin) in enumerate(zip(self._ids, self._starts, strict=True))
            if own == sample_id and begin <= start
        )
        sample = {name: values[start - begin : stop - begin] for name, values in self._samples[at].items()}
        return _copied(sample) if self._copies else sample


def read_row(
    dataset: MicroBatchDataset, epoch: int, row: int, planned: MicroBatch, *, copies: bool
) -> RowSamples:
    """Read a micro-batch.

    Args:
        dataset: What lies in the plan's order.
        epoch: Of the plan.
        row: Of the epoch.
        planned: What the plan says of the row.
        copies: Samples get memory of their own, for functions of the user that may write into it.

    Raises:
        SourceError: The data set raised an error, or returned another number of samples.
    """
    try:
        samples = dataset.read_microbatch(epoch, row)
    except PackerError:
        raise
    except Exception as error:
        raise SourceError(
            f"the data set raised {type(error).__name__} when asked for row {row} of epoch {epoch}: {error}"
        ) from error
    if len(samples) != planned.num_samples:
        raise SourceError(
            f"the data set's read_microbatch returned {len(samples)} samples for row {row} of epoch {epoch}, "
            f"where the plan has {planned.num_samples}; let it return one for each"
        )
    return RowSamples(samples, planned, copies=copies)


def _copied(sample: Sample) -> Sample:
    return {
        name: _copied(value) if isinstance(value, Mapping) else np.array(value)
        for name, value in sample.items()
    }
