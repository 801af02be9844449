"""Replay a plan in a training loop: batches on the device, the step's learning rate, the loss's divisor."""

from packer.runtime.batch import Batch, BatchInfo, StepInfo
from packer.runtime.collate import PlannedShape
from packer.runtime.loader import FlatView, PlanLoader
from packer.runtime.loss import count_loss_tokens
from packer.runtime.lr import PlanLR, scaled_lr
from packer.runtime.multiplier import measure_loss_multiplier
from packer.runtime.step import Step

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
