"""Samples to tensors: one sample a row, or all of them end to end in one row."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import ConfigError, PackerError, SourceError
from packer.runtime.batches.fields import (
    IGNORE_INDEX,
    Sample,
    copy_into,
    difference,
    num_values,
    require_same_fields,
)

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
        aligned = self._aligned_fields(samples, shape)
        if self.pad_sample is not None:
            samples = [_padded(self.pad_sample, sample, shape.padded_seqlen) for sample in samples]
        place = _Packed(shape) if shape.layout == "packed" else _Padded(shape)
        # (2, B, S): in one piece, since glibc gives several large ones back to the kernel after every batch
        ids, labels = np.empty((2, *shape.size), np.int64)
        place.fill(ids, [sample["input_ids"] for sample in samples], self.pad_values.get("input_ids", 0))
        num_loss_tokens = self._make_labels(labels, samples, shape, place, ids)
        tensors: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(place.positions()),
            **place.tensors(),
        }
        for name in samples[0]:
            if name == "input_ids" or name in _MADE_HERE:
                continue
            values = [sample[name] for sample in samples]
            if name in aligned:
                out = _empty(shape.size, values[0])
                place.fill(out, values, self.pad_values.get(name, 0))
                tensors[name] = torch.as_tensor(out)
            else:
                tensors[name] = values
        return Collated(tensors, num_loss_tokens)

    def _make_labels(
        self,
        labels: NDArray[np.int64],
        samples: Sequence[Sample],
        shape: PlannedShape,
        place: "_Packed | _Padded",
        ids: NDArray[np.int64],
    ) -> int:
        """Write the labels and return how many of them count."""
        if shape.is_filler:
            labels.fill(IGNORE_INDEX)
            return 0
        has_labels = "labels" in samples[0]
        if has_labels:
            place.fill(labels, [sample["labels"] for sample in samples], IGNORE_INDEX)
        else:
            np.copyto(labels, ids)
        place.mask_padding(labels)
        if not self.labels_are_shifted:
            place.mask_starts(labels)
        if has_labels or self.labels_are_shifted:
            return int(np.count_nonzero(labels != IGNORE_INDEX))
        return sum(place.seqlens) - len(place.seqlens)

    def _aligned_fields(self, samples: Sequence[Sample], shape: PlannedShape) -> Collection[str]:
        if self.token_fields is not None:
            return self.token_fields
        first = samples[0]
        if len(first) == 1:
            return ()
        seqlens = shape.seqlens.tolist()
        return [
            name
            for name in first
            if name not in _MADE_HERE
            and all(num_values(sample[name]) == n for sample, n in zip(samples, seqlens, strict=True))
        ]


def collate_alike(
    collator: Collator, samples: Sequence[Sample], sample_ids: NDArray[np.integer], shape: PlannedShape
) -> Collated:
    """Collate samples, or say which of them is unlike the others.

    Raises:
        SourceError: A sample has other fields than the others, or a field of another type or shape.
    """
    require_same_fields(samples, sample_ids, shape.seqlens, collator.token_fields)
    try:
        return collator(samples, shape)
    except PackerError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        complaint = difference(samples, sample_ids)
        if complaint is None:
            raise
        raise SourceError(complaint) from error


class _Padded:
    """One sample a row, each row S long."""

    def __init__(self, shape: PlannedShape) -> None:
        self.seqlens: list[int] = shape.seqlens.tolist()
        self._size = shape.size

    def fill(self, out: Any, values: Sequence[Any], pad: float) -> None:
        """Write the samples' values on the left of the rows ``(B, S, …)`` and ``pad`` on the right."""
        for row, value in zip(out, values, strict=True):
            copy_into(row[: len(value)], value)
            row[len(value) :] = pad

    def positions(self) -> NDArray[np.int64]:
        """Return the positions of each row."""
        positions = np.empty(self._size, np.int64)
        positions[:] = _counted(self._size[1])
        return positions

    def tensors(self) -> dict[str, Any]:
        """Return what tells real tokens from padding."""
        mask = np.zeros(self._size, np.int64)
        for row, seqlen in zip(mask, self.seqlens, strict=True):
            row[:seqlen] = 1
        return {"attention_mask": torch.from_numpy(mask)}

    def mask_padding(self, labels: NDArray[np.int64]) -> None:
        """Set every label that belongs to no token to −100."""
        for row, seqlen in zip(labels, self.seqlens, strict=True):
            row[seqlen:] = IGNORE_INDEX

    def mask_starts(self, labels: NDArray[np.int64]) -> None:
        """Set the first label of every sample to −100."""
        labels[:, 0] = IGNORE_INDEX


