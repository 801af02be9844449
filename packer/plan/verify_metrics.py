"""The metrics that a plan was made from, as one: values count through its sources as sample ids do."""

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from packer.errors import SourceChangedError
from packer.metrics import Blocks, Metrics, open_metrics
from packer.plan.reader import Plan
from packer.plan.sources import PlanSource, by_source

MetricsLike = Metrics | str | os.PathLike[str]

SEQLEN = "seqlen"
LOSS_TOKENS = "loss_tokens"


class PlanMetrics:
    """One value a sample of a plan, by metric."""

    def __init__(self, plan: Plan, given: MetricsLike | Mapping[str, MetricsLike]) -> None:
        """Take the metrics of each source.

        Args:
            plan: the plan.
            given: of a plan with one source its metrics; of several, or one with a name, a mapping by name.

        Raises:
            ConfigError: they are named otherwise than the sources.
            SourceChangedError: they are not those that the plan was made from; names the source.
        """
        parts: list[MetricsLike] = by_source(plan.sources, given, "metrics", "--metrics {name}=METRICS")
        self._parts = [part if isinstance(part, Metrics) else open_metrics(part) for part in parts]
        for source, metrics in zip(plan.sources, self._parts, strict=True):
            _check_same(source, metrics)

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics there are of every sample; without labels, all tokens but the first train."""
        shared = [name for name in self._parts[0].names if all(name in part.names for part in self._parts)]
        counts_labels = any(LOSS_TOKENS in part.names for part in self._parts)
        return (*dict.fromkeys([*shared, *([LOSS_TOKENS] if counts_labels else [])]),)

    @property
    def blocks(self) -> Blocks | None:
        """How the samples lie in files; None where nothing says it, or there are several sources."""
        return self._parts[0].blocks if len(self._parts) == 1 else None

    def metric(self, name: str) -> NDArray[np.integer]:
        """Return one metric: (num_samples,); mapped where there is one source, else in memory."""
        values = [_metric(part, name, self.names) for part in self._parts]
        return values[0] if len(values) == 1 else np.concatenate(values)


def _metric(part: Metrics, name: str, shared: tuple[str, ...]) -> NDArray[np.integer]:
    if name == LOSS_TOKENS and name not in part.names and name in shared:
        counted: NDArray[np.integer] = np.maximum(part.metric(SEQLEN), 1) - 1
        return counted
    return part.metric(name)


def _check_same(source: PlanSource, metrics: Metrics) -> None:
    owner = "the plan" if source.name is None else f"source {source.name!r} of the plan"
    if source.fingerprint is not None and metrics.fingerprint != source.fingerprint:
        raise SourceChangedError(
            f"{owner} was made from metrics {source.fingerprint[:12]}…, {metrics.path} is "
            f"{metrics.fingerprint[:12]}…; give the metrics that it was made from, or plan again"
        )
    if metrics.num_samples != source.num_samples:
        raise SourceChangedError(
            f"{owner} is of {source.num_samples} samples, {metrics.path} has {metrics.num_samples}; "
            "give the metrics that it was made from, or plan again"
        )
