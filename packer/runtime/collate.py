"""Samples to tensors: one sample a row, or all of them end to end in one row."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from packer.runtime.shard import IGNORE_INDEX

Sample = Mapping[str, Any]

_MADE_HERE = frozenset({"attention_mask", "cu_seqlens", "labels", "max_seqlen", "position_ids"})
"""Never taken from the samples as they are: the plan's shape decides them."""


class PlannedShape(NamedTuple):
    """What a user's own ``collate`` learns from the plan."""

    layout: str
    """``padded`` or ``packed``."""
    seqlens: NDArray[np.int32]
    """(n,) tokens of each sample."""
    padded_seqlen: int
    """S, or T."""
    pad_segments_to: int
    """Packed layout: each sample takes a multiple of this many positions."""
    is_filler: bool
    """All labels are to be −100; the loader sees to it for ``labels`` and ``shift_labels``."""
    padded_seqlens: Mapping[str, int] = {}
    """Metric → S, for plans with several budgets."""

    @property
    def size(self) -> tuple[int, int]:
        """``(B, S)``, or ``(1, T)``."""
        return (1 if self.layout == "packed" else len(self.seqlens), self.padded_seqlen)


class Collated(NamedTuple):
    """Tensors of a micro-batch, and how many of its labels count."""

    tensors: dict[str, Any]
    num_loss_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """Makes the tensors of DESIGN's two layouts.

    Padded: ``input_ids, attention_mask, position_ids, labels``, each int64 ``(B, S)``. Packed: ``input_ids,
    position_ids, labels``, each int64 ``(1, T)``, ``cu_seqlens`` int32 and ``max_seqlen``, an int. The first
    label of every sample is −100, since nothing comes before it to predict it from. Further fields with one
    value a token become ``(B, S, …)`` or ``(1, T, …)`` of their own dtype; all others become lists with one
    item a sample.
    """

    pad_values: Mapping[str, float]
    """Field → what padding holds; 0 where not named. Labels are always padded with −100."""
    token_fields: Collection[str] | None = None
    """Fields with one value a token; None: all those whose first dimension is, in every sample of the
    micro-batch, its length."""
    labels_are_shifted: bool = False
    """``labels[i]`` is what position i predicts already, so the first label of a sample counts."""
    pad_sample: Callable[[Sample, int], Sample] | None = None
    """A user's function that pads one sample to a length; padded layout only."""

    def __call__(self, samples: Sequence[Sample], shape: PlannedShape) -> Collated:
        """Collate samples that are, after any cut, as long as planned."""
        seqlens = shape.seqlens.tolist()
        aligned = self._aligned_fields(samples, seqlens)
        if self.pad_sample is not None:
            samples = [self.pad_sample(sample, shape.padded_seqlen) for sample in samples]
        place = _Packed(shape) if shape.layout == "packed" else _Padded(shape)
        ids = place.fill(
            [sample["input_ids"] for sample in samples], self.pad_values.get("input_ids", 0), np.int64
        )
        tensors: dict[str, Any] = {"input_ids": torch.from_numpy(ids)} | place.tensors()
        labels, num_loss_tokens = self._labels(samples, seqlens, shape, place, ids)
        tensors["labels"] = torch.from_numpy(labels)
        for name in samples[0]:
            if name == "input_ids" or name in _MADE_HERE:
                continue
            values = [sample[name] for sample in samples]
            tensors[name] = (
                _as_tensor(place.fill(values, self.pad_values.get(name, 0))) if name in aligned else values
            )
        return Collated(tensors, num_loss_tokens)

    def _labels(
        self,
        samples: Sequence[Sample],
        seqlens: list[int],
        shape: PlannedShape,
        place: "_Packed | _Padded",
        ids: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], int]:
        if shape.is_filler:
            return np.full(ids.shape, IGNORE_INDEX, np.int64), 0
        if "labels" in samples[0]:
            labels = place.fill([sample["labels"] for sample in samples], IGNORE_INDEX, np.int64)
        else:
            labels = ids.copy()
        place.mask_padding(labels)
        if not self.labels_are_shifted:
            place.mask_starts(labels)
        if "labels" in samples[0] or self.labels_are_shifted:
            return labels, int(np.count_nonzero(labels != IGNORE_INDEX))
        return labels, sum(seqlens) - len(seqlens)

    def _aligned_fields(self, samples: Sequence[Sample], seqlens: list[int]) -> Collection[str]:
        if self.token_fields is not None:
            return self.token_fields
        first = samples[0]
        if len(first) == 1 or first.keys() <= {"input_ids", *_MADE_HERE}:
            return ()
        return [
            name
            for name in first
            if all(
                num_values(sample[name]) == seqlen for sample, seqlen in zip(samples, seqlens, strict=True)
            )
        ]


