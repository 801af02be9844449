"""``analyze_dataset``: the same metrics from any map-style data set, by a function of its samples."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packer.analyzer.keys import KeyFunction, hash_objects
from packer.analyzer.options import check_metric_names
from packer.analyzer.result import AnalyzeResult, suspicions
from packer.analyzer.sample_metrics import Needs, SampleMetric, check_integers
from packer.analyzer.tasks import LENGTHS, UnitLengths
from packer.analyzer.writing import write_metrics
from packer.errors import ConfigError, SourceError
from packer.jobs.executors import Report, choose_executor
from packer.jobs.journal import Journal
from packer.jobs.progress import Listener
from packer.jobs.stages import Stage
from packer.metrics import MANIFEST_NAME
from packer.publish import published_directory
from packer.samples import LOSS_TOKENS, SEQLEN

SeqlensFunction = Callable[[list[Any]], ArrayLike | Mapping[str, ArrayLike]]
"""Takes a list of samples, returns as many integers; of pairs, as many for each metric."""


def analyze_dataset(
    dataset: Any,
    seqlens_fn: SeqlensFunction,
    *,
    out: str | os.PathLike[str],
    key_fns: Mapping[str, KeyFunction] | None = None,
    batch_size: int = 1000,
    metrics: Mapping[str, Callable[[list[Any]], ArrayLike]] | None = None,
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
        seqlens_fn: turns a list of samples into as many integers; of pairs of sequences, into a mapping
            ``{metric: integers}``, such as ``{"source": …, "target": …}``.
        out: the metrics directory to make.
        key_fns: metric to a function that turns a list of samples into as many keys (texts, integers, bytes,
            or None); the metric's integers are equal where the keys are, for ``no_repeat_key``.
        batch_size: samples handed to the functions at once.
        metrics: further ones, by name: each a function like ``seqlens_fn``. ``loss_tokens`` is how many of a
            sample's tokens the loss counts.
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
    further = {} if metrics is None else dict(metrics)
    check_metric_names(further)
    if twice := sorted(further.keys() & keys.keys()):
        raise ConfigError(f"metrics and key_fns both name {twice[0]}; rename one")
    with published_directory(out, marker=MANIFEST_NAME, overwrite=overwrite) as folder:
        stage: Stage[range] = Stage(
            number=LENGTHS,
            name="measuring",
            task=_MeasureSamples(dataset, seqlens_fn, further, keys),
            units=[
                range(first, min(first + batch_size, num_samples))
                for first in range(0, num_samples, batch_size)
            ],
            size_of=len,
            count=lambda payload: UnitLengths.unpack(payload).totals,
        )
        with Journal(folder / ".journal", {}) as journal:
            stage.run(journal, executor, progress)
            lengths = _names_of_lengths(
                UnitLengths.unpack(journal.payload(LENGTHS, n)) for n in range(len(stage.units))
            )[: -len(further) or None]
            manifest = write_metrics(
                folder,
                lambda: (UnitLengths.unpack(journal.payload(LENGTHS, n)) for n in range(len(stage.units))),
                sources=[{"format": "dataset", "num_rows": num_samples}],
                definition={"kind": "dataset", "function": _place_of(seqlens_fn)}
                | ({} if lengths in ([], [SEQLEN]) else {"columns": {name: name for name in lengths}}),
                further=[SampleMetric(name, function, Needs()) for name, function in further.items()],
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
    metrics: Mapping[str, Callable[[list[Any]], ArrayLike]]
    key_fns: Mapping[str, KeyFunction]

    def __call__(self, rows: range, report: Report) -> bytes:
        samples = _samples(self.dataset, rows)
        returned = self.seqlens_fn(samples)
        named = dict(returned) if isinstance(returned, Mapping) else {SEQLEN: returned}
        check_metric_names(named)
        if not named:
            raise ConfigError(f"{_place_of(self.seqlens_fn)} returned no metric; return {{metric: integers}}")
        if taken := sorted(named.keys() & (self.metrics.keys() | self.key_fns.keys())):
            raise ConfigError(
                f"{_place_of(self.seqlens_fn)} returned {taken[0]}, and metrics or key_fns has that "
                "name, too; rename one"
            )
        lengths = {
            name: _checked(values, rows, self.seqlens_fn, name, is_length=True)
            for name, values in named.items()
        }
        further = {
            name: _checked(function(samples), rows, function, name, is_length=name == LOSS_TOKENS)
            for name, function in self.metrics.items()
        }
        keys = {
            name: hash_objects(
                function(samples), len(rows), f"{_place_of(function)} (samples from {rows.start})"
            )
            for name, function in self.key_fns.items()
        }
        num_empties = int(np.count_nonzero(next(iter(lengths.values())) == 0))
        return UnitLengths.pack([UnitLengths(lengths | further, 0, num_empties, keys=keys)])


def _checked(
    returned: Any, rows: range, function: Callable[..., Any], name: str, *, is_length: bool
) -> NDArray[np.int64]:
    """Return what a function returned for samples as one integer each.

    Raises:
        SourceError: it is something else, or a negative length.
    """
    place = _place_of(function)
    try:
        values = np.asarray(returned)
    except ValueError as error:
        raise SourceError(
            f"{place} (samples from {rows.start}) returned what is no array ({error}); it has to return "
            "one integer per sample"
        ) from error
    checked = check_integers(values, len(rows), f"{place} (samples from {rows.start})")
    if is_length and (wrong := np.flatnonzero(checked < 0)).size:
        what = "" if name == SEQLEN else f" as {name}"
        raise SourceError(
            f"{place} returned {checked[wrong[0]]}{what} for sample {rows[int(wrong[0])]}; a length is 0 or "
            "more"
        )
    return checked


def _names_of_lengths(units: Iterable[UnitLengths]) -> list[str]:
    """Return the metrics that every unit has.

    Raises:
        SourceError: one has others.
    """
    first: list[str] | None = None
    for unit in units:
        names = list(unit.values)
        if first is None:
            first = names
        elif names != first:
            raise SourceError(
                f"the lengths of some samples are {', '.join(first)}, of others {', '.join(names)}; return "
                "the same for all"
            )
    return first or []


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
