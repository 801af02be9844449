"""From the lengths of all units to the files of a metrics directory and its manifest."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.analyzer.curriculum import write_curriculum_files
from packer.analyzer.keys import numbered
from packer.analyzer.merge import MergedMetric, merge_metric
from packer.analyzer.sample_metrics import SampleMetric
from packer.analyzer.tasks import UnitLengths
from packer.analyzer.token_files import TokenFiles
from packer.errors import SourceError
from packer.metrics import (
    MAX_SKIPPED_SAMPLES,
    Blocks,
    BlockSummary,
    FileDigest,
    KeySummary,
    Manifest,
    write_blocks,
)

Units = Callable[[], Iterable[UnitLengths]]
"""Gives the lengths of all samples in order, a unit at a time; may be called again."""


def write_metrics(
    folder: Path,
    units: Units,
    *,
    sources: list[dict[str, Any]],
    definition: dict[str, Any],
    further: Sequence[SampleMetric] = (),
    curriculum_files: bool = False,
    tokens: TokenFiles | None = None,
    keys: Mapping[str, str] | None = None,
    blocks: Callable[[], Blocks] | None = None,
) -> Manifest:
    """Write every metric's files, the blocks and the token files, then the manifest.

    Args:
        folder: the directory to fill.
        units: the lengths of all samples.
        sources: row count and identity of each file.
        definition: what was measured, as the manifest records it.
        further: metrics beyond the definition's.
        curriculum_files: write the index files of DeepSpeed's curriculum, too.
        tokens: the token files to write, still without their final names.
        keys: the keys among what the units hold, each with what it was taken of.
        blocks: gives how the samples lie in files, where that is known.

    Raises:
        SourceError: there is not one sample.
    """
    num_samples = num_nulls = num_empties = 0
    names: list[str] = []
    num_skipped, first_skipped = 0, np.zeros(0, np.int64)
    for unit in units():
        if len(first_skipped) < MAX_SKIPPED_SAMPLES:
            first_skipped = np.append(first_skipped, num_samples + unit.skipped)[:MAX_SKIPPED_SAMPLES]
        num_skipped += len(unit.skipped)
        num_samples += unit.num_rows
        num_nulls += unit.num_nulls
        num_empties += unit.num_empties
        names = names or list(unit.values)
    if num_samples == 0:
        raise SourceError("the data set is empty; name one that has rows")
    merged: dict[str, MergedMetric] = {}
    files: dict[str, FileDigest] = {}
    for name in names:
        merged[name] = merge_metric(folder, name, partial(_values_of, name, units), num_samples)
        files |= merged[name].files
        if curriculum_files:
            files |= write_curriculum_files(folder, name, merged[name].values)
    coded: dict[str, KeySummary] = {}
    for name, origin in (keys or {}).items():
        with numbered(folder, partial(_keys_of, name, units), num_samples, origin) as (codes, summary):
            merged[name] = merge_metric(folder, name, partial(iter, codes), num_samples)
        coded[name] = summary
        files |= merged[name].files
    laid_out = None
    if blocks is not None:
        listed = blocks()
        files |= write_blocks(folder, listed)
        laid_out = BlockSummary(
            num_blocks=len(listed),
            num_bytes=int(listed.num_bytes.sum()),
            max_bytes=int(listed.num_bytes.max()),
        )
    ids = (unit.token_ids for unit in units() if unit.token_ids is not None)
    manifest = Manifest(
        num_samples=num_samples,
        num_nulls=num_nulls,
        num_empties=num_empties,
        sources=sources,
        definition=definition,
        metrics={name: metric.summary for name, metric in merged.items()},
        files=files,
        num_skipped=num_skipped,
        skipped_samples=first_skipped.tolist(),
        functions={metric.name: metric.place for metric in further},
        tokens=None if tokens is None else tokens.write(ids, merged[names[0]].values),
        keys=coded,
        blocks=laid_out,
    )
    manifest.save(folder)
    return manifest


def _keys_of(name: str, units: Units) -> Iterator[NDArray[np.integer]]:
    return (unit.keys[name] for unit in units() if unit.keys)


def _values_of(name: str, units: Units) -> Iterator[NDArray[np.integer]]:
    return (unit.values[name] for unit in units() if unit.values)
