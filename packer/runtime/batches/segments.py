"""Edges of packed rows in tensors of one shape, for what is compiled or captured once for the whole plan."""

from typing import Any, NamedTuple

import numpy as np
import torch

from packer.errors import ConfigError, PlanError
from packer.plan import Plan
from packer.runtime.batches.pairs import packed_members


class Segments(NamedTuple):
    """How many segments the packed rows of a plan are cut into at most, and how long one may be."""

    most: int
    """Every ``cu_seqlens`` gets ``most + 1`` edges: what is missing are segments of no token at the row's
    end, which variable-length attention passes over."""
    longest: int
    """The ``max_seqlen`` of every batch; kernels take it as an upper bound."""

    @classmethod
    def of(cls, plan: Plan, most: bool | int) -> "Segments":
        """Find them in a plan; all its rows are read once.

        Args:
            plan: A packed plan.
            most: True for as many segments as its rows need, the padding at a row's end included; or more.

        Raises:
            ConfigError: The plan is padded.
            PlanError: A row has more segments than were asked for.
        """
        if plan.layout != "packed":
            raise ConfigError(
                "pad_cu_seqlens is about packed rows, and the plan is padded, where (B, S) says the whole "
                "shape; leave it out, or plan with --layout packed"
            )
        multiple = int(plan.config.get("pad_segments_to") or 1)
        members = max(len(packed_members(plan)), 1)
        needed = longest = 0
        for epoch in range(plan.num_epochs):
            for rows in plan.epoch(epoch).microbatches():
                padded = -(-rows.seqlens.astype(np.int64) // multiple) * multiple
                used = np.add.reduceat(padded, rows.offsets[:-1])
                rest = rows.padded_seqlen - used
                needed = max(needed, int((rows.num_samples * members + (rest > 0)).max()))
                longest = max(longest, int(padded.max()), int(rest.max()))
        if most is True:
            return cls(needed, longest)
        if most < needed:
            raise PlanError(
                f"pad_cu_seqlens={most} segments were asked for, and a row of the plan has {needed:,}; give "
                f"True or {needed}, or plan with --max-samples"
            )
        return cls(int(most), longest)

    def pad(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return a batch's tensors with the edges repeated at the row's end."""
        edges: torch.Tensor = tensors["cu_seqlens"]
        padded = edges.new_full((self.most + 1,), int(edges[-1]))
        padded[: len(edges)] = edges
        return tensors | {"cu_seqlens": padded, "max_seqlen": self.longest}
