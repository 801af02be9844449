"""Replay a plan on one rank: steps, workers, the place where a run stands."""

from packer.runtime.loader.loader import FlatView, PlanLoader
from packer.runtime.loader.step import Step

__all__ = ["FlatView", "PlanLoader", "Step"]
