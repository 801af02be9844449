"""Labels as a model's loss takes them: what each position is to predict."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from packer.plan import Plan

IGNORE_INDEX = -100
"""The label that no loss looks at."""


def labels_are_shifted(plan: Plan) -> bool:
    """Whether ``labels[i]`` of the data set is what position i predicts already: ``analyze --no-shift``."""
    definition = plan.definition
    return bool(definition.get("labels_column")) and not definition.get("shift", True)


def shifted_labels(batch: Mapping[str, Any], *, are_shifted: bool = False) -> torch.Tensor:
    """Return ``(B, S)`` labels shifted by one, once for the whole row; ranks that share a row get them so.

    Args:
        batch: A micro-batch with ``labels``, or ``shift_labels`` where ranks share its rows.
        are_shifted: What ``labels_are_shifted`` says of the plan.
    """
    if "shift_labels" in batch:
        shifted: torch.Tensor = batch["shift_labels"]
        return shifted
    labels: torch.Tensor = batch["labels"]
    if are_shifted:
        return labels
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()