class _Packed:
    """Samples end to end in one row of T, each on a multiple of ``pad_segments_to`` positions."""

    def __init__(self, shape: PlannedShape) -> None:
        multiple = shape.pad_segments_to
        self._is_dense = multiple == 1
        segments = shape.seqlens if self._is_dense else -(-shape.seqlens // multiple) * multiple
        self.seqlens: list[int] = shape.seqlens.tolist()
        # (n + 1,): edges of the samples, each with its own padding
        self._edges = np.zeros(len(segments) + 1, np.int64)
        np.add.accumulate(segments, out=self._edges[1:])
        self._used = int(self._edges[-1])
        self._segments: list[int] = self.seqlens if self._is_dense else segments.tolist()
        rest = shape.padded_seqlen - self._used
        self._segments_of_row = [*self._segments, rest] if rest else self._segments
        self._longest = max(self._segments_of_row)

    def fill(self, out: Any, values: Sequence[Any], pad: float) -> None:
        """Write the samples' values end to end into ``(1, T, …)``, and ``pad`` between and behind them."""
        if self._is_dense and isinstance(out, np.ndarray):
            np.concatenate(values, out=out[0, : self._used])
        else:
            out[0, : self._used] = pad
            for start, value in zip(self._edges.tolist(), values, strict=False):
                copy_into(out[0, start : start + len(value)], value)
        out[0, self._used :] = pad

    def positions(self) -> NDArray[np.int64]:
        """Return positions that restart in each sample, and in the padding, which is a sample of its own."""
        counted = _counted(self._longest).data  # a buffer, whose slices cost half of what an array's do
        runs = bytearray().join([counted[:length] for length in self._segments_of_row])
        return np.frombuffer(runs, np.int64)[None]

    def tensors(self) -> dict[str, Any]:
        """Return what tells the samples apart."""
        edges = self._edges.astype(np.int32)
        if len(self._segments_of_row) > len(self._segments):
            edges = np.append(edges, edges[-1] + np.int32(self._segments_of_row[-1]))
        return {"cu_seqlens": torch.from_numpy(edges), "max_seqlen": self._longest}

    def mask_padding(self, labels: NDArray[np.int64]) -> None:
        """Set every label that belongs to no token to −100."""
        labels[0, self._used :] = IGNORE_INDEX
        if not self._is_dense:
            for start, seqlen, segment in zip(
                self._edges.tolist(), self.seqlens, self._segments, strict=False
            ):
                labels[0, start + seqlen : start + segment] = IGNORE_INDEX

    def mask_starts(self, labels: NDArray[np.int64]) -> None:
        """Set the first label of every sample to −100."""
        labels.put(self._edges[:-1], IGNORE_INDEX)


def _padded(pad_sample: Callable[[Sample, int], Sample], sample: Sample, length: int) -> Sample:
    """Let a user's function pad a sample.

    Raises:
        ConfigError: It did not.
    """
    padded = pad_sample(sample, length)
    found = num_values(padded.get("input_ids")) if isinstance(padded, Mapping) else None
    if found != length:
        what = type(padded).__name__ if found is None else f"{found:,} input_ids"
        raise ConfigError(
            f"sample_padding_fn returned {what} where {length:,} positions were asked for; let it return the "
            "sample's mapping with input_ids of that length"
        )
    return padded


def _empty(size: tuple[int, int], like: Any) -> Any:
    """Return an array, or a tensor where the samples have tensors, of their dtype and trailing shape."""
    if isinstance(like, torch.Tensor):
        return torch.empty((*size, *like.shape[1:]), dtype=like.dtype)
    like = np.asarray(like)
    return np.empty((*size, *like.shape[1:]), like.dtype)


_COUNTED = np.arange(4096)


def _counted(length: int) -> NDArray[np.int64]:
    """Return 0, 1, …, ``length`` − 1 out of one array that is made once and grows by doubling."""
    global _COUNTED  # never changed in place, so threads cannot disturb each other
    if len(_COUNTED) < length:
        _COUNTED = np.arange(2 * length)
    return _COUNTED[:length]
