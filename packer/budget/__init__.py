"""The budget of a micro-batch: what fits the GPU that there is, and what a plan will take before it runs.

1. ``extremes``: the largest micro-batches of a plan; ``synthetic``: samples for them.
2. ``device``: how much memory there is, and was taken; ``snapshot``: a training put back as it was;
   ``stage``: micro-batches played with gradients held; ``law``: how memory and time grow.
3. ``rehearsal``: the extremes of one plan, on every rank (``ranks``).
4. ``candidates``: plans of one configuration at any budget; ``trial``: one of them, its extremes and its
   speed; ``search``: the largest that fits; ``calibration``: speeds below it; ``findings``, ``advice`` and
   ``command``: which one to take, and why.
"""

from packer.budget.calibration import calibrate
from packer.budget.device import CudaDevice, Device, HostDevice, Peak
from packer.budget.extremes import Extreme, find_extremes
from packer.budget.findings import Calibration, Measured
from packer.budget.rehearsal import Played, Rehearsal, rehearse

__all__ = [
    "Calibration",
    "CudaDevice",
    "Device",
    "Extreme",
    "HostDevice",
    "Measured",
    "Peak",
    "Played",
    "Rehearsal",
    "calibrate",
    "find_extremes",
    "rehearse",
]
