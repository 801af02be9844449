"""``analyze_dataset``: the same metrics from any map-style data set, by a function of its samples."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from packer.analyzer.keys import KeyFunction, hash_objects
from packer.analyzer.options import check_metric_names
from packer.analyzer.result import AnalyzeResult, suspicions
from packer.analyzer.sample_metrics import check_integers
from packer.analyzer.tasks import LENGTHS, UnitLengths
from packer.analyzer.writing import write_metrics
from packer.errors import ConfigError, SourceError
from packer.jobs.executors import Report, choose_executor
from packer.jobs.journal import Journal
from packer.jobs.progress import Listener
from packer.jobs.stages import Stage
from packer.metrics import MANIFEST_NAME
from packer.publish import published_directory
from packer.samples import SEQLEN

SeqlensFunction = Callable[[list[Any]], ArrayLike]
"""Takes a list of samples, returns as many integers."""


def analyze_dataset(
    dataset: Any,
    seqlens_fn: SeqlensFunction,
    *,
    out: str | os.PathLike[str],
    key_fns: Mapping[str, KeyFunction] | None = None,
    batch_size: int = 1000,
    curriculum_files: bool = False,
    workers: int = 1,
    overwrite: bool = False,
    progress: Listener | None = None,
) -> AnalyzeResult:
    """Measure every sample of a map-style data set and write a metrics directory.

    For data that ``analyze`` does not read, or lengths that only code can tell. The data set has no
    identity, so no plan can check it, and an interrupted run starts anew.

    Args:
        dataset: has ``len()`` and ``dataset[i]``; ``__getitems__`` is used where offered.
        seqlens_fn: turns a list of samples into as many integers.
        out: the metrics directory to make.
        key_fns: metric to a function that turns a list of samples into as many keys (texts, integers, bytes,
            or None); the metric's integers are equal where the keys are, for ``no_repeat_key``.
        batch_size: samples handed to the functions at once.
        curriculum_files: write the index files of DeepSpeed's curriculum sampler, too.
        workers: processes. With more than one, data set and function are pickled: no lambda then.
        overwrite: replace an existing metrics directory.
        progress: called after every batch.

    Raises:
        ConfigError: ``workers`` or ``batch_size`` below 1, no map-style data set, or what cannot be pickled.
        SourceError: no samples, or lengths that are none.
    """
    start = monotonic()
    executor = choose_executor(workers)
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: a batch holds at least one sample")
    _require_map_style(dataset)
    keys = dict(key_fns or {})
    check_metric_names(keys)
    if SEQLEN in keys:
        raise ConfigError(f"key_fns: there is a metric {SEQLEN!r} already; name the key otherwise")
    num_samples = len(dataset)
    with published_directory(out, marker=MANIFEST_NAME, overwrite=overwrite) as folder:
        stage: Stage[range] = Stage(
            number=LENGTHS,
            name="measuring",
            task=_MeasureSamples(dataset, seqlens_fn, keys),
            units=[
                range(first, min(first + batch_size, num_samples))
                for first in range(0, num_samples, batch_size)
            ],
            size_of=len,
            count=lambda payload: UnitLengths.unpack(payload).totals,
        )
        with Journal(folder / ".journal", {}) as journal:
            stage.run(journal, executor, progress)
            manifest = write_metrics(
                folder,
                lambda: (UnitLengths.unpack(journal.payload(LENGTHS, n)) for n in range(len(stage.units))),
                sources=[{"format": "dataset", "num_rows": num_samples}],
                definition={"kind": "dataset", "function": _place_of(seqlens_fn)},
                curriculum_files=curriculum_files,
                keys={name: _place_of(function) for name, function in keys.items()},
            )
        (folder / ".journal").unlink()
    return AnalyzeResult(
        path=Path(out), manifest=manifest, warnings=suspicions(manifest), seconds=monotonic() - start
    )


@dataclass(frozen=True, slots=True)
class _MeasureSamples:
    dataset: Any
    seqlens_fn: SeqlensFunction
    key_fns: Mapping[str, KeyFunction]

    def __call__(self, rows: range, report: Report) -> bytes:
        place = _place_of(self.seqlens_fn)
        samples = _samples(self.dataset, rows)
        returned = self.seqlens_fn(samples)
        try:
            values = np.asarray(returned)
        except ValueError as error:
            raise SourceError(
                f"{place} (samples from {rows.start}) returned what is no array ({error}); it has to return "
                "one integer per sample"
            ) from error
        seqlens = check_integers(values, len(rows), f"{place} (samples from {rows.start})")
        wrong = np.flatnonzero(seqlens < 0)
        if wrong.size:
            raise SourceError(
                f"{place} returned {seqlens[wrong[0]]} for sample {rows[int(wrong[0])]}; "
                "a length is 0 or more"
            )
        keys = {
            name: hash_objects(
                function(samples), len(rows), f"{_place_of(function)} (samples from {rows.start})"
            )
            for name, function in self.key_fns.items()
        }
        num_empties = int(np.count_nonzero(seqlens == 0))
        return UnitLengths.pack([UnitLengths({SEQLEN: seqlens}, 0, num_empties, keys=keys)])


def _samples(dataset: Any, rows: Sequence[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(list(rows)))
    return [dataset[row] for row in rows]


def _place_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}:{name}"


def _require_map_style(dataset: Any) -> None:
    # Those of torch have __getitem__ by inheritance, and some a length.
    streams = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    reads = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if streams or not (reads and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"a {type(dataset).__name__} cannot be asked for its length and for samples by their place; give "
            "a map-style data set, or write the samples, or their lengths (--length-column), to files and "
            "name these to packer.analyze"
        )
