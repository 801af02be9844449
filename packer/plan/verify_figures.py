"""What plan.json states of an epoch as a whole: the mix of its steps, and the time its ranks lose."""

import math

import numpy as np

from packer.errors import InvariantError
from packer.plan.counts import time_lost
from packer.plan.design_effect import design_effects
from packer.plan.reader import Plan

TOLERANCE = 1e-9
"""Relative and absolute: the last digits of a division."""


def check_figures(plan: Plan, epoch: int) -> None:
    """Check the design effect of one epoch's steps, and how unevenly its ranks work.

    Format version 1 states no design effect, and measures the ranks by another rule: nothing is checked.

    Raises:
        InvariantError: a figure is not the one that the rows give.
    """
    if plan.header["version"] < 2:
        return
    opened, stated = plan.epoch(epoch), plan.header["epochs"][epoch]
    for name, effect in design_effects(plan, epoch).items():
        compare(epoch, f"design_effect.{name}", stated["design_effect"][name], effect)
    costs = np.concatenate([np.empty(0, np.int64), *(table.cost for table in opened.microbatches())])
    by_slots, by_steps = time_lost(costs, plan.dp_size, plan.grad_accum)
    compare(epoch, "rank_imbalance", stated["rank_imbalance"], by_slots)
    compare(epoch, "rank_imbalance_by_step", stated["rank_imbalance_by_step"], by_steps)


def compare(epoch: int, name: str, stated: float | None, actual: float | None) -> None:
    """Refuse a figure of ``plan.json`` that is not, to ``TOLERANCE``, what the rows give.

    Raises:
        InvariantError: names both.
    """
    if stated is not None and actual is not None:
        if math.isclose(stated, actual, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return
    elif stated is actual:
        return
    shown = ["null" if value is None else f"{value:.6g}" for value in (stated, actual)]
    raise InvariantError(f"epoch {epoch}: {name} is {shown[0]} in plan.json, the rows give {shown[1]}")
