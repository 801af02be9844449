"""What ``plan.json`` counts while the tables are written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.plan.epoch import DROP_REASONS, DroppedSamples, PlannedEpoch
from packer.plan.sources import PlanSource, source_of


class ShapeTable:
    """Which shapes (B, S) micro-batches have, while there are few enough to list.

    A plan that was asked for few lengths lists its shapes whatever their number, another one a screenful.
    """

    MOST = 256
    MOST_WHERE_ASKED = 65_536

    def __init__(self, config: Mapping[str, Any]) -> None:
        asked = config.get("num_shapes") is not None or config.get("fixed_seqlen") is not None
        self._most = self.MOST_WHERE_ASKED if asked else self.MOST
        # shape -> micro-batches, real tokens
        self._counts: dict[tuple[int, int], tuple[int, int]] | None = {}

    def add(
        self,
        num_rows: NDArray[np.integer],
        padded_seqlens: NDArray[np.int32],
        real_tokens: NDArray[np.int64],
    ) -> None:
        """Count micro-batches: (M,) rows of each tensor, their length, and the tokens that are no padding."""
        if self._counts is None:
            return
        keys, inverse, counts = np.unique(
            num_rows.astype(np.int64) << 32 | padded_seqlens.astype(np.int64),
            return_inverse=True,
            return_counts=True,
        )
        tokens = np.zeros(len(keys), np.int64)
        np.add.at(tokens, inverse, real_tokens)
        for key, count, real in zip(keys.tolist(), counts.tolist(), tokens.tolist(), strict=True):
            shape = (key >> 32, key & 0xFFFFFFFF)
            before = self._counts.get(shape, (0, 0))
            self._counts[shape] = (before[0] + count, before[1] + real)
        if len(self._counts) > self._most:
            self._counts = None

    def as_json(self) -> list[dict[str, int]] | None:
        """Return the table by falling count, or None where there are too many."""
        if self._counts is None:
            return None
        ordered = sorted(self._counts.items(), key=lambda item: (-item[1][0], item[0]))
        return [
            {"num_rows": b, "padded_seqlen": s, "count": count, "num_tokens": tokens}
            for (b, s), (count, tokens) in ordered
        ]


def time_lost(costs: NDArray[np.int64 | np.float64], dp_size: int, grad_accum: int) -> tuple[float, float]:
    """Return how much longer the ranks take than if the work were spread evenly over them.

    Args:
        costs: (R,) of whole steps, row = (step·A + accum)·D + dp_rank.
        dp_size: D.
        grad_accum: A.

    Returns:
        Where ranks wait for each other in every slot, as FSDP's do: Σ slot maxima · D / Σ cost − 1; and where
        they wait once a step, as DDP's without synchronisation in between: the same with sums over a step.
    """
    if int(costs.max(initial=0)) * len(costs) >= 2**63:
        costs = costs.astype(np.float64)  # squares of lengths may sum up to more than 64 bits hold
    total = int(costs.sum())
    if dp_size == 1 or total == 0:
        return 0.0, 0.0
    # (R,) -> (T, A, D)
    slots = costs.reshape(-1, grad_accum, dp_size)
    by_slots, by_steps = int(slots.max(axis=2).sum()), int(slots.sum(axis=1).max(axis=1).sum())
    return by_slots * dp_size / total - 1, by_steps * dp_size / total - 1


def drop_counts(
    dropped: DroppedSamples, is_begun: NDArray[np.bool_] | None = None
) -> dict[str, dict[str, int]]:
    """Return reason → samples and tokens.

    Args:
        dropped: in the order of the samples.
        is_begun: (num_samples,) whose first piece is planned; None where samples are whole. One in pieces is
            counted where its first one is, so that none counts twice; one that is lost whole, in one of
            several passes, counts.
    """
    counts = {}
    is_sample = np.ones(len(dropped.sample_ids), np.bool_)
    if is_begun is not None:
        is_sample = ~is_begun[dropped.sample_ids]
        is_sample[1:] &= dropped.sample_ids[1:] != dropped.sample_ids[:-1]
        is_sample |= dropped.num_tokens == dropped.seqlens
    for code, reason in enumerate(DROP_REASONS):
        mine = dropped.reasons == code
        if mine.any():
            counts[reason] = {
                "num_samples": int(np.count_nonzero(mine & is_sample)),
                "num_tokens": int(dropped.num_tokens[mine].sum()),
            }
    return counts


def whole_samples(arrays: dict[str, Any]) -> NDArray[np.integer]:
    """Return per micro-batch how many samples begin in it: a sample in pieces counts with its first one."""
    if "starts" not in arrays:
        num_samples: NDArray[np.int32] = arrays["num_samples"]
        return num_samples
    offsets, starts = arrays["starts"]
    begun: NDArray[np.int64] = np.concatenate(([0], np.cumsum(starts == 0, dtype=np.int64)))[offsets]
    return np.diff(begun)


class SourceCounts:
    """What an epoch plans of each source; copies of micro-batches are not counted."""

    def __init__(self, sources: Sequence[PlanSource]) -> None:
        self._sources = sources
        # (sources, 2) samples, each where its first piece is, and tokens
        self._counts = np.zeros((len(sources), 2), np.int64)

    def add(
        self,
        sample_ids: NDArray[np.integer],
        seqlens: NDArray[np.int32],
        starts: NDArray[np.int32] | None,
    ) -> None:
        """Count pieces: (P,) their samples, tokens, and where they begin in these; None: at 0."""
        begins = np.ones(len(sample_ids), np.bool_) if starts is None else starts == 0
        if len(self._sources) == 1:
            self._counts[0] += (np.count_nonzero(begins), seqlens.sum(dtype=np.int64))
            return
        of = source_of(sample_ids, self._sources)
        # float64 sums are exact: no record batch has 2^53 tokens
        for column, weights in enumerate((begins, seqlens)):
            sums = np.bincount(of, weights, minlength=len(self._sources))
            self._counts[:, column] += sums.astype(np.int64)

    def as_json(self) -> list[dict[str, int]]:
        """Return one entry a source, in order."""
        return [{"num_samples": samples, "num_tokens": tokens} for samples, tokens in self._counts.tolist()]


class Cuts:
    """Which samples of one epoch are in pieces, and whose first piece is planned."""

    def __init__(self, epoch: PlannedEpoch, always: DroppedSamples, num_samples: int) -> None:
        self.is_begun: NDArray[np.bool_] | None = None
        self.num_cut = 0
        if epoch.starts is None:
            return
        self.is_begun, is_cut = np.zeros((2, num_samples), np.bool_)
        is_copy = np.repeat(epoch.is_filler | epoch.is_repeat, np.diff(epoch.offsets))
        self.is_begun[epoch.sample_ids[(epoch.starts == 0) & ~is_copy]] = True
        is_cut[epoch.sample_ids[epoch.starts > 0]] = True
        for lost in (always, epoch.dropped):
            is_cut[lost.sample_ids[lost.num_tokens < lost.seqlens]] = True
        self.num_cut = int(np.count_nonzero(is_cut))
