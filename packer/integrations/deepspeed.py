"""DeepSpeed's dynamic batching on a plan: its function, its configuration section, one changed import.

    from packer.integrations.deepspeed import (
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
    )

The batches are DeepSpeed's where its own faults do not decide (``train_micro_batch_size_per_gpu`` 1, an
order that is not random). What differs: no sample and no trailing micro-batch is left out silently, the
last one included; with ``random`` the samples are shuffled in windows, which pads less; every fp16 overflow
skips its own factor and no other; ``engine.save_checkpoint`` keeps the place in the data and the factor
together, and ``load_checkpoint`` refuses those of another plan; planning takes milliseconds.
``lr_scheduler.step(0)`` at an epoch's beginning leaves a warm-up inside where it is.

Tested with DeepSpeed 0.17.0 and 0.19.8.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from packer.errors import ConfigError
from packer.integrations.deepspeed_loader import (
    AnySamples,
    Chosen,
    CollateAny,
    MiddleStageLoader,
    RankMicrobatches,
    VariableBatchLoader,
    io_arguments,
)
from packer.integrations.deepspeed_lr import VariableBatchSizeLR
from packer.integrations.deepspeed_plan import BatchingSettings, plan_for
from packer.plan import Plan
from packer.runtime import PlanLoader

_LOGGER = logging.getLogger(__name__)


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Any = None,
    dataset_filter_ids: Any = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[VariableBatchLoader, VariableBatchSizeLR, dict[str, Any]]:
    """Make, or find, metrics and plan, and return what plays them.

    Args:
        dataset: Any map-style data set; samples are what ``dataloader_collate_fn`` makes of them.
        engine: What ``deepspeed.initialize`` returned; its configuration has the ``dynamic_batching``
            section.
        dataset_seqlens: Length of every sample; default: the metrics at ``metrics_path``.
        dataset_filter_ids: Samples to take, in the order in which ``dataloader`` reads them, each as often as
            it is named; default: all, in the data set's order.
        dataloader_collate_fn: List of samples → batch; default: the list itself.
        sample_padding_fn: ``(sample, length)`` → the sample, padded; what pipeline stages need.
        batch_seqlens_fn: Batch → length of each of its samples; measures a data set that has no metrics yet.

    Returns:
        A loader over this rank's micro-batches of an epoch, a scheduler to set as ``engine.lr_scheduler``,
        and arguments with which ``engine.deepspeed_io`` makes a loader of its own.

    Raises:
        ConfigError: The configuration does not ask for dynamic batching, or something it needs is missing.
        EmptyPlanError: No step can be made of these samples within these bounds.
        SourceChangedError: The lengths are of another number of samples.
    """
    settings = BatchingSettings.of_engine(engine)
    if settings.is_pipeline and sample_padding_fn is None:
        raise ConfigError(
            "pipeline stages exchange tensors of one shape, so every sample is padded to its step's "
            "length; give sample_padding_fn"
        )

    planned = plan_for(
        settings,
        dataset,
        seqlens=dataset_seqlens,
        sample_ids=dataset_filter_ids,
        measure=None if batch_seqlens_fn is None else _Measure(batch_seqlens_fn, dataloader_collate_fn),
    )
    if torch.distributed.get_rank() == 0:
        _say_what_is_left_out(planned.plan)
    chosen = None if planned.chosen is None else Chosen(dataset, planned.chosen)
    dataset = dataset if chosen is None else chosen
    digest = None if chosen is None else chosen.digest()
    samples = AnySamples(dataset, planned.lengths)
    collate = CollateAny(dataloader_collate_fn, sample_padding_fn if settings.is_pipeline else None)
    played = PlanLoader(
        planned.plan,
        samples,
        dp_rank=settings.dp_rank,
        dp_size=settings.dp_size,
        # Pipeline stages and tensor-parallel ranks have the same micro-batches.
        tp_size=torch.distributed.get_world_size() // settings.dp_size,
        collate=collate,
        num_workers=settings.num_workers,
        pin_memory=False,  # what the user's function collates is not ours to pin
    )
    loader: VariableBatchLoader
    if settings.is_pipeline and not (engine.is_first_stage() or engine.is_last_stage()):
        loader = MiddleStageLoader(played, engine, chosen=digest)
    else:
        loader = VariableBatchLoader(played, pin_memory=settings.pin_memory, chosen=digest)
    scheduler = VariableBatchSizeLR(engine, loader, verbose=settings.verbose)
    own = RankMicrobatches(planned.plan, dataset, collate, settings.dp_rank)
    return (
        loader,
        scheduler,
        io_arguments(own, pin_memory=settings.pin_memory, num_workers=settings.num_workers),
    )


def _say_what_is_left_out(plan: Plan) -> None:
    """Warn of samples that no micro-batch holds, by reason; the plan lists them."""
    parts = [plan.header["dropped"], plan.header["epochs"][0]["dropped"]]
    left_out = [
        f"{count['num_samples']:,} {reason.replace('_', ' ')}"
        for part in parts
        for reason, count in part.items()
    ]
    if left_out:
        _LOGGER.warning(
            "of %s samples, some are in no batch: %s", f"{plan.num_samples:,}", ", ".join(left_out)
        )


class _Measure:
    """The user's function from a collated batch to lengths, as a function from samples to lengths."""

    def __init__(
        self, batch_seqlens: Callable[[Any], Any], collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self._batch_seqlens = batch_seqlens
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        lengths = self._batch_seqlens(samples if self._collate is None else self._collate(samples))
        return np.asarray(lengths.cpu() if isinstance(lengths, torch.Tensor) else lengths)
