"""The options of a plan, and the bounds that they put on a micro-batch, for planner and verification."""

from packer.options.config import PlanConfig

__all__ = ["PlanConfig"]
