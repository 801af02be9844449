"""The data sets of a plan of several sources as one: sample ids count through them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from packer.errors import ConfigError, PackerError, SourceChangedError
from packer.plan import Plan
from packer.plan.sources import PlanSource, by_source, source_of
from packer.runtime.batches.pieces import read_samples, read_slice
from packer.runtime.batches.rows import reads_microbatches


def dataset_of(plan: Plan, given: Any) -> Any:
    """Return what a plan's samples are read from, once it is the data that the plan was made for.

    Args:
        plan: The plan.
        given: A map-style data set of all samples, or for a plan of named sources one by each name; or shards
            of the plan.

    Raises:
        ConfigError: Samples cannot be asked for by their ids, or data sets and sources have other names.
        SourceChangedError: A data set has another number of samples than was planned, or was opened with
            other metrics; names the source.
        ShardsError: It holds the micro-batches of another plan.
    """
    if reads_microbatches(given):
        given.require_plan(plan.fingerprint)
        return given
    _require_one_kind_of_labels(plan)
    if isinstance(given, Mapping) and isinstance(next(iter(given), ""), str):
        datasets = by_source(plan.sources, given, "data sets", '"{name}": dataset')
    elif len(plan.sources) == 1:
        datasets = [given]
    else:
        _require_map_style(given, "a")
        if hasattr(given, "__len__") and len(given) != plan.num_samples:
            names = ", ".join(f'"{source.name}": …' for source in plan.sources)
            raise SourceChangedError(
                f"the data set has {len(given):,} samples and the plan was made for {plan.num_samples:,}; "
                f"give one that counts through its {len(plan.sources)} sources, or one for each: {{{names}}}"
            )
        return given
    for source, dataset in zip(plan.sources, datasets, strict=True):
        _require_map_style(dataset, "a" if source.name is None else f"the data set of {source.name}, a")
        _require_planned(dataset, source)
    return datasets[0] if len(datasets) == 1 else SourceDatasets(datasets, plan.sources)


class SourceDatasets:
    """Data sets, one a source, asked for samples by the plan's ids."""

    read_slice: Callable[[int, int, int], Any]
    """Reads a part of a sample, where each of the data sets offers it."""

    def __init__(self, datasets: Sequence[Any], sources: Sequence[PlanSource]) -> None:
        """Take as many data sets as sources, in their order."""
        self._datasets = list(datasets)
        self._sources = list(sources)
        if all(hasattr(dataset, "read_slice") for dataset in datasets):
            self.read_slice = self._read_slice

    def __len__(self) -> int:
        return self._sources[-1].stop_id

    def __getitem__(self, sample_id: int) -> Any:
        """Return one sample."""
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Any]:
        """Return several samples in the order asked for; each source is asked once, for all of its own."""
        ids = np.asarray(sample_ids, np.int64)
        samples: list[Any] = [None] * len(ids)
        of = source_of(ids, self._sources)
        for number in np.unique(of).tolist():
            places = np.flatnonzero(of == number)
            rows = (ids[places] - self._sources[number].first_id).tolist()
            read = self._asked(number, read_samples, rows)
            for place, sample in zip(places.tolist(), read, strict=True):
                samples[place] = sample
        return samples

    def _read_slice(self, sample_id: int, start: int, stop: int) -> Any:
        number = int(source_of(np.array([sample_id]), self._sources)[0])
        row = sample_id - self._sources[number].first_id
        return self._asked(number, read_slice, row, start, stop)

    def _asked(self, number: int, read: Callable[..., Any], *what: Any) -> Any:
        """Ask one data set, and say which where it fails."""
        try:
            return read(self._datasets[number], *what, noun="row")
        except PackerError as error:
            raise type(error)(f"{self._sources[number].name}: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {"datasets": self._datasets, "sources": self._sources}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _require_map_style(dataset: Any, owner: str) -> None:
    """Refuse what samples cannot be asked for by their ids, as torch's iterable sets only seem to be."""
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"{owner} {type(dataset).__name__} cannot be asked for a sample by its id; give a data set with "
            "dataset[sample_id], such as packer.open_dataset's"
        )


def _require_planned(dataset: Any, source: PlanSource) -> None:
    """Refuse another data set than a source was when it was measured, as far as either tells."""
    owner = "the data set" if source.name is None else f"the data set of {source.name}"
    if hasattr(dataset, "__len__") and len(dataset) != source.num_samples:
        raise SourceChangedError(
            f"{owner} has {len(dataset):,} samples and the plan was made for {source.num_samples:,}; "
            "give the data set that was analyzed, or analyze and plan again"
        )
    opened = getattr(dataset, "metrics_fingerprint", None)
    if opened is not None and source.fingerprint is not None and opened != source.fingerprint:
        raise SourceChangedError(
            f"{owner} was opened with metrics {opened[:12]}…, the plan was made from "
            f"{source.fingerprint[:12]}…; give the data set that was analyzed, and its metrics, or plan again"
        )


def _require_one_kind_of_labels(plan: Plan) -> None:
    """Refuse sources of which some have labels that are shifted already, and others not."""
    shifted = {
        source.label: not (source.definition or {}).get("shift", True)
        for source in plan.sources
        if (source.definition or {}).get("labels_column")
    }
    are_shifted = [name for name, is_shifted in shifted.items() if is_shifted]
    if are_shifted and len(are_shifted) < len(plan.sources):
        others = [source.label for source in plan.sources if source.label not in are_shifted]
        raise ConfigError(
            f"the labels of {_listed(are_shifted)} were analyzed with --no-shift, those of {_listed(others)} "
            "were not: a batch has one kind; analyze them alike"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def sources_of_samples(sources: Sequence[PlanSource], sample_ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return (n,) the place of each sample's source among a plan's sources; of fillers, too."""
    return np.zeros(len(sample_ids), np.int64) if len(sources) == 1 else source_of(sample_ids, sources)
