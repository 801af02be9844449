"""Measure some samples again and hold a plan against them: is it the data set that was planned?"""

import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from packer.errors import SourceError
from packer.metrics import Metrics
from packer.plan import Plan, check_lengths, main_metric
from packer.samples import check_definition, measure
from packer.samples.planned import check_planned, planned_definition
from packer.samples.ragged import RowError
from packer.samples.tolerance import apply_to_readable
from packer.sources import Source, open_source


def verify_source(
    plan: Plan,
    source: Source | Sequence[str | os.PathLike[str]],
    *,
    metrics: Metrics | None = None,
    tokenizer: str | None = None,
    num_samples: int = 1000,
    seed: int = 0,
) -> int:
    """Check that a data set is the one that was planned, and measure a random choice of its samples again.

    Args:
        plan: the plan.
        source: the data set, or what ``open_source`` takes.
        metrics: the metrics that the plan was made from, for what the plan does not say itself: where the
            tokenizer is.
        tokenizer: where the tokenizer is on this machine.
        num_samples: how many samples to measure.
        seed: of the choice.

    Returns:
        How many samples were measured.

    Raises:
        SourceChangedError: other files, or other contents.
        InvariantError: a sample has another length than the planned one.
        ConfigError: neither plan nor metrics say what the length of a sample is.
    """
    source = source if isinstance(source, Source) else open_source(source)
    check_planned(source, plan.num_samples, plan.sources[0].files)
    definition = planned_definition(plan.definition, metrics.definition if metrics else {}, tokenizer)
    source = source.tolerating(definition.on_error)
    check_definition(source, definition)
    metric = main_metric(plan, definition.metrics)
    choice = np.random.default_rng(seed).choice(
        plan.num_samples, min(num_samples, plan.num_samples), replace=False
    )
    ids = np.sort(choice)
    lengths = np.zeros(len(ids), np.int64)
    for at, batch in enumerate(source.rows(ids, definition.read_columns)):
        try:
            measured, _ = apply_to_readable(
                partial(measure, definition=definition), batch, definition.on_error
            )
            lengths[at] = measured.lengths[metric][0]
        except RowError as error:
            raise SourceError(f"{source.place_of_row(int(ids[at]))}: {error}") from error
    check_lengths(plan, ids, lengths)
    return len(ids)
