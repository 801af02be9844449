"""From sequence lengths and a configuration to a plan, on disk or in memory."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packer.curriculum import parse_curriculum
from packer.errors import ConfigError, MetricsError
from packer.metrics import Blocks
from packer.options.config import PlanConfig
from packer.plan import schema
from packer.plan.facts import PlanFacts
from packer.plan.reader import Plan
from packer.plan.trained import Trained, joint_accounts
from packer.plan.writer import plan_in_memory, write_plan
from packer.planner.choose.pieces import Pieces, choose_pieces, with_starts
from packer.planner.choose.trained import leave_out
from packer.planner.epochs import EpochPlanner
from packer.planner.measured import SEQLEN, Measured, OneSource, read_measured
from packer.planner.progress import Listener, Pace
from packer.planner.step_tokens import resolve_step_tokens
from packer.publish import check_target


def make_plan(
    seqlens: OneSource | Mapping[str, OneSource],
    config: PlanConfig,
    *,
    loss_tokens: ArrayLike | Mapping[str, ArrayLike] | None = None,
    metrics: Mapping[str, ArrayLike] | Mapping[str, Mapping[str, ArrayLike]] | None = None,
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
            and the plan names it, so that the loader can tell another data set from the one measured. Or, of
            several sources, one of these by the name of each; sample ids then count through them in order.
        config: the options.
        loss_tokens: (N,) tokens of every sample that the loss counts. Default: all but each sample's first.
            Of several sources, such arrays by their names; where one has none, the default.
        metrics: further metrics by name, (N,) each, for budgets or a curriculum on them, or keys. Of several
            sources, such arrays by their names.
        blocks: how the samples lie in files, for ``shuffle_blocks``; a metrics directory brings its own.
        trained: plans whose run this one goes on from, each up to a place: ``"PLAN@EPOCH:STEP"``, or a plan
            as a whole. The first epoch leaves out what they trained of its sources; ``samples_before`` and
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
    measured = read_measured(seqlens, config, loss_tokens=loss_tokens, metrics=metrics)
    lengths, loss = measured.seqlens, measured.loss_tokens
    known = {name: values for name, values in measured.metrics.items() if name != SEQLEN}
    if config.shuffle_blocks is not None:
        blocks = _blocks_of(measured, blocks, config)
    pace = Pace(progress, num_samples=len(lengths), num_epochs=config.epochs)
    if measured.directories:
        pace.advance(0.0)
        for directory in measured.directories:
            directory.check_files()
    before = [Trained.at(reference) for reference in trained]
    pieces, dropped, limit = choose_pieces(lengths, config, known, loss)
    if config.no_repeat_key is not None:
        pieces = replace(pieces, keys=known[config.no_repeat_key])
    first = leave_out(pieces, before, measured.sources, config) if before else None
    if first is not None and first.pieces.starts is not None:
        pieces, dropped = with_starts(pieces, dropped)
    config = resolve_step_tokens(config, pieces if first is None else first.pieces, measured.sources)
    planner = EpochPlanner(
        pieces=pieces,
        first=first,
        sources=measured.sources,
        config=config,
        loss_tokens=loss,
        admissions=_admissions(pieces, config, known),
        blocks=None if config.shuffle_blocks is None else blocks,
        pace=pace,
    )
    planned = planner.plan_epochs()
    facts = PlanFacts(
        config=config.to_json(),
        sources=planned.sources,
        phases=planned.phases,
        max_seqlen=limit,
        trained=joint_accounts(before),
        lr_base=planned.lr_base,
        loss_tokens=_loss_definition(loss is not None, pieces.starts is not None),
    )
    if out is None:
        return plan_in_memory(facts, planned.epochs, dropped=dropped, progress=pace.advance)
    return write_plan(out, facts, planned.epochs, dropped=dropped, overwrite=overwrite, progress=pace.advance)


def _refuse_other_config(config: object) -> None:
    if not isinstance(config, PlanConfig):
        spelt = "PlanConfig(**config)" if isinstance(config, Mapping) else "PlanConfig(max_tokens=…)"
        raise ConfigError(f"config must be a PlanConfig, not {type(config).__name__}; give packer.{spelt}")


def _blocks_of(measured: Measured, blocks: Blocks | None, config: PlanConfig) -> Blocks:
    """Return how the samples lie in files."""
    asked = f"--shuffle-blocks {config.shuffle_blocks}"
    if len(measured.sources) > 1:
        raise ConfigError(
            f"{asked} reads one data set block by block, and there are {len(measured.sources)} sources, "
            "which are mixed in every stretch of the plan; leave it out, or plan one source"
        )
    if blocks is None and measured.directories:
        blocks = measured.directories[0].blocks
    if blocks is None:
        raise ConfigError(
            f"{asked} needs to know how the samples lie in files, and nothing says it (an older packer, "
            "another tool, or lengths in memory); run `packer analyze` over the files, or leave it out"
        )
    if blocks.num_samples != len(measured.seqlens):
        raise MetricsError(
            f"the blocks hold {blocks.num_samples} samples, and there are {len(measured.seqlens)} lengths; "
            "analyze both together"
        )
    return blocks


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


def _loss_definition(has_labels: bool, is_cut: bool) -> str | None:
    if not has_labels:
        return "seqlen - 1"
    return None if is_cut else "labels"
