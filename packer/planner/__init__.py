"""The planner: from sequence lengths and a configuration to epochs of micro-batches and steps.

A room for each stage, in the order in which data flows; ``config`` holds the options of all of them.

0. ``measured``: what is known of the samples of all sources, end to end.
1. ``choose``: which samples are planned (``selection``), within which bounds (``limits``), and how those that
   are too long are cut (``pieces``).
2. ``order``: random, sequential or by length, in threads; ``stream``: several sources, pass after pass,
   merged by their shares.
3. ``packing``: samples → micro-batches, one file a packing; ``pack`` takes the one that was asked for. In
   packed rows ``apart`` keeps pieces of one sample from meeting, ``company`` sees to their number of samples;
   under a curriculum (``packer.curriculum``) ``curriculum`` says who may be packed when.
   ``total`` packs as much of a stream as a number of tokens or steps takes.
4. ``compose``: micro-batches → steps. ``deal`` makes every step a sample of the epoch, ``sequence`` keeps
   sources to their shares from step to step, ``repeats`` keeps two passes apart, ``steps`` applies the
   remainder or the total, ``balance`` evens out the ranks, ``mix`` measures what came of it.
5. ``shape`` and ``rate``: S or T of every row, the learning-rate factor of every step.
6. ``epochs``: all of it, epoch after epoch; ``make_plan``: into a plan on disk or in memory; ``progress``:
   how far it is.

``PlanConfig`` is imported at once; ``make_plan``, which brings the compiled kernels, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from packer.options.config import PlanConfig
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
