"""DeepSpeed's ``dynamic_batching`` section: what it says, and the metrics and the plan that come of it."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer._version import __version__
from packer.errors import ConfigError, EmptyPlanError, PlanError, SourceChangedError, TargetWriteError
from packer.integrations.together import Together, together
from packer.metrics import Metrics, open_metrics
from packer.plan import Plan, load_plan
from packer.planner import PlanConfig
from packer.samples import SEQLEN
from packer.wording import counted

_ORDERS = {"dataloader": "sequential", "seqlen": "seqlen", "random": "random"}
_SCALINGS = ("linear", "sqrt", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingSettings:
    """The configuration section, and what the engine adds to it."""

    max_tokens: int
    """Of one pack."""
    metrics_path: Path | None
    lr_scaling: str
    order: str
    min_batch_size: int
    """Samples of one pack."""
    max_batch_size: int | None
    verbose: bool
    seed: int
    num_workers: int
    pin_memory: bool
    packs: int
    """``train_micro_batch_size_per_gpu``: packs that are collated together."""
    grad_accum: int
    dp_rank: int
    dp_size: int
    train_batch_size: int
    """In packs, as DeepSpeed counts; the batch size at which the factor is 1."""
    is_pipeline: bool

    @classmethod
    def of_engine(cls, engine: Any) -> "BatchingSettings":
        """Read an engine's configuration.

        Raises:
            ConfigError: The section is not enabled, or says what has no meaning.
        """
        efficiency = engine._config.data_efficiency_config
        sampling = efficiency["data_sampling"]
        batching = sampling["dynamic_batching"]
        if not batching.get("enabled"):
            raise ConfigError(
                "data_efficiency.data_sampling.dynamic_batching is not enabled in the DeepSpeed "
                "configuration; "
                'set "enabled": true there'
            )
        scaling = str(batching.get("lr_scaling_method") or "none").lower()
        if scaling not in _SCALINGS:
            raise ConfigError(
                f"lr_scaling_method {batching['lr_scaling_method']!r} is unknown; choose one of "
                + ", ".join(_SCALINGS)
            )
        path = batching.get("metrics_path")
        minimum, maximum = batching.get("min_batch_size") or 1, batching.get("max_batch_size")
        _require_count_of("max_tokens", batching.get("max_tokens"))
        _require_count_of("min_batch_size", minimum)
        if maximum is not None:
            _require_count_of("max_batch_size", maximum)
            if maximum < minimum:
                raise ConfigError(
                    f"dynamic_batching: min_batch_size {minimum} is over max_batch_size {maximum}; lower the "
                    "one or raise the other"
                )
        if int(efficiency["seed"]) < 0:
            raise ConfigError(f"data_efficiency: seed {efficiency['seed']} is negative; count from 0")
        return cls(
            max_tokens=int(batching["max_tokens"]),
            metrics_path=None if path is None else Path(path),
            lr_scaling=scaling,
            order=_order(batching),
            min_batch_size=int(minimum),
            max_batch_size=None if maximum is None else int(maximum),
            verbose=bool(batching.get("verbose")),
            seed=int(efficiency["seed"]),
            num_workers=int(sampling["num_workers"]),
            pin_memory=bool(sampling["pin_memory"]),
            packs=int(engine.train_micro_batch_size_per_gpu()),
            grad_accum=int(engine.gradient_accumulation_steps()),
            dp_rank=int(engine.data_parallel_group.rank()),
            dp_size=int(engine.data_parallel_group.size()),
            train_batch_size=int(engine.train_batch_size()),
            is_pipeline=hasattr(engine, "reset_activation_shape"),
        )

    def plan_config(self) -> PlanConfig:
        """Return the plan's options; DeepSpeed bounds the sum of the lengths, and leaves long samples out."""
        scales = self.lr_scaling != "none"
        return PlanConfig(
            max_tokens=self.packs * self.max_tokens,
            count="real",
            max_seqlen=self.max_tokens,
            too_long="drop",
            order=self.order,  # type: ignore[arg-type]
            seed=self.seed,
            dp_size=self.dp_size,
            grad_accum=self.grad_accum,
            min_samples=self.packs * self.min_batch_size,
            max_samples=None if self.max_batch_size is None else self.packs * self.max_batch_size,
            same_num_samples=self.is_pipeline,
            same_seqlen=self.is_pipeline,
            lr_scaling=self.lr_scaling,  # type: ignore[arg-type]
            lr_base=self.train_batch_size if scales else None,
        )

    def why_empty(self, seqlens: NDArray[np.integer]) -> str:
        """Say why no step can be made of samples, in the words of the configuration."""
        packs = f"train_micro_batch_size_per_gpu={self.packs} packs" if self.packs > 1 else "one pack"
        most = "" if self.max_batch_size is None else f" to max_batch_size={self.max_batch_size}"
        num_too_long = int(np.count_nonzero(seqlens > self.max_tokens))
        return (
            f"dynamic_batching makes no step of {counted(len(seqlens), 'sample')}, {num_too_long:,} of them "
            f"longer than max_tokens={self.max_tokens}: a step takes {self.dp_size * self.grad_accum} "
            f"micro-batches ({counted(self.dp_size, 'data-parallel rank')} × "
            f"gradient_accumulation_steps={self.grad_accum}) of {packs}, each of at most max_tokens tokens "
            f"in min_batch_size={self.min_batch_size}{most} samples; raise max_tokens, or lower "
            "min_batch_size, gradient_accumulation_steps or the number of ranks, or give more samples"
        )


