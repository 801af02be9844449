"""From the lengths of all units to the files of a metrics directory and its manifest."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.analyzer.merge import merge_metric
from packer.analyzer.tasks import UnitLengths
from packer.errors import SourceError
from packer.metrics import FileDigest, Manifest, MetricSummary


def write_metrics(
    folder: Path,
    units: Callable[[], Iterable[UnitLengths]],
    *,
    sources: list[dict[str, Any]],
    definition: dict[str, Any],
) -> Manifest:
    """Write every metric's files, then the manifest.

    Args:
        folder: the directory to fill.
        units: the lengths of all samples in order; may be called again.
        sources: row count and identity of each file.
        definition: what was measured, as the manifest records it.

    Raises:
        SourceError: there is not one sample.
    """
    num_samples = num_nulls = num_empties = 0
    names: list[str] = []
    for unit in units():
        num_samples += unit.num_rows
        num_nulls += unit.num_nulls
        num_empties += unit.num_empties
        names = names or list(unit.values)
    if num_samples == 0:
        raise SourceError("the data set is empty; name one that has rows")
    summaries: dict[str, MetricSummary] = {}
    files: dict[str, FileDigest] = {}
    for name in names:
        merged = merge_metric(folder, name, partial(_values_of, name, units), num_samples)
        summaries[name] = merged.summary
        files |= merged.files
    manifest = Manifest(
        num_samples=num_samples,
        num_nulls=num_nulls,
        num_empties=num_empties,
        sources=sources,
        definition=definition,
        metrics=summaries,
        files=files,
    )
    manifest.save(folder)
    return manifest


def _values_of(name: str, units: Callable[[], Iterable[UnitLengths]]) -> Iterator[NDArray[np.integer]]:
    return (unit.values[name] for unit in units() if unit.values)
