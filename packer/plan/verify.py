"""Check a plan from its files alone: hashes first, then every invariant, in bounded memory."""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError, PlanError
from packer.options import PlanConfig
from packer.options.bounds import Company, longest_sample
from packer.plan import schema
from packer.plan.digest import content_hash
from packer.plan.reader import Plan, load_plan
from packer.plan.sources import with_rows
from packer.plan.verify_blocks import check_blocks
from packer.plan.verify_copies import check_copies
from packer.plan.verify_curriculum import check_curriculum
from packer.plan.verify_drops import DropRules
from packer.plan.verify_figures import check_figures
from packer.plan.verify_keys import check_keys
from packer.plan.verify_metrics import MetricsLike, PlanMetrics
from packer.plan.verify_rows import RowRules
from packer.plan.verify_samples import check_samples
from packer.plan.verify_sources import SourceRules
from packer.plan.verify_steps import StepRules
from packer.plan.verify_wrapped import WrappedRules

Progress = Callable[[int, int], None]
"""Called with the micro-batches checked so far and in all; a curriculum is checked in a second pass."""

_CHUNK = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was checked, and found in order."""

    num_files: int
    num_epochs: int
    num_steps: int
    num_microbatches: int
    num_samples: int
    """Samples of all sources; each was accounted for in every epoch."""
    has_passes: bool
    """Whether an epoch passes through a source otherwise than once: each pass was accounted for."""
    with_shares: bool
    """Whether sources have shares, which were compared."""
    with_metrics: bool
    """Whether every length was compared with the metrics."""
    with_curriculum: bool
    """Whether every step was held against the curriculum, which takes the metrics."""


def verify_plan(
    plan: Plan | str | os.PathLike[str],
    *,
    metrics: MetricsLike | Mapping[str, MetricsLike] | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check the hashes and every invariant of a plan.

    Memory: one byte per sample of the source, 8 per micro-batch and 40 per step of an epoch, the distinct
    lengths, and a few record batches; where
    samples are cut, some hundred megabytes more; where a curriculum is checked, up to 64 bytes per sample;
    the metrics of several sources.

    Args:
        plan: a plan, or its directory.
        metrics: the metrics it was made from, of a plan of named sources by their names; every planned length
            is compared with them, every step with what its curriculum admits, an order by blocks with the
            blocks, and the samples of every micro-batch with the key that may not repeat.
        progress: told how far the check has come.

    Raises:
        InvariantError: the first invariant that is broken, with step, micro-batch and sample.
        PlanError: the files are not those that were written.
        SourceChangedError: the metrics are of another data set.
        ConfigError: metrics are missing, or named otherwise than the plan's sources.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    try:
        return _verify(plan, None if metrics is None else PlanMetrics(plan, metrics), progress)
    except InvariantError as error:
        raise InvariantError(with_rows(str(error), plan.sources)) from error.__cause__


def _verify(plan: Plan, metrics: PlanMetrics | None, progress: Progress | None) -> Verified:
    _check_hashes(plan)
    seqlens = None if metrics is None else metrics.metric(main_metric(plan, metrics.names))
    steps = StepRules(plan, metrics)
    budgeted = _budgeted(plan, metrics)
    _check_limit(plan)
    drops = DropRules(plan, seqlens, budgeted)
    drops.check()
    rows, wrapped = RowRules(plan, seqlens, budgeted), WrappedRules(plan, seqlens)
    sources = SourceRules(plan)
    num_microbatches = sum(plan.epoch(number).num_microbatches for number in range(plan.num_epochs))
    with_curriculum = metrics is not None and plan.config.get("curriculum") is not None
    total = num_microbatches * (1 + with_curriculum)
    done = 0
    for number in range(plan.num_epochs):
        epoch = plan.epoch(number)
        steps.begin(number, epoch)
        wrapped.begin(number)
        for table in epoch.microbatches():
            rows.check(number, table)
            wrapped.check(number, table)
            steps.count(table)
            done += len(table.step)
            if progress is not None:
                progress(done, total)
        steps.check()
        wrapped.finish(number)
        check_samples(plan, number, seqlens)
        check_copies(plan, number)
        sources.check(number)
        check_figures(plan, number)
        if metrics is not None:
            check_blocks(plan, number, metrics.blocks)
            if plan.config.get("no_repeat_key") is not None:
                check_keys(plan, number, metrics.metric(plan.config["no_repeat_key"]))
    rows.check_shapes()
    drops.check_counts()
    steps.check_learning_rates()
    if metrics is not None and seqlens is not None and with_curriculum:
        for checked in check_curriculum(plan, metrics, seqlens):
            done += checked
            if progress is not None:
                progress(done, total)
    return Verified(
        num_files=len(schema.plan_files(plan.num_epochs)) + 1,
        num_epochs=plan.num_epochs,
        num_steps=sum(plan.epoch(number).num_steps for number in range(plan.num_epochs)),
        num_microbatches=num_microbatches,
        num_samples=plan.num_samples,
        has_passes=any(source.num_passes != 1 for source in plan.sources),
        with_shares=bool(plan.header.get("phases")),
        with_metrics=metrics is not None,
        with_curriculum=with_curriculum,
    )


def main_metric(plan: Plan, names: Collection[str]) -> str:
    """Return which of the metrics ``names`` the plan calls seqlen: of pairs the first that has a budget."""
    budget = plan.config["max_tokens"]
    return next(iter(budget)) if isinstance(budget, dict) and "seqlen" not in names else "seqlen"


def _budgeted(plan: Plan, metrics: PlanMetrics | None) -> dict[str, NDArray[np.integer]]:
    """Return the metrics that have a budget of their own."""
    budget = plan.config["max_tokens"]
    if metrics is None or not isinstance(budget, dict):
        return {}
    return {name: metrics.metric(name) for name in budget}


def _check_limit(plan: Plan) -> None:
    """Check the length from which on a sample is too long; room for unpadded companions as stated."""
    config, stated = plan.config, plan.header["max_seqlen"]
    company = config.get("min_samples") or 1
    is_padded = config["layout"] == "padded" and config["count"] == "padded"
    others = Company(num_samples=company - 1 if is_padded else 0)
    longest = longest_sample(PlanConfig.from_json(config), company=others)
    if stated is not None and (stated > longest or (stated < longest and (is_padded or company == 1))):
        raise InvariantError(f"max_seqlen is {stated} in plan.json, the options give {longest}")


def _check_hashes(plan: Plan) -> None:
    """Compare every file with its hash, and the content hash with the digests of the record batches."""
    files = plan.header["files"]
    for name in schema.plan_files(plan.num_epochs):
        digest = hashlib.sha256()
        data = memoryview(plan.buffer(name))
        for first in range(0, len(data), _CHUNK):
            digest.update(data[first : first + _CHUNK])
        if digest.hexdigest() != files[name]["sha256"]:
            raise PlanError(
                f"{name} is not the file that was written: its SHA-256 is {digest.hexdigest()[:12]}…, "
                f"plan.json says {files[name]['sha256'][:12]}…; restore it or plan again"
            )
    names = schema.plan_files(plan.num_epochs)
    actual = content_hash({name: files[name]["batch_digests"] for name in names})
    if actual != plan.fingerprint:
        raise InvariantError(
            f"content_hash is {plan.fingerprint[:12]}… in plan.json, {actual[:12]}… over the record batches; "
            "plan again"
        )
