"""Measure some samples again and hold a plan against them: is it the data set that was planned?"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from packer.errors import PackerError, SourceError
from packer.metrics import Metrics
from packer.plan import Plan, PlanSource, check_lengths, main_metric
from packer.plan.sources import by_source
from packer.samples import check_definition, measure, samples_of
from packer.samples.planned import check_planned, planned_definition
from packer.samples.ragged import RowError
from packer.samples.tolerance import apply_to_readable
from packer.sources import Given, Source, open_source

SourceLike = Source | Given | Sequence[Given]


def verify_source(
    plan: Plan,
    source: SourceLike | Mapping[str, SourceLike],
    *,
    metrics: Metrics | Mapping[str, Metrics] | None = None,
    tokenizer: str | Mapping[str, str] | None = None,
    num_samples: int = 1000,
    seed: int = 0,
) -> int:
    """Check that a data set is the one that was planned, and measure a random choice of its samples again.

    Args:
        plan: the plan.
        source: the data set, or what ``open_source`` takes; of a plan of several sources such by name, where
            one that is left out is not checked.
        metrics: the metrics that the plan was made from, for what the plan does not say itself: where the
            tokenizer is; of several sources by name.
        tokenizer: where the tokenizer is on this machine; one for all sources, or by name.
        num_samples: how many samples to measure, of each source.
        seed: of the choice.

    Returns:
        How many samples were measured.

    Raises:
        SourceChangedError: other files, or other contents.
        InvariantError: a sample has another length than the planned one.
        ConfigError: neither plan nor metrics say what the length of a sample is, or sources have other names.
    """
    if not isinstance(source, Mapping):
        planned = plan.sources[0]
        return _verify(
            plan, planned, _only_of(plan, source), _of(metrics, None), _of(tokenizer, None), num_samples, seed
        )
    planned_by_name = {str(planned.name): planned for planned in plan.sources if planned.name is not None}
    foreign: dict[str, SourceLike] = {name: source[name] for name in source if name not in planned_by_name}
    if foreign:
        _only_of(plan, foreign)  # which says what sources there are
    measured = 0
    for name, planned in planned_by_name.items():
        if name not in source:
            continue
        try:
            measured += _verify(
                plan, planned, source[name], _of(metrics, name), _of(tokenizer, name), num_samples, seed
            )
        except PackerError as error:
            raise type(error)(f"{name}: {error}") from error
    return measured


def _only_of(plan: Plan, given: Any) -> Any:
    return by_source(plan.sources, given, "data sets", "--source {name}=SOURCE")[0]


def _of(value: Any, name: str | None) -> Any:
    """Return what was given for a source, or for all of them."""
    if not isinstance(value, Mapping):
        return value
    return next(iter(value.values()), None) if name is None else value.get(name)


def _verify(
    plan: Plan,
    planned: PlanSource,
    given: SourceLike,
    metrics: Metrics | None,
    tokenizer: str | None,
    num_samples: int,
    seed: int,
) -> int:
    """Check one source; return how many of its samples were measured."""
    source = given if isinstance(given, Source) else open_source(given)
    definition = planned_definition(
        planned.definition or {}, metrics.definition if metrics else {}, tokenizer
    )
    source = samples_of(source, definition)
    check_planned(source, planned.num_samples, planned.files)
    check_definition(source, definition)
    metric = main_metric(plan, definition.metrics)
    choice = np.random.default_rng(seed).choice(
        planned.num_samples, min(num_samples, planned.num_samples), replace=False
    )
    rows = np.sort(choice)
    lengths = np.zeros(len(rows), np.int64)
    for at, batch in enumerate(source.rows(rows, definition.read_columns)):
        try:
            measured, _ = apply_to_readable(
                partial(measure, definition=definition), batch, definition.on_error
            )
            lengths[at] = measured.lengths[metric][0]
        except RowError as error:
            raise SourceError(f"{source.place_of_row(int(rows[at]))}: {error}") from error
    check_lengths(plan, planned.first_id + rows, lengths)
    return len(rows)
