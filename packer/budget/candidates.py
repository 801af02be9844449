"""One configuration at any budget: the plans that are tried, and the steps that the run would have."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from packer.errors import ConfigError, PackerError
from packer.metrics import Metrics, open_metrics
from packer.options.config import PlanConfig
from packer.plan import Plan
from packer.planner import make_plan

_MOST_SAMPLES = 1 << 22
"""Of more, so many are planned with: the longest, and a random choice of the others."""
_LONGEST = 1024
_KEPT_PLANS = 4
_ROUNDNESS = 256


class Candidates:
    """Plans of one configuration, whose budget is what varies."""

    def __init__(
        self,
        seqlens: ArrayLike | Metrics | str | os.PathLike[str],
        config: PlanConfig,
        *,
        loss_tokens: ArrayLike | None = None,
        metrics: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Take what ``make_plan`` takes.

        Raises:
            PackerError: What keeps ``config`` itself from being planned.
        """
        self.source = str(seqlens) if isinstance(seqlens, str | os.PathLike) else None
        if isinstance(seqlens, str | os.PathLike):
            seqlens = open_metrics(seqlens)
        self._seqlens = seqlens
        self._arrays: dict[str, Any] = {"loss_tokens": loss_tokens, "metrics": metrics}
        self._config = _fewer_samples(seqlens, config)
        self.config = config
        self._plans: dict[tuple[str, int], Plan] = {}
        own = self.plan(self.budget)
        counts = own.header["epochs"][0]
        num_steps = max(counts["num_steps"], 1)
        self.step_tokens = config.step_tokens or round(counts["num_tokens"] / num_steps)
        """Real tokens that a step is to have at any budget."""

    @property
    def budget(self) -> int:
        """That of the configuration; of several the first."""
        return next(iter(self.config.budgets.values()))

    @property
    def most(self) -> int:
        """The largest budget of which a step is not larger than asked for."""
        return max(self.step_tokens // self.config.dp_size, self.least)

    @property
    def least(self) -> int:
        """The smallest budget that loses no sample which the configuration keeps."""
        if isinstance(self.config.max_tokens, Mapping):
            return self.budget
        plan, config = self.microbatches(self.budget), self.config
        rows = [table for epoch in range(plan.num_epochs) for table in plan.epoch(epoch).microbatches()]
        longest = max(int(table.max_seqlen.max()) for table in rows)
        multiple = config.padded_multiple
        if config.layout == "packed":
            multiple = math.lcm(multiple, config.pad_segments_to)
        least = -(-longest // multiple) * multiple * config.min_samples
        try:
            self.microbatches(least)
        except PackerError:
            return self.budget
        return min(least, self.budget)

    def rounded(self, budget: float) -> int:
        """Return a budget that is a multiple of what rows are, and as round as 1/256 of it allows."""
        multiple = self.config.padded_multiple
        roundness = 1 << max(int(budget / _ROUNDNESS).bit_length() - 1, 0)
        multiple *= -(-roundness // multiple)
        return max(int(budget) // multiple * multiple, multiple)

    def config_at(self, budget: int) -> PlanConfig:
        """Return the configuration of a run with a budget; its steps keep their tokens, or nearly so."""
        return self._at(budget, self.config)

    def plan(self, budget: int) -> Plan:
        """Plan the first epoch of a run with a budget.

        Raises:
            PackerError: There is no such plan.
        """
        return self._made("run", budget, replace(self._at(budget, self._config), epochs=1))

    def microbatches(self, budget: int) -> Plan:
        """Plan the micro-batches of a budget, with no more of steps than their shapes depend on.

        Raises:
            PackerError: There is no such plan.
        """
        config = self._at(budget, self._config)
        if not config.has_shape_rule:
            config = replace(config, grad_accum=1, step_tokens=None, accum_multiple=1)
        config = replace(config, epochs=1, remainder="keep", balance="none")
        config = replace(config, lr_scaling="none", lr_base=None, lr_max_scale=None)
        return self._made("micro-batches", budget, config)

    def _at(self, budget: int, config: PlanConfig) -> PlanConfig:
        if budget == self.budget:
            return config
        scale = budget / self.budget
        max_tokens: int | dict[str, int] = budget
        if isinstance(config.max_tokens, Mapping):
            max_tokens = {metric: int(limit * scale) for metric, limit in config.max_tokens.items()}
        fixed = config.fixed_seqlen
        if fixed is not None and config.layout == "packed":  # T is the budget's
            fixed = max(int(fixed * scale) // config.padded_multiple, 1) * config.padded_multiple
        return replace(
            config,
            max_tokens=max_tokens,
            fixed_seqlen=fixed,
            grad_accum=None,
            step_tokens=self.step_tokens,
        )

    def _made(self, kind: str, budget: int, config: PlanConfig) -> Plan:
        """Make a plan; the last few are kept."""
        if (kind, budget) not in self._plans:
            self._plans = dict(list(self._plans.items())[-_KEPT_PLANS + 1 :])
            self._plans[kind, budget] = make_plan(self._seqlens, config, **self._arrays)
        return self._plans[kind, budget]


def _fewer_samples(seqlens: Any, config: PlanConfig) -> PlanConfig:
    """Return a configuration of a part of the samples, where there are very many."""
    lengths = seqlens.metric("seqlen") if isinstance(seqlens, Metrics) else np.asarray(seqlens)
    ids = np.arange(len(lengths)) if config.sample_ids is None else np.asarray(config.sample_ids)
    if len(ids) <= _MOST_SAMPLES or config.order != "random":
        return config
    lengths = lengths[ids]
    longest = np.argpartition(lengths, -_LONGEST)[-_LONGEST:]
    others = np.random.default_rng(config.seed).choice(len(ids), _MOST_SAMPLES, replace=False, shuffle=False)
    return replace(config, sample_ids=ids[np.union1d(longest, others)])


def require_config(config: object) -> PlanConfig:
    """Refuse what is no configuration.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(config, PlanConfig):
        raise ConfigError(
            f"config must be a PlanConfig, not {type(config).__name__}; give "
            "packer.PlanConfig(max_tokens=…), whose max_tokens need only hold the longest sample"
        )
    return config
