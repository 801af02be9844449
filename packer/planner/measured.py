"""What is known of the samples of all sources: their lengths and further metrics, end to end."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packer.errors import ConfigError, MetricsError
from packer.metrics import Metrics, open_metrics
from packer.options.config import PlanConfig
from packer.options.mixture import check_source_name
from packer.plan.sources import PlanSource
from packer.wording import counted

SEQLEN = "seqlen"
LOSS_TOKENS = "loss_tokens"
_MAX_TOKENS = 2**62

IntArray = NDArray[Any]
OneSource = ArrayLike | Metrics | str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """N samples; ids count through the sources in their order."""

    sources: tuple[PlanSource, ...]
    metrics: dict[str, IntArray]
    """(N,) per metric, among them ``seqlen``."""
    loss_tokens: IntArray | None
    """(N,) tokens of every sample that the loss counts; None for all but each sample's first."""
    directories: tuple[Metrics, ...]
    """Those that lengths were read from."""

    @property
    def seqlens(self) -> IntArray:
        """(N,) tokens of every sample."""
        return self.metrics[SEQLEN]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What one source says of its samples."""

    name: str | None
    metrics: dict[str, IntArray]
    loss_tokens: IntArray | None
    directory: Metrics | None


def read_measured(
    seqlens: OneSource | Mapping[str, OneSource],
    config: PlanConfig,
    *,
    loss_tokens: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> Measured:
    """Read what is known of the samples; see ``make_plan`` for the arguments.

    Raises:
        ConfigError: an option names a metric or a source that is not there, or no metric is there for it.
        MetricsError: what is no integer a sample, arrays that do not belong together, or a directory that
            cannot be read.
    """
    if isinstance(seqlens, Mapping):
        if not seqlens:
            raise MetricsError("there is no source; give at least one, {name: lengths}")
        given = {check_source_name(name): value for name, value in seqlens.items()}
        _check_names(loss_tokens, "loss_tokens", given)
        for metric, values in (metrics or {}).items():
            _check_names(values, f"metric {metric!r}", given)
        parts = [
            _read(
                name,
                value,
                config,
                None if loss_tokens is None else loss_tokens.get(name),
                {metric: values[name] for metric, values in (metrics or {}).items() if name in values},
            )
            for name, value in given.items()
        ]
    else:
        parts = [_read(None, seqlens, config, loss_tokens, dict(metrics or {}))]
    _check_options(config, [part.name for part in parts])
    wanted = _wanted(config, parts)
    if config.no_repeat_key is not None and sum(part.directory is not None for part in parts) > 1:
        raise ConfigError(
            f"--no-repeat-key {config.no_repeat_key}: every metrics directory numbers its keys on its own, "
            "so a value has another number in each; analyze the files of all sources into one directory, or "
            "leave it out"
        )
    return Measured(
        sources=_numbered(parts),
        metrics={name: _end_to_end([part.metrics[name] for part in parts]) for name in wanted},
        loss_tokens=_loss_tokens(parts),
        directories=tuple(part.directory for part in parts if part.directory is not None),
    )


def _read(
    name: str | None, given: OneSource, config: PlanConfig, loss_tokens: Any, metrics: dict[str, Any]
) -> _Source:
    """Read one source: a metrics directory, or arrays."""
    if isinstance(given, str | os.PathLike):
        given = open_metrics(given)
    directory = given if isinstance(given, Metrics) else None
    if isinstance(given, Metrics):
        # Several budgets may go without a metric named seqlen: then the first of them leads.
        leading = SEQLEN if SEQLEN in given.names else next(iter(config.budgets))
        metrics = {metric: given.metric(metric) for metric in given.names} | metrics
        if loss_tokens is None:
            loss_tokens = metrics.get(LOSS_TOKENS)
        given = given.metric(leading)
    of = "" if name is None else f" of source {name!r}"
    lengths = _integers(SEQLEN, of, given, None)
    total_of(lengths)
    known = {
        metric: _integers(metric, of, values, len(lengths))
        for metric, values in metrics.items()
        if metric != SEQLEN
    }
    return _Source(
        name=name,
        metrics={SEQLEN: lengths} | known,
        loss_tokens=None if loss_tokens is None else _integers(LOSS_TOKENS, of, loss_tokens, len(lengths)),
        directory=directory,
    )


def _check_names(values: Any, what: str, sources: Mapping[str, Any]) -> None:
    """Refuse arrays that do not say of which source they are, and those of a source that is not there."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise MetricsError(f"{what} must be given by source, as the lengths are: {{name: array}}")
    for name in values:
        if name not in sources:
            raise MetricsError(f"{what} names source {name!r}, and there is only {_listed(sources)}")


