"""Samples of the data set, held against the plan, to the tensors of a micro-batch."""

from packer.runtime.batches.batch import Batch, BatchInfo, StepInfo
from packer.runtime.batches.collate import PlannedShape

__all__ = ["Batch", "BatchInfo", "PlannedShape", "StepInfo"]