class _Padded:
    """One sample a row, each row S long."""

    def __init__(self, shape: PlannedShape) -> None:
        self._seqlens = shape.seqlens
        self._size = shape.size

    def fill(self, values: Sequence[Any], pad: float, dtype: Any = None) -> Any:
        """Return ``(B, S, …)`` with the samples' values on the left and ``pad`` on the right."""
        out = _full(self._size, values[0], pad, dtype)
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = _as_like(value, out)
        return out

    def tensors(self) -> dict[str, Any]:
        """Return what tells real tokens from padding."""
        # (B, 1) against (S,)
        mask = np.arange(self._size[1]) < self._seqlens[:, None]
        return {
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "position_ids": torch.arange(self._size[1]).repeat(self._size[0], 1),
        }

    def mask_padding(self, labels: NDArray[np.int64]) -> None:
        for row, seqlen in zip(labels, self._seqlens.tolist(), strict=True):
            row[seqlen:] = IGNORE_INDEX

    def mask_starts(self, labels: NDArray[np.int64]) -> None:
        labels[:, 0] = IGNORE_INDEX


class _Packed:
    """Samples end to end in one row of T, each on a multiple of ``pad_segments_to`` positions."""

    def __init__(self, shape: PlannedShape) -> None:
        self._length = shape.padded_seqlen
        self._seqlens = shape.seqlens.tolist()
        multiple = shape.pad_segments_to
        self._dense = multiple == 1
        segments = shape.seqlens if self._dense else -(-shape.seqlens // multiple) * multiple
        # (n + 1,): edges of the samples, each with its own padding
        edges = np.zeros(len(segments) + 1, np.int32)
        np.cumsum(segments, out=edges[1:])
        self._starts = edges[:-1]
        self._used = int(edges[-1])
        self._segments = segments.tolist()
        if self._used < self._length:  # the padding of the row is a sample of its own
            edges = np.append(edges, np.int32(self._length))
            self._segments.append(self._length - self._used)
        self._edges = edges

    def fill(self, values: Sequence[Any], pad: float, dtype: Any = None) -> Any:
        """Return ``(1, T, …)`` with the samples' values end to end and ``pad`` between and behind them."""
        if self._dense and not (dtype is None and isinstance(values[0], torch.Tensor)):
            parts = [np.asarray(value) for value in values]
            out = np.empty((1, self._length, *parts[0].shape[1:]), dtype or parts[0].dtype)
            np.concatenate(parts, out=out[0, : self._used])
            out[0, self._used :] = pad
            return out
        out = _full((1, self._length), values[0], pad, dtype)
        for start, value in zip(self._starts.tolist(), values, strict=True):
            out[0, start : start + len(value)] = _as_like(value, out)
        return out

    def tensors(self) -> dict[str, Any]:
        """Return what tells the samples apart."""
        longest = max(self._segments)
        counted = np.arange(longest)
        positions = np.concatenate([counted[:length] for length in self._segments])
        return {
            "position_ids": torch.from_numpy(positions[None]),
            "cu_seqlens": torch.from_numpy(self._edges),
            "max_seqlen": longest,
        }

    def mask_padding(self, labels: NDArray[np.int64]) -> None:
        """Set every label that belongs to no token to −100."""
        labels[0, self._used :] = IGNORE_INDEX
        if not self._dense:
            for start, seqlen, segment in zip(
                self._starts.tolist(), self._seqlens, self._segments, strict=False
            ):
                labels[0, start + seqlen : start + segment] = IGNORE_INDEX

    def mask_starts(self, labels: NDArray[np.int64]) -> None:
        labels[0, self._starts] = IGNORE_INDEX


def num_values(values: Any) -> int | None:
    """Return the first dimension of an array, a tensor or a list of numbers; None for anything else."""
    if isinstance(values, np.ndarray):
        return len(values) if values.ndim and values.dtype.kind in "biufc" else None
    if isinstance(values, torch.Tensor):
        return len(values) if values.ndim else None
    if isinstance(values, list | tuple):
        numbers = (int, float, list, tuple, np.number, np.ndarray)
        return len(values) if not values or isinstance(values[0], numbers) else None
    return None


def _full(size: tuple[int, ...], like: Any, fill: float, dtype: Any) -> Any:
    if dtype is None and isinstance(like, torch.Tensor):
        return torch.full((*size, *like.shape[1:]), fill, dtype=like.dtype)
    like = np.asarray(like)
    return np.full((*size, *like.shape[1:]), fill, dtype or like.dtype)


def _as_like(value: Any, out: Any) -> Any:
    return torch.as_tensor(value) if isinstance(out, torch.Tensor) else np.asarray(value)


def _as_tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values)
