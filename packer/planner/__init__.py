"""The planner: from sequence lengths and a configuration to epochs of micro-batches and steps.

1. ``config``: the options, checked where they are born; ``limits``: the bounds they put on a micro-batch.
2. ``pieces``: which samples are planned, and how those that are too long are cut.
3. ``packings``: samples → micro-batches, one file each: ``next_fit``, ``windowed`` (``pairs``: several
   budgets), ``best_fit`` (``repair``: what it does not look at). ``orders`` shuffles and sorts; under a
   curriculum (``packer.curriculum``) ``pools`` says who may be packed when.
4. ``steps``: micro-batches → rows of whole steps, the remainder, the balance of the ranks; ``draft``: what
   they sum up to.
5. ``epochs``: epoch after epoch, with the ``shapes`` and the ``lr`` base that all of them share.
6. ``make_plan``: all of it, into a plan on disk or in memory; ``progress``: how far it is.

``PlanConfig`` is imported at once; ``make_plan``, which brings the compiled kernels, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from packer.planner.config import PlanConfig
from packer.planner.progress import PlanProgress

if TYPE_CHECKING:
    from packer.planner.make_plan import make_plan as make_plan

__all__ = ["PlanConfig", "PlanProgress", "make_plan"]


def __getattr__(name: str) -> object:
    """Import ``make_plan`` on first use."""
    if name == "make_plan":
        function = import_module("packer.planner.make_plan").make_plan
        globals()[name] = function  # over the module of the same name, which the import has put there
        return function
    raise AttributeError(f"module 'packer.planner' has no attribute {name!r}")
