"""packer: decide before training which samples every rank sees in every micro-batch of every step.

``analyze`` measures a data set, ``make_plan`` packs its samples into micro-batches and steps, ``PlanLoader``
replays the plan. Names are imported when first used, so that analysis and planning never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from packer._version import __version__
from packer.errors import PackerError

if TYPE_CHECKING:
    from packer.analyzer import analyze as analyze
    from packer.analyzer import analyze_dataset as analyze_dataset
    from packer.analyzer import sample_metric as sample_metric
    from packer.budget import calibrate as calibrate
    from packer.budget import rehearse as rehearse
    from packer.metrics import open_metrics as open_metrics
    from packer.plan import Plan as Plan
    from packer.plan import load_plan as load_plan
    from packer.plan import verify_plan as verify_plan
    from packer.planner import PlanConfig as PlanConfig
    from packer.planner import make_plan as make_plan
    from packer.runtime import PlanLoader as PlanLoader
    from packer.runtime import PlanLR as PlanLR
    from packer.runtime import Step as Step
    from packer.runtime import count_loss_tokens as count_loss_tokens
    from packer.runtime import measure_loss_multiplier as measure_loss_multiplier
    from packer.runtime import scaled_lr as scaled_lr
    from packer.shards import open_dataset as open_dataset
    from packer.shards.materialize import materialize as materialize

_HOMES = {
    "PlanConfig": "packer.planner",
    "PlanLR": "packer.runtime",
    "PlanLoader": "packer.runtime",
    "Plan": "packer.plan",
    "Step": "packer.runtime",
    "analyze": "packer.analyzer",
    "analyze_dataset": "packer.analyzer",
    "calibrate": "packer.budget",
    "count_loss_tokens": "packer.runtime",
    "load_plan": "packer.plan",
    "make_plan": "packer.planner",
    "measure_loss_multiplier": "packer.runtime",
    "materialize": "packer.shards.materialize",
    "open_dataset": "packer.shards",
    "open_metrics": "packer.metrics",
    "rehearse": "packer.budget",
    "sample_metric": "packer.analyzer",
    "scaled_lr": "packer.runtime",
    "verify_plan": "packer.plan",
}

__all__ = ["PackerError", "__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'packer' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, the lazy ones included."""
    return sorted(__all__)
