"""The plan on disk: its tables, how they are written, how a run reads them, and what must hold in them."""

from packer.plan.epoch import DROP_REASONS, DroppedSamples, PlannedEpoch
from packer.plan.extents import Extents
from packer.plan.facts import PlanFacts
from packer.plan.reader import Epoch, Plan, load_plan
from packer.plan.rows import Dropped, MicroBatch, MicroBatches, StepRow, Steps
from packer.plan.sources import PlanSource
from packer.plan.verify import Verified, main_metric, verify_plan
from packer.plan.verify_lengths import check_lengths
from packer.plan.writer import plan_in_memory, write_plan

__all__ = [
    "DROP_REASONS",
    "Dropped",
    "DroppedSamples",
    "Epoch",
    "Extents",
    "MicroBatch",
    "MicroBatches",
    "Plan",
    "PlanFacts",
    "PlanSource",
    "PlannedEpoch",
    "StepRow",
    "Steps",
    "Verified",
    "check_lengths",
    "load_plan",
    "main_metric",
    "plan_in_memory",
    "verify_plan",
    "write_plan",
]
