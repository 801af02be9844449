"""Samples of the planned lengths with ids that mean nothing, for one micro-batch of a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from packer.plan import MicroBatch, Plan
from packer.runtime.batches.pairs import packed_members

_SMALLEST_VOCABULARY = 2


class SyntheticSamples:
    """A data set that has the samples of the micro-batch named last, each as long as planned.

    Ids are drawn below the size of the model's smallest embedding, so that any of its tables can take them.
    """

    def __init__(self, plan: Plan, vocabulary: int) -> None:
        self._num_samples = plan.num_samples
        self._members = packed_members(plan)
        self._budgets: Mapping[str, Any] = (
            plan.config["max_tokens"] if isinstance(plan.config["max_tokens"], Mapping) else {}
        )
        self._vocabulary = vocabulary
        self._seqlens: dict[int, int] = {}
        self._member_seqlens: Mapping[str, int] = {}

    def stand_for(self, microbatch: MicroBatch) -> None:
        """Have the samples of a micro-batch."""
        starts = np.zeros_like(microbatch.seqlens) if microbatch.starts is None else microbatch.starts
        stops = (starts.astype(np.int64) + microbatch.seqlens).tolist()
        self._seqlens = {}
        for sample_id, stop in zip(microbatch.sample_ids.tolist(), stops, strict=True):
            self._seqlens[sample_id] = max(stop, self._seqlens.get(sample_id, 0))
        self._member_seqlens = microbatch.padded_seqlens

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        length = self._seqlens[sample_id]
        if self._members:
            # (members + 1,) edges of the members, as even as can be
            edges = np.linspace(0, length, len(self._members) + 1).astype(np.int64)
            return {
                member: self._ids(int(size))
                for member, size in zip(self._members, np.diff(edges), strict=True)
            }
        if self._budgets:
            return {
                # what a plan does not count is as long as its tensor
                metric: self._ids(min(length, seqlen) if metric == "seqlen" else seqlen)
                for metric, seqlen in self._member_seqlens.items()
            }
        return {"input_ids": self._ids(length)}

    def read_slice(self, sample_id: int, start: int, stop: int) -> dict[str, Any]:
        """Return a part of a sample, which ends where the sample does."""
        return {"input_ids": self._ids(min(stop, self._seqlens[sample_id]) - start)}

    def _ids(self, length: int) -> NDArray[np.int64]:
        return np.random.default_rng(length).integers(0, self._vocabulary, length)


def smallest_vocabulary(modules: Sequence[nn.Module]) -> int:
    """Return how many ids every embedding of the models takes."""
    sizes = [
        part.num_embeddings
        for module in modules
        for part in module.modules()
        if isinstance(part, nn.Embedding)
    ]
    return min(sizes, default=_SMALLEST_VOCABULARY)
