"""The planner: from sequence lengths and a configuration to epochs of micro-batches and steps.

``PlanConfig`` is imported at once; ``make_plan``, which brings the compiled kernels, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from packer.planner.config import PlanConfig

if TYPE_CHECKING:
    from packer.planner.make_plan import make_plan as make_plan

__all__ = ["PlanConfig", "make_plan"]


def __getattr__(name: str) -> object:
    """Import ``make_plan`` on first use."""
    if name == "make_plan":
        function = import_module("packer.planner.make_plan").make_plan
        globals()[name] = function  # over the module of the same name, which the import has put there
        return function
    raise AttributeError(f"module 'packer.planner' has no attribute {name!r}")
