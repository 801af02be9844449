"""Replay a plan in a training loop: batches on the device, the step's learning rate, the loss's divisor."""

from packer.runtime.batches import Batch, BatchInfo, PlannedShape, StepInfo
from packer.runtime.loader import FlatView, PlanLoader, Step
from packer.runtime.rate_and_loss import PlanLR, count_loss_tokens, measure_loss_multiplier, scaled_lr

__all__ = [
    "Batch",
    "BatchInfo",
    "FlatView",
    "PlanLR",
    "PlanLoader",
    "PlannedShape",
    "Step",
    "StepInfo",
    "count_loss_tokens",
    "measure_loss_multiplier",
    "scaled_lr",
]
