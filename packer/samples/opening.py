"""``open_dataset``: the data set that the sample ids of a plan mean, checked against its metrics."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from packer.errors import ConfigError, PackerError, SourceChangedError
from packer.metrics import Metrics, open_metrics
from packer.samples.dataset import INPUT_IDS, LABELS, Dataset
from packer.samples.definition import LengthDefinition, check_definition, default_definition, samples_of
from packer.samples.tokens import check_list_of_numbers
from packer.sources import Given, Source, open_source

PathLike = str | os.PathLike[str]
SourceLike = Source | Given | Sequence[Given]
Fields = Sequence[str] | Mapping[str, str]


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
) -> Dataset: ...


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
) -> Dataset | dict[str, Dataset]:
    """Open a data set for training: ``dataset[sample_id]`` gives ``input_ids`` and the fields beside them.

    What the ids are comes from ``metrics``, the directory that ``packer analyze`` wrote, or from
    ``definition``; a ``.bin/.idx`` source needs neither. Every row gives as many ids as were counted.

    For a plan of several sources give mappings by their names: the data sets come under the same names, as
    ``PlanLoader`` takes them. ``definition``, ``fields``, ``length_field`` and ``tokenizer`` may be one for
    all. Where one of the data sets has ``labels``, all deliver them, those that train on every token the ids
    themselves.

    Args:
        source: as `open_source` takes it; or a mapping of such.
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
        A map-style data set that pickles as paths; of a mapping such data sets by name.

    Raises:
        ConfigError: nothing says what the ids are, the tokenizer is another one, or the cache is negative.
        SourceChangedError: the source is not the one that was analyzed.
        SourceError: the source cannot be read, or lacks a column.
    """
    if isinstance(source, Mapping):
        return _open_several(
            source, metrics, definition, fields, tokenizer, length_field, documents, cache_bytes
        )
    return _open_one(
        source,
        metrics,
        definition,
        fields,
        tokenizer,
        length_field,
        documents=documents,
        cache_bytes=cache_bytes,
    )


def _open_several(
    sources: Mapping[str, Any],
    metrics: Any,
    definition: Any,
    fields: Any,
    tokenizer: Any,
    length_field: Any,
    documents: bool,
    cache_bytes: int | None,
) -> dict[str, Dataset]:
    """Open one data set by name, with what is given for all, or by the same names."""
    names = list(sources)
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            "sources are measured one by one, and metrics= is one directory; give "
            f"metrics={{{_spelt(names)}}}"
        )
    by_source = isinstance(fields, Mapping) and any(not isinstance(value, str) for value in fields.values())
    given = {
        "metrics": _by_name("metrics", metrics, names),
        "definition": _by_name("definition", definition, names),
        "fields": _by_name("fields", fields, names) if by_source else dict.fromkeys(names, fields),
        "tokenizer": _by_name("tokenizer", tokenizer, names, may_miss=True),
        "length_field": _by_name("length_field", length_field, names, may_miss=True),
    }
    opened = {}
    for name, source in sources.items():
        try:
            opened[name] = _open_one(
                source,
                *(given[option][name] for option in given),
                documents=documents,
                cache_bytes=cache_bytes,
            )
        except PackerError as error:
            raise type(error)(f"{name}: {error}") from error
    if any(dataset.delivers_labels for dataset in opened.values()):
        return {name: dataset.with_labels() for name, dataset in opened.items()}
    return opened


def _by_name(option: str, value: Any, names: Sequence[str], *, may_miss: bool = False) -> dict[str, Any]:
    """Return an option's value for each source."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    foreign = [name for name in value if name not in names]
    missing = [] if may_miss else [name for name in names if name not in value]
    if foreign or missing:
        wrong = f"has no entry {missing[0]!r}" if missing else f"names {foreign[0]!r}, which is no source"
        raise ConfigError(f"{option} {wrong}; give {{{_spelt(names)}}}")
    return {name: value.get(name) for name in names}


def _spelt(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}": …' for name in names)


def _open_one(
    source: SourceLike,
    metrics: Metrics | PathLike | None,
    definition: LengthDefinition | None,
    fields: Fields,
    tokenizer: str | None,
    length_field: str | None,
    *,
    documents: bool,
    cache_bytes: int | None,
) -> Dataset:
    if not isinstance(source, Source):
        source = open_source(_all_absolute(source))
    if metrics is not None:
        if definition is not None:
            raise ConfigError("open_dataset takes metrics or a definition, not both: metrics hold one")
        metrics = metrics if isinstance(metrics, Metrics) else open_metrics(metrics)
        if _is_token_files(source, metrics):
            _require_all_trained(metrics)
            definition = LengthDefinition.by_index()
        else:
            definition = _definition_of(metrics)
            check_unchanged(samples_of(source, definition), metrics)
        if documents and not definition.documents:
            raise ConfigError(
                f"{metrics.path} was taken of sequences, not of documents; analyze with documents=True, "
                "or leave it out"
            )
    definition = definition or default_definition(source)
    if definition is not None and documents:
        definition = replace(definition, documents=True)
    if definition is None:
        raise ConfigError("nothing says what the token ids are; give metrics=, or definition=")
    tokenizer = tokenizer or definition.tokenizer
    if tokenizer is not None:
        definition = definition.with_tokenizer(os.fspath(_absolute(tokenizer)))
    source = samples_of(source, definition)
    if cache_bytes is not None:
        if cache_bytes < 0:
            raise ConfigError(f"cache_bytes={cache_bytes} is negative; 0 keeps the newest block alone")
        source = source.keeping(cache_bytes)
    check_definition(source, definition)
    length_field = length_field or _default_length_field(definition)
    named = _named_fields(definition, fields, length_field)
    for column in named.values():
        check_list_of_numbers(source, column)
    fingerprint = None if metrics is None else metrics.fingerprint
    return Dataset(source, definition, named, length_field, metrics_fingerprint=fingerprint)


