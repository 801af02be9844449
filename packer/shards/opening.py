"""``open_dataset``: the samples of a plan, from the data set itself or from shards in the plan's order."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

from packer.errors import ConfigError
from packer.metrics import Metrics
from packer.samples import Dataset, LengthDefinition
from packer.samples import open_dataset as open_samples
from packer.samples.opening import Fields, SourceLike
from packer.shards.dataset import ShardDataset
from packer.shards.format import is_shards
from packer.shards.reader import ShardReader
from packer.sources.location import Location, from_user

PathLike = str | os.PathLike[str]


@overload
def open_dataset(
    source: Mapping[str, SourceLike],
    *,
    metrics: Mapping[str, Metrics | PathLike] | None = None,
    definition: LengthDefinition | Mapping[str, LengthDefinition] | None = None,
    fields: Fields | Mapping[str, Fields] = (),
    length_field: str | Mapping[str, str] | None = None,
    documents: bool = False,
    tokenizer: str | Mapping[str, str] | None = None,
    cache_bytes: int | None = None,
) -> dict[str, Dataset]: ...


@overload
def open_dataset(
    source: SourceLike,
    *,
    metrics: Metrics | PathLike | None = None,
    definition: LengthDefinition | None = None,
    fields: Fields = (),
    length_field: str | None = None,
    documents: bool = False,
    tokenizer: str | None = None,
    cache_bytes: int | None = None,
) -> Dataset | ShardDataset: ...


def open_dataset(
    source: Any,
    *,
    metrics: Any = None,
    definition: Any = None,
    fields: Any = (),
    length_field: Any = None,
    documents: bool = False,
    tokenizer: Any = None,
    cache_bytes: int | None = None,
) -> Dataset | ShardDataset | dict[str, Dataset]:
    """Open a data set for training: ``dataset[sample_id]`` gives ``input_ids`` and the fields beside them.

    What the ids are comes from ``metrics``, the directory that ``packer analyze`` wrote, or from
    ``definition``; a ``.bin/.idx`` source needs neither. Every row gives as many ids as were counted.

    For a plan of several sources give mappings by their names: the data sets come under the same names, as
    ``PlanLoader`` takes them. ``definition``, ``fields``, ``length_field`` and ``tokenizer`` may be one for
    all. Where one of the data sets has ``labels``, all deliver them, those that train on every token the ids
    themselves.

    Shards of ``packer materialize`` say themselves what they hold. They are asked for micro-batches of
    their plan, which is what ``PlanLoader`` does, not for samples.

    Args:
        source: as ``open_source`` takes it, or a folder of shards, here or in an object store.
        metrics: directory, or open metrics; the source is checked against the identities in its manifest, or
            is the token files that were written beside it.
        definition: what the length of a row is; instead of ``metrics``.
        fields: further token-aligned list columns to deliver; ``{name: column}`` names them otherwise.
            Where a length column was measured, ``{"input_ids": column}`` says where the tokens are; where
            several were, ``{metric: column}`` does.
        length_field: the name of what is counted: features, say, where a length column was measured;
            default: ``input_ids``, or of features their column's name.
        documents: of a ``.bin/.idx`` source: a sample is a document, not a sequence; metrics say so.
        tokenizer: where the tokenizer is on this machine; it must be the one that was used for the lengths.
        cache_bytes: what each process keeps of row groups and other blocks that it decoded; default: 256 MiB.

    Returns:
        A map-style data set that pickles as paths; of a mapping such data sets by name; of shards a
        `ShardDataset`.

    Raises:
        ConfigError: nothing says what the ids are, or the tokenizer is another one.
        SourceChangedError: the source is not the one that was analyzed.
        SourceError: the source cannot be read, or lacks a column.
        ShardsError: damaged shards.
    """
    folder = _shards_folder(source)
    if folder is None:
        opened: Dataset | dict[str, Dataset] = open_samples(
            source,
            metrics=metrics,
            definition=definition,
            fields=fields,
            length_field=length_field,
            documents=documents,
            tokenizer=tokenizer,
            cache_bytes=cache_bytes,
        )
        return opened
    given = {
        "metrics": metrics,
        "definition": definition,
        "length_field": length_field,
        "documents": documents or None,
        "tokenizer": tokenizer,
        "cache_bytes": cache_bytes,
    }
    if named := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{folder.path} holds shards, which say themselves what they hold; leave {named[0]}= out"
        )
    return ShardDataset(ShardReader(folder), fields)


def _shards_folder(source: Any) -> Location | None:
    """Return the folder of shards that is meant, the same wherever the process goes."""
    if isinstance(source, Sequence) and not isinstance(source, str) and len(source) == 1:
        source = source[0]
    if not isinstance(source, str | os.PathLike):
        return None
    location = from_user(source)
    if not location.is_remote:
        location = Location(os.path.abspath(location.path))
    return location if is_shards(location) else None