@dataclass(frozen=True, slots=True)
class PlannedData:
    """A plan, and what its numbers mean."""

    plan: Plan
    lengths: "Metrics | NDArray[np.int64]"
    """Of every planned number: of the data set's metrics, or as they were given."""
    chosen: "NDArray[np.int64] | None"
    """Planned number → sample of the data set; None where they are the same."""


def plan_for(
    settings: BatchingSettings,
    dataset: Any,
    *,
    seqlens: Any = None,
    sample_ids: Any = None,
    measure: Callable[[list[Any]], Any] | None = None,
) -> PlannedData:
    """Open metrics and plan, or let one process make what is missing while the others wait.

    It is global rank 0; where a node does not see what that wrote, its first process makes it there. A plan
    is kept beside the metrics and found again as long as nothing that it depends on has changed. Where
    lengths or ``sample_ids`` are handed over, and where the metrics cannot be written to, it is made in
    memory and sent to all. As in DeepSpeed, ``sample_ids`` are a list to be read from its beginning: their
    order is the order ``dataloader``, and a sample that stands in it twice is planned twice.

    Raises:
        ConfigError: Neither lengths, nor metrics, nor a function that measures; or ids that are none.
        EmptyPlanError: No step can be made.
        SourceChangedError: The metrics are of another number of samples.
        PlanError: The processes do not see the same plan.
    """
    with together() as processes:
        lengths: Metrics | NDArray[np.int64]
        if seqlens is not None:
            lengths = np.asarray(seqlens).astype(np.int64).reshape(-1)
            _require_count(len(lengths), dataset, "dataset_seqlens")
        else:
            lengths = _metrics_of(settings, dataset, measure, processes)
        chosen = None if sample_ids is None else _chosen(sample_ids, len(dataset))
        if chosen is not None:
            lengths = np.asarray(_seqlens(lengths)[chosen]).astype(np.int64)
        kept = _kept_plan(processes, lengths, settings) if isinstance(lengths, Metrics) else None
        plan = kept or _plan_in_memory(processes, _seqlens(lengths), settings)
        if len(set(processes.gather(plan.fingerprint))) > 1:
            raise PlanError(
                "the processes see different plans, so their data sets or metrics differ; give every node "
                "the same metrics_path"
            )
    return PlannedData(plan, lengths, chosen)


def _require_count_of(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"dynamic_batching: {key} is {value!r}; set it to a whole number above 0 in the DeepSpeed "
            "configuration"
        )


def _seqlens(lengths: "Metrics | NDArray[np.integer]") -> NDArray[Any]:
    return lengths.metric(SEQLEN) if isinstance(lengths, Metrics) else lengths


