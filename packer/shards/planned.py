"""The data sets of a plan, by their names, opened as feeds of the shuffle."""

import os
from collections.abc import Mapping, Sequence

from packer.errors import ConfigError, SourceChangedError
from packer.metrics import Metrics, open_metrics
from packer.plan import Plan, main_metric
from packer.plan.sources import PlanSource
from packer.samples import Dataset, LengthDefinition
from packer.samples import open_dataset as open_samples
from packer.samples.planned import check_planned, planned_definition
from packer.shards.feed import Feed, FeedUnit, make_feeds
from packer.sources import Source

PathLike = str | os.PathLike[str]
SourceLike = Dataset | Source | PathLike | Sequence[PathLike]
MetricsLike = Metrics | PathLike


def open_planned(
    plan: Plan,
    source: SourceLike | Mapping[str, SourceLike],
    *,
    metrics: MetricsLike | Mapping[str, MetricsLike] | None = None,
    definition: LengthDefinition | Mapping[str, LengthDefinition] | None = None,
    tokenizer: str | None = None,
    fields: Sequence[str] | Mapping[str, str] = (),
    keep_columns: Sequence[str] | None = None,
) -> tuple[Feed, ...]:
    """Open the data sets of a plan, as ``open_dataset`` does, with what the plan says of them.

    Raises:
        ConfigError: nothing says what the samples are, or data sets and sources have other names.
        SourceChangedError: one is not that which was planned.
    """
    names = [planned.name for planned in plan.sources]
    if not isinstance(source, Mapping):
        if len(names) > 1:
            raise ConfigError(
                f"the plan is of the sources {', '.join(map(str, names))}; give the data set of each by its "
                "name: NAME=SOURCE"
            )
        source = {str(names[0]): source}
        names = [str(names[0])]
    if set(source) != set(names):
        raise ConfigError(
            f"data sets named {', '.join(source)} were given, and the plan is of "
            f"{', '.join(map(str, names))}; give one for each"
        )
    opened = []
    for planned in plan.sources:
        name = str(planned.name)
        label = "" if planned.name is None else planned.name
        dataset = _open_one(
            planned,
            source[name],
            metrics=metrics.get(name) if isinstance(metrics, Mapping) else metrics,
            definition=definition.get(name) if isinstance(definition, Mapping) else definition,
            tokenizer=tokenizer,
            fields=fields,
        )
        opened.append((label, planned.first_id, planned_metric(plan, dataset.definition), dataset))
    return make_feeds(opened, keep_columns)


def units_of(feeds: Sequence[Feed]) -> list[FeedUnit]:
    """Cut all data sets into units of work."""
    units: list[FeedUnit] = []
    for number, feed in enumerate(feeds):
        units += feed.units(number, len(units))
    return units


def _open_one(
    planned: PlanSource,
    source: SourceLike,
    *,
    metrics: MetricsLike | None,
    definition: LengthDefinition | None,
    tokenizer: str | None,
    fields: Sequence[str] | Mapping[str, str],
) -> Dataset:
    if isinstance(source, Dataset):
        dataset = source
    elif metrics is not None:
        metrics = metrics if isinstance(metrics, Metrics) else open_metrics(metrics)
        if planned.fingerprint is not None and metrics.fingerprint != planned.fingerprint:
            raise SourceChangedError(
                f"the plan was made from metrics {planned.fingerprint[:12]}…, {metrics.path} is "
                f"{metrics.fingerprint[:12]}…; give the metrics that it was made from, or plan again"
            )
        dataset = open_samples(source, metrics=metrics, tokenizer=tokenizer, fields=fields)
    else:
        if definition is None:
            definition = planned_definition(planned.definition or {}, {}, tokenizer)
        dataset = open_samples(source, definition=definition, tokenizer=tokenizer, fields=fields)
        check_planned(dataset.source, planned.num_samples, planned.files)
    if len(dataset) != planned.num_samples:
        raise SourceChangedError(
            f"{planned.label} has {len(dataset):,} samples and the plan was made for "
            f"{planned.num_samples:,}; give the data set that was analyzed, or analyze and plan again"
        )
    return dataset


def planned_metric(plan: Plan, definition: LengthDefinition) -> str:
    """Return the metric that the plan calls the length of a sample.

    Raises:
        ConfigError: the definition measures no such thing.
    """
    metric = main_metric(plan, definition.metrics)
    if metric not in definition.metrics:
        raise ConfigError(
            f"the plan counts {metric}, and the definition measures {', '.join(definition.metrics)}; give "
            "the definition that the data set was analyzed with"
        )
    return metric
