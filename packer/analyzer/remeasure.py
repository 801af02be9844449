"""Measure some samples again and hold a plan against them: is it the data set that was planned?"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from packer.errors import ConfigError, SourceChangedError, SourceError
from packer.metrics import Metrics
from packer.plan import Plan, check_lengths, main_metric
from packer.samples import LengthDefinition, check_definition, measure, samples_of
from packer.samples.ragged import RowError
from packer.samples.tolerance import apply_to_readable
from packer.sources import Given, Source, open_source


def verify_source(
    plan: Plan,
    source: Source | Given | Sequence[Given],
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
    definition = _definition(plan, metrics, tokenizer)
    source = samples_of(source, definition)
    _check_identity(plan, source)
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


def _check_identity(plan: Plan, source: Source) -> None:
    if source.num_rows != plan.num_samples:
        raise SourceChangedError(
            f"the source has {source.num_rows} rows, the plan is of {plan.num_samples}; name the files that "
            "were analyzed, or analyze and plan again"
        )
    planned = plan.sources[0].files
    if not planned:  # metrics without manifest: there is only the number of rows to go by
        return
    found = source.identity()
    if len(found) != len(planned):
        raise SourceChangedError(
            f"the source has {len(found)} files, the plan is of {len(planned)}; name those that were analyzed"
        )
    for file, now, then in zip(source.files, found, planned, strict=True):
        if any(now[key] != then.get(key) for key in ("num_bytes", "sha256")):
            raise SourceChangedError(
                f"{file} is not the file that was planned (size or content differ); name the files in the "
                "same order, or analyze and plan again"
            )


def _definition(plan: Plan, metrics: Metrics | None, tokenizer: str | None) -> LengthDefinition:
    content = dict(plan.definition) | (metrics.definition if metrics else {})
    if not content or content.get("kind") == "dataset":
        raise ConfigError(
            "the plan does not say what the length of a sample is (its metrics have no manifest, or come "
            "from a function); leave --source out"
        )
    if "tokenizer_sha256" in content:
        content["tokenizer"] = tokenizer or content.get("tokenizer")
        if content["tokenizer"] is None:
            raise ConfigError(
                "samples of text need the tokenizer to be measured; add --metrics, or --tokenizer"
            )
    return LengthDefinition.from_json(content)
