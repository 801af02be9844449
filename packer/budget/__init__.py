"""The budget of a micro-batch: what fits the GPU that there is, and what a plan will take before it runs.

1. ``extremes``: the largest micro-batches of a plan; ``synthetic``: samples for them.
2. ``device``: how much memory there is, and was taken; ``snapshot``: a training put back as it was;
   ``stage``: micro-batches played with gradients held; ``law``: how memory and time grow.
3. ``rehearsal``: the extremes of one plan, on every rank (``ranks``).
4. ``search``: the largest budget that fits; ``speed``: tokens a second over budgets; ``calibration``: both,
   a table, and the ``command`` to copy.
"""

from packer.budget.device import CudaDevice, Device, HostDevice, Peak
from packer.budget.extremes import Extreme, find_extremes
from packer.budget.rehearsal import Played, Rehearsal, rehearse

__all__ = [
    "CudaDevice",
    "Device",
    "Extreme",
    "HostDevice",
    "Peak",
    "Played",
    "Rehearsal",
    "find_extremes",
    "rehearse",
]
