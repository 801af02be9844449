"""From sequence lengths and a configuration to a plan, on disk or in memory."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packer.curriculum import parse_curriculum
from packer.errors import ConfigError, MetricsError
from packer.metrics import Blocks, Metrics, open_metrics
from packer.options.config import PlanConfig
from packer.plan import schema
from packer.plan.facts import PlanFacts
from packer.plan.reader import Plan
from packer.plan.sources import PlanSource
from packer.plan.trained import Trained, joint_accounts
from packer.plan.writer import plan_in_memory, write_plan
from packer.planner.choose.pieces import Pieces, choose_pieces, with_starts
from packer.planner.choose.trained import leave_out
from packer.planner.epochs import EpochPlanner
from packer.planner.progress import Listener, Pace
from packer.planner.step_tokens import resolve_step_tokens
from packer.publish import check_target

SEQLEN = "seqlen"
LOSS_TOKENS = "loss_tokens"
_MAX_TOKENS = 2**62


def make_plan(
    seqlens: ArrayLike | Metrics | str | os.PathLike[str],
    config: PlanConfig,
    *,
    loss_tokens: ArrayLike | None = None,
    metrics: Mapping[str, ArrayLike] | None = None,
    blocks: Blocks | None = None,
    trained: Iterable[str | os.PathLike[str] | Plan | Trained] = (),
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Listener | None = None,
) -> Plan:
    """Decide which samples every rank sees in every micro-batch of every step.

    Args:
        seqlens: (N,) tokens of every sample, integers; a memory map is read in place. Or a metrics
            directory, by path or as ``open_metrics`` gave it: it brings the loss tokens and further metrics,
            and the plan names it, so that the loader can tell another data set from the one measured.
        config: the options.
        loss_tokens: (N,) tokens of every sample that the loss counts. Default: all but each sample's first.
        metrics: further metrics by name, (N,) each, for budgets or a curriculum on them, or keys.
        blocks: how the samples lie in files, for ``shuffle_blocks``; a metrics directory brings its own.
        trained: plans whose run this one goes on from, each up to a place: ``"PLAN@EPOCH:STEP"``, or a plan
            as a whole. The first epoch leaves out what they trained; ``samples_before`` and
            ``tokens_before`` go on from there.
        out: the directory to publish. Default: the plan stays in memory, ``Plan.save`` writes it.
        overwrite: replace a plan that is there.
        progress: told, phase by phase and while rows are written, how far planning is.

    Raises:
        ConfigError: options that have no meaning together, or with these lengths.
        SampleTooLongError: a sample that fits no micro-batch, with ``too_long="error"``.
        EmptyPlanError: no step would be left.
        MetricsError: lengths that are not integers from 0, arrays that do not belong together, or a metrics
            directory whose files are not those that were written.
        TargetExistsError, TargetBusyError, TargetWriteError: see ``check_target``, which is asked before
            the work begins, and ``published_directory``.
    """
    _refuse_other_config(config)
    if out is not None:
        check_target(out, marker=schema.HEADER_FILE, overwrite=overwrite)
    measured = None
    if isinstance(seqlens, str | os.PathLike):
        seqlens = open_metrics(seqlens)
    if isinstance(seqlens, Metrics):
        measured = seqlens
        # Several budgets may go without a metric named seqlen: then the first of them leads.
        seqlens = measured.metric(SEQLEN if SEQLEN in measured.names else next(iter(config.budgets)))
        metrics = {name: measured.metric(name) for name in measured.names} | dict(metrics or {})
        if loss_tokens is None:
            loss_tokens = metrics.get(LOSS_TOKENS)
        if config.shuffle_blocks is not None and blocks is None:
            blocks = measured.blocks
    lengths = _integers(SEQLEN, seqlens, None)
    known = {
        name: _integers(name, values, len(lengths))
        for name, values in (metrics or {}).items()
        if name != SEQLEN
    }
    loss = None if loss_tokens is None else _integers(LOSS_TOKENS, loss_tokens, len(lengths))
    _total(lengths)
    for name in sorted(config.further_metrics - set(known)):
        option = "--max-tokens" if name in config.budgets else "--curriculum"
        if name == config.no_repeat_key:
            option = "--no-repeat-key"
        have = ", ".join([SEQLEN, *known])
        raise ConfigError(f"{option} names metric {name!r}, and measured is only {have}; analyze it as well")
    pace = Pace(progress, num_samples=len(lengths), num_epochs=config.epochs)
    if measured:
        pace.advance(0.0)
        measured.check_files()
    if config.shuffle_blocks is not None:
        _check_blocks(blocks, len(lengths), config)
    sources = [
        PlanSource(
            num_samples=len(lengths),
            num_tokens=_total(lengths),
            fingerprint=measured.fingerprint if measured else None,
            definition=measured.definition if measured else None,
            files=measured.sources if measured else None,
        )
    ]
    before = [Trained.at(reference) for reference in trained]
    pieces, dropped, limit = choose_pieces(lengths, config, known, loss)
    if config.no_repeat_key is not None:
        pieces = replace(pieces, keys=known[config.no_repeat_key])
    first = leave_out(pieces, before, sources, config) if before else None
    if first is not None and first.pieces.starts is not None:
        pieces, dropped = with_starts(pieces, dropped)
    config = resolve_step_tokens(config, pieces if first is None else first.pieces)
    planner = EpochPlanner(
        pieces=pieces,
        first=first,
        config=config,
        loss_tokens=loss,
        admissions=_admissions(pieces, config, known),
        blocks=None if config.shuffle_blocks is None else blocks,
        pace=pace,
    )
    lr_base, epochs = planner.plan_epochs()
    facts = PlanFacts(
        config=config.to_json(),
        sources=sources,
        max_seqlen=limit,
        trained=joint_accounts(before),
        lr_base=lr_base,
        loss_tokens=_loss_definition(loss is not None, pieces.starts is not None),
    )
    if out is None:
        return plan_in_memory(facts, epochs, dropped=dropped, progress=pace.advance)
    return write_plan(out, facts, epochs, dropped=dropped, overwrite=overwrite, progress=pace.advance)


def _refuse_other_config(config: object) -> None:
    if not isinstance(config, PlanConfig):
        spelt = "PlanConfig(**config)" if isinstance(config, Mapping) else "PlanConfig(max_tokens=…)"
        raise ConfigError(f"config must be a PlanConfig, not {type(config).__name__}; give packer.{spelt}")


def _check_blocks(blocks: Blocks | None, num_samples: int, config: PlanConfig) -> None:
    if blocks is None:
        raise ConfigError(
            f"--shuffle-blocks {config.shuffle_blocks} needs to know how the samples lie in files, and "
            "nothing says it (an older packer, another tool, or lengths in memory); run `packer analyze` "
            "over the files, or leave it out"
        )
    if blocks.num_samples != num_samples:
        raise MetricsError(
            f"the blocks hold {blocks.num_samples} samples, and there are {num_samples} lengths; analyze "
            "both together"
        )


def _admissions(
    pieces: Pieces, config: PlanConfig, metrics: Mapping[str, NDArray[Any]]
) -> NDArray[np.int64] | None:
    """Return the step from which on each piece may be used: the latest that any of the schedules says."""
    if config.curriculum is None:
        return None
    admissions = np.zeros(len(pieces), np.int64)
    for schedule in parse_curriculum(config.curriculum):
        values = pieces.seqlens
        if schedule.metric != SEQLEN:
            known = metrics[schedule.metric]
            values = known if pieces.ids is None else known[pieces.ids]
        admissions = np.maximum(admissions, schedule.admissions(values))
    return admissions


def _integers(name: str, values: ArrayLike, num_samples: int | None) -> NDArray[Any]:
    """Return ``values`` as one integer a sample, memory maps as they are."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths
        raise MetricsError(
            f"{name} must be one integer a sample, not a list of each; give the lengths of the lists"
        ) from None
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise MetricsError(f"{name} must be one integer a sample, not {array.dtype} of shape {array.shape}")
    if num_samples is not None and len(array) != num_samples:
        raise MetricsError(f"{name} has {len(array)} values for {num_samples} samples; analyze both together")
    if array.dtype.itemsize == 8 and array.dtype.kind == "u" and len(array) and int(array.max()) >= 2**63:
        raise MetricsError(
            f"{name} of sample {int(np.argmax(array))} is {int(array.max())}, over 2^63 − 1; analyze the "
            "data again"
        )
    # DeepSpeed stores lengths in the smallest type that holds them: one that the limits need not fit.
    return array.astype(np.int32) if array.dtype.itemsize < 4 else array


def _total(lengths: NDArray[Any]) -> int:
    """Return the tokens of all samples, which must be countable in 62 bits."""
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


def _loss_definition(has_labels: bool, is_cut: bool) -> str | None:
    if not has_labels:
        return "seqlen - 1"
    return None if is_cut else "labels"
