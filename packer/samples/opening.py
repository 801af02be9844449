"""``open_dataset``: the data set that the sample ids of a plan mean, checked against its metrics."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

from packer.errors import ConfigError, PackerError, SourceChangedError
from packer.metrics import Metrics, open_metrics
from packer.samples.dataset import INPUT_IDS, LABELS, Dataset
from packer.samples.definition import LengthDefinition, check_definition, default_definition
from packer.samples.tokens import check_list_of_numbers
from packer.sources import Source, open_source

PathLike = str | os.PathLike[str]
SourceLike = Source | PathLike | Sequence[PathLike]
Fields = Sequence[str] | Mapping[str, str]


@overload
def open_dataset(
    source: Mapping[str, SourceLike],
    *,
    metrics: Mapping[str, Metrics | PathLike] | None = None,
    definition: LengthDefinition | Mapping[str, LengthDefinition] | None = None,
    fields: Fields | Mapping[str, Fields] = (),
    tokenizer: str | Mapping[str, str] | None = None,
) -> dict[str, Dataset]: ...


@overload
def open_dataset(
    source: SourceLike,
    *,
    metrics: Metrics | PathLike | None = None,
    definition: LengthDefinition | None = None,
    fields: Fields = (),
    tokenizer: str | None = None,
) -> Dataset: ...


def open_dataset(
    source: Any,
    *,
    metrics: Any = None,
    definition: Any = None,
    fields: Any = (),
    tokenizer: Any = None,
) -> Dataset | dict[str, Dataset]:
    """Open a data set for training: ``dataset[sample_id]`` gives ``input_ids`` and the fields beside them.

    What the ids are comes from ``metrics``, the directory that ``packer analyze`` wrote, or from
    ``definition``; a ``.bin/.idx`` source needs neither. Every row gives as many ids as were counted.

    For a plan of several sources give mappings by their names: the data sets come under the same names, as
    ``PlanLoader`` takes them. ``definition``, ``fields`` and ``tokenizer`` may be one for all. Where one of
    the data sets has ``labels``, all deliver them, those that train on every token the ids themselves.

    Args:
        source: as `open_source` takes it; or a mapping of such.
        metrics: directory, or open metrics; the source is checked against the identities in its manifest, or
            is the token files that were written beside it.
        definition: what the length of a row is; instead of ``metrics``.
        fields: further token-aligned list columns to deliver; ``{name: column}`` names them otherwise.
            Where a length column was measured, ``{"input_ids": column}`` says where the tokens are.
        tokenizer: where the tokenizer is on this machine; it must be the one that was used for the lengths.

    Returns:
        A map-style data set that pickles as paths; of a mapping such data sets by name.

    Raises:
        ConfigError: nothing says what the ids are, or the tokenizer is another one.
        SourceChangedError: the source is not the one that was analyzed.
        SourceError: the source cannot be read, or lacks a column.
    """
    if isinstance(source, Mapping):
        return _open_several(source, metrics, definition, fields, tokenizer)
    return _open_one(source, metrics, definition, fields, tokenizer)


def _open_several(
    sources: Mapping[str, Any], metrics: Any, definition: Any, fields: Any, tokenizer: Any
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
    }
    opened = {}
    for name, source in sources.items():
        try:
            opened[name] = _open_one(source, *(given[option][name] for option in given))
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
    source: Source | PathLike | Sequence[PathLike],
    metrics: Metrics | PathLike | None,
    definition: LengthDefinition | None,
    fields: Fields,
    tokenizer: str | None,
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
            check_unchanged(source, metrics)
    definition = definition or default_definition(source)
    if definition is None:
        raise ConfigError("nothing says what the token ids are; give metrics=, or definition=")
    tokenizer = tokenizer or definition.tokenizer
    if tokenizer is not None:
        definition = definition.with_tokenizer(os.fspath(_absolute(tokenizer)))
    source = source.tolerating(definition.on_error)
    check_definition(source, definition)
    named = _named_fields(definition, fields)
    for column in named.values():
        check_list_of_numbers(source, column)
    fingerprint = None if metrics is None else metrics.fingerprint
    return Dataset(source, definition, named, metrics_fingerprint=fingerprint)


def _all_absolute(paths: PathLike | Sequence[PathLike]) -> PathLike | Sequence[PathLike]:
    if isinstance(paths, str | os.PathLike):
        absolute: PathLike = _absolute(paths)
        return absolute
    return [_absolute(path) for path in paths] if isinstance(paths, list | tuple) else paths


def _absolute(path: Any) -> Any:
    """Return a path that means the same wherever the process goes; names and URLs are left alone."""
    if not isinstance(path, str | os.PathLike):
        return path  # which opening will name
    text = os.fspath(path)
    is_local = "://" not in text and "::" not in text
    is_there = any(sign in text for sign in "*?[") or os.path.exists(text) or os.path.exists(f"{text}.idx")
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


def _named_fields(definition: LengthDefinition, fields: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the list columns to deliver, by the name they get, those that have ids of their own first."""
    named: dict[str, str] = {}
    if definition.kind in ("tokens", "indexed"):
        alone = len(definition.columns) == 1
        named = {INPUT_IDS if alone else metric: column for metric, column in definition.columns}
    if definition.labels_column is not None:
        named[LABELS] = definition.labels_column
    asked = (
        dict(fields) if isinstance(fields, Mapping) else {name.rsplit(".", 1)[-1]: name for name in fields}
    )
    if definition.kind == "length":
        if INPUT_IDS not in asked:
            raise ConfigError(
                "the lengths were taken of a length column, which says not where the tokens are; "
                'give fields={"input_ids": COLUMN}'
            )
        named = {INPUT_IDS: asked.pop(INPUT_IDS), **named}
    delivered = {INPUT_IDS, *named}
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