def _chosen(sample_ids: Any, num_samples: int) -> NDArray[np.int64]:
    """Return ``dataset_filter_ids`` as an array, in their order."""
    ids = np.asarray(sample_ids)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"dataset_filter_ids must list whole numbers, not {ids.dtype} of shape {ids.shape}; leave them "
            "out to keep all samples"
        )
    wrong = ids[(ids < 0) | (ids >= num_samples)]
    if wrong.size:
        raise ConfigError(
            f"dataset_filter_ids names sample {wrong[0]}, and the data set has {num_samples:,}, counted "
            "from 0; give ids of this data set"
        )
    return ids.astype(np.int64)


def _order(batching: Mapping[str, Any]) -> str:
    named = batching.get("sequence_picking_order", "dataloader")
    spelled = batching.get("sentence_picking_order", named)
    if named not in ("dataloader", spelled):
        raise ConfigError(
            f"sequence_picking_order={named!r} and sentence_picking_order={spelled!r} contradict each "
            "other; keep one"
        )
    if spelled not in _ORDERS:
        raise ConfigError(
            f"sequence_picking_order {spelled!r} is unknown; choose one of {', '.join(_ORDERS)}"
        )
    return _ORDERS[spelled]


def _metrics_of(
    settings: BatchingSettings,
    dataset: Any,
    measure: Callable[[list[Any]], Any] | None,
    processes: Together,
) -> Metrics:
    path = settings.metrics_path
    if path is None:
        raise ConfigError("no lengths: give dataset_seqlens, or metrics_path in the configuration")

    def make() -> None:
        from packer.analyzer import analyze_dataset

        if _holds_metrics(path):
            return
        if measure is None:
            raise ConfigError(
                f"{path} holds no metric {SEQLEN}, and there is nothing to measure with; give "
                "dataset_seqlens or batch_seqlens_fn, or run `packer analyze`"
            )
        analyze_dataset(dataset, measure, out=path, overwrite=True)

    _make_where_missing(processes, make, lambda: _holds_metrics(path))
    metrics = open_metrics(path)
    _require_count(metrics.num_samples, dataset, str(path))
    return metrics


def _holds_metrics(path: Path) -> bool:
    return (path / SEQLEN / f"{SEQLEN}_sample_to_metric.idx").is_file()


def _make_where_missing(processes: Together, make: Callable[[], Any], is_there: Callable[[], bool]) -> None:
    """Make something once for all, and again on those nodes that do not see it."""
    processes.run(processes.rank == 0, make)
    is_first_on_node = int(os.environ.get("LOCAL_RANK", processes.rank)) == 0
    processes.run(is_first_on_node and not is_there(), make)


def _kept_plan(processes: Together, metrics: Metrics, settings: BatchingSettings) -> Plan | None:
    """Open the plan beside the metrics, made if need be; None where nothing can be written there."""
    config = settings.plan_config()
    out = metrics.path / "plans" / _plan_name(metrics, config)

    def make() -> None:
        if not (out / "plan.json").is_file():
            _make_plan(metrics, settings, out)

    try:
        _make_where_missing(processes, make, lambda: (out / "plan.json").is_file())
    except TargetWriteError:  # on every process alike
        return None
    return load_plan(out)


def _plan_name(metrics: Metrics, config: PlanConfig) -> str:
    """A name that changes with all that the plan depends on."""
    facts = [__version__, metrics.fingerprint, config.to_json()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _plan_in_memory(processes: Together, seqlens: NDArray[np.integer], settings: BatchingSettings) -> Plan:
    made: list[Plan] = []

    def make() -> None:
        made.append(_make_plan(seqlens, settings))

    processes.run(processes.rank == 0, make)
    plan: Plan = processes.share(made[0] if made else None)
    return plan


def _make_plan(
    lengths: "Metrics | NDArray[np.integer]", settings: BatchingSettings, out: Path | None = None
) -> Plan:
    """Plan, and say what goes wrong in the words of the configuration that the user has written."""
    from packer.planner import make_plan  # with its kernels: on the one process that plans

    try:
        return make_plan(lengths, settings.plan_config(), out=out)
    except (ConfigError, EmptyPlanError) as error:
        raise EmptyPlanError(settings.why_empty(_seqlens(lengths))) from error


def _require_count(count: int, dataset: Any, what: str) -> None:
    if count != len(dataset):
        raise SourceChangedError(
            f"{what} holds lengths of {count:,} samples, and the data set has {len(dataset):,}; give the "
            "lengths of this data set, or remove the metrics to have them made anew"
        )