def _check_options(config: PlanConfig, names: list[str | None]) -> None:
    """Refuse options about sources that are not there, and sources without a share."""
    known = [name for name in names if name is not None]
    most = config.max_passes if isinstance(config.max_passes, Mapping) else {}
    shares = {} if config.phases is None else {name for phase in config.phases for name in phase.shares}
    for option, mentioned in (("--mix", shares), ("--repeat", config.repeat or {}), ("--max-passes", most)):
        for name in mentioned:
            if name not in known:
                have = f"there is only {_listed(known)}" if known else "the one source has no name"
                raise ConfigError(f"{option} names source {name!r}, and {have}; give {name}=METRICS")
    for name in known:
        if config.phases is not None and name not in shares:
            raise ConfigError(
                f"--mix gives source {name!r} no share; add {name}=SHARE, or leave {name}=… out"
            )


def _wanted(config: PlanConfig, parts: list[_Source]) -> list[str]:
    """Return the metrics that the options need; every source must have them."""
    needed = [SEQLEN, *sorted(config.further_metrics)]
    for name in needed:
        for part in parts:
            if name not in part.metrics:
                option = "--max-tokens" if name in config.budgets else "--curriculum"
                if name == config.no_repeat_key:
                    option = "--no-repeat-key"
                of = "measured is only" if part.name is None else f"of source {part.name!r} is measured only"
                raise ConfigError(
                    f"{option} names metric {name!r}, and {of} {', '.join(part.metrics)}; analyze it as well"
                )
    return needed


def _numbered(parts: list[_Source]) -> tuple[PlanSource, ...]:
    sources, first_id, total = [], 0, 0
    for part in parts:
        lengths = part.metrics[SEQLEN]
        num_tokens = total_of(lengths)
        total += num_tokens
        directory = part.directory
        sources.append(
            PlanSource(
                name=part.name,
                first_id=first_id,
                num_samples=len(lengths),
                num_tokens=num_tokens,
                fingerprint=directory.fingerprint if directory else None,
                definition=directory.definition if directory else None,
                files=directory.sources if directory else None,
            )
        )
        first_id += len(lengths)
    if total >= _MAX_TOKENS:
        raise MetricsError(f"the sources hold {total:,} tokens, over 2^62; plan fewer of them")
    return tuple(sources)


def _loss_tokens(parts: list[_Source]) -> IntArray | None:
    """Return the loss tokens of all samples: where a source has no labels, all tokens but the first count."""
    if all(part.loss_tokens is None for part in parts):
        return None
    return _end_to_end(
        [
            np.maximum(part.metrics[SEQLEN] - 1, 0) if part.loss_tokens is None else part.loss_tokens
            for part in parts
        ]
    )


def _end_to_end(arrays: list[IntArray]) -> IntArray:
    """Return arrays one after the other; a single one, which may be a memory map, as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _listed(names: Any) -> str:
    return f"{counted(len(names), 'source')}: {', '.join(names)}" if len(names) > 1 else ", ".join(names)


def _integers(name: str, of: str, values: ArrayLike, num_samples: int | None) -> IntArray:
    """Return ``values`` as one integer a sample, memory maps as they are."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths
        raise MetricsError(
            f"{name}{of} must be one integer a sample, not a list of each; give the lengths of the lists"
        ) from None
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise MetricsError(
            f"{name}{of} must be one integer a sample, not {array.dtype} of shape {array.shape}"
        )
    if num_samples is not None and len(array) != num_samples:
        raise MetricsError(
            f"{name}{of} has {len(array)} values for {num_samples} samples; analyze both together"
        )
    if array.dtype.itemsize == 8 and array.dtype.kind == "u" and len(array) and int(array.max()) >= 2**63:
        raise MetricsError(
            f"{name}{of} of sample {int(np.argmax(array))} is {int(array.max())}, over 2^63 − 1; analyze the "
            "data again"
        )
    # DeepSpeed stores lengths in the smallest type that holds them: one that the limits need not fit.
    return array.astype(np.int32) if array.dtype.itemsize < 4 else array


def total_of(lengths: IntArray) -> int:
    """Return the tokens of all samples, which must be countable in 62 bits.

    Raises:
        MetricsError: they are not.
    """
    if not len(lengths):
        return 0
    if int(lengths.max()) * len(lengths) >= _MAX_TOKENS:
        # halves that cannot overflow
        total = (int((lengths >> 31).sum(dtype=np.int64)) << 31) + int(
            (lengths & (2**31 - 1)).sum(dtype=np.int64)
        )
        if total >= _MAX_TOKENS:
            raise MetricsError(
                f"the lengths sum up to {total}, over 2^62; sample {int(np.argmax(lengths))} has "
                f"{int(lengths.max())}: is this a column of lengths?"
            )
    return int(lengths.sum(dtype=np.int64))
