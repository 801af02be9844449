"""Labels as a model's loss takes them: what each position is to predict."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

IGNORE_INDEX = -100
"""The label that no loss looks at."""


def shifted_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return ``(B, S)`` labels shifted by one, once for the whole row; ranks that share a row get them so."""
    if "shift_labels" in batch:
        shifted: torch.Tensor = batch["shift_labels"]
        return shifted
    return F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()