def _all_absolute(paths: Given | Sequence[Given]) -> Given | Sequence[Given]:
    if isinstance(paths, str | os.PathLike):
        absolute: Given = _absolute(paths)
        return absolute
    return [_absolute(path) for path in paths] if isinstance(paths, list | tuple) else paths


def _absolute(path: Any) -> Any:
    """Return a path that means the same wherever the process goes; names and URLs are left alone."""
    if not isinstance(path, str | os.PathLike):
        return path  # which opening will name
    text = os.fspath(path)
    is_local = "://" not in text and "::" not in text
    stands_for_files = any(sign in text for sign in "*?[{")
    named = (text, f"{text}.idx", text.rpartition("@")[0])  # a folder or file, a pair, a version of a table
    is_there = stands_for_files or any(map(os.path.exists, named))
    return os.path.abspath(text) if is_local and is_there else path


def check_unchanged(source: Source, metrics: Metrics) -> None:
    """Check that a source is the one that metrics were taken of.

    Raises:
        SourceChangedError: another number of files or rows, or another content; names the file.
    """
    if metrics.sources:
        found = source.identity()
        if len(found) != len(metrics.sources):
            raise SourceChangedError(
                f"the source has {len(found)} files, {metrics.path} was taken of {len(metrics.sources)}; "
                "name the same files, or analyze again"
            )
        for file, now, then in zip(source.files, found, metrics.sources, strict=True):
            if any(now[key] != then.get(key) for key in ("num_bytes", "sha256")):
                raise SourceChangedError(
                    f"{file} is not the file that {metrics.path} was taken of (size or content differ); "
                    "name the files in the same order, or analyze again"
                )
    if source.num_rows != metrics.num_samples:
        raise SourceChangedError(
            f"the source has {source.num_rows} rows, {metrics.path} was taken of {metrics.num_samples}; "
            "name the same files, or analyze again"
        )


def _is_token_files(source: Source, metrics: Metrics) -> bool:
    """Whether the source is the ``.bin/.idx`` pair that was written while the metrics were taken."""
    written = metrics.manifest.tokens if metrics.manifest else None
    if written is None or [part.format for part in source.parts] != ["indexed"]:
        return False
    found = source.identity()[0]
    return bool(found["num_bytes"] == written["bin"].size and found["sha256"] == written["idx"].sha256)


def _require_all_trained(metrics: Metrics) -> None:
    """Refuse token files, which hold no labels, where the loss was to be on a part of the tokens."""
    part = _definition_of(metrics).trained_part
    if part != "all":
        raise ConfigError(
            f"the token files do not say which tokens are the {part}'s, and {metrics.path} counts the loss "
            "on these alone; give the source that was analyzed, or analyze with --train-on all"
        )


def _definition_of(metrics: Metrics) -> LengthDefinition:
    recorded: Mapping[str, Any] = metrics.definition
    if not recorded or recorded.get("kind") == "dataset":
        raise ConfigError(
            f"{metrics.path} does not say which columns its lengths were taken of; give definition= instead"
        )
    return LengthDefinition.from_json(recorded)


def _default_length_field(definition: LengthDefinition) -> str:
    if definition.kind == "features" and len(definition.columns) == 1:
        return _name_of(definition.columns[0][1])
    return INPUT_IDS


def _name_of(column: str) -> str:
    """Return what a column is called beside others: the last part of its path; ``mel`` of ``x.mel.npy``."""
    return column.removesuffix(".npy").rsplit(".", 1)[-1]


def _named_fields(
    definition: LengthDefinition, fields: Sequence[str] | Mapping[str, str], length_field: str
) -> dict[str, str]:
    """Return the list columns to deliver, by the name they get, those that have ids of their own first."""
    named: dict[str, str] = {}
    alone = len(definition.columns) == 1
    if definition.kind in ("tokens", "indexed", "features"):
        named = {length_field if alone else metric: column for metric, column in definition.columns}
    if length_field != INPUT_IDS and (definition.is_tokenized or not alone):
        raise ConfigError(
            f"length_field={length_field!r} has no meaning where "
            f"{'a tokenizer makes the ids' if definition.is_tokenized else 'there are several'}; leave it out"
        )
    if definition.labels_column is not None:
        named[LABELS] = definition.labels_column
    asked = dict(fields) if isinstance(fields, Mapping) else {_name_of(column): column for column in fields}
    if definition.kind == "length":
        counted = [length_field] if alone else [metric for metric, _ in definition.columns]
        if missing := [name for name in counted if name not in asked]:
            raise ConfigError(
                "the lengths were taken of a length column, which says not where the tokens are; "
                f'give fields={{"{missing[0]}": COLUMN}}'
                + (", or length_field= with the name of features" if alone and missing == [INPUT_IDS] else "")
            )
        named = {name: asked.pop(name) for name in counted} | named
    delivered = {length_field, *named}
    if definition.is_tokenized and definition.trained_part != "all":
        delivered.add(LABELS)
    taken = [name for name in asked if name in delivered]
    if asked and definition.is_pair:
        raise ConfigError("pairs have no fields beside their members'; leave fields out")
    if taken:
        raise ConfigError(
            f"a field cannot be named {taken[0]!r}, which the data set delivers already; rename it"
        )
    return named | asked
