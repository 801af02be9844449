"""Samples to tensors: one sample a row, or all of them end to end in one row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import ConfigError, PackerError, SourceError
from packer.runtime.batches.batch import LabelsFrom
from packer.runtime.batches.fields import (
    IGNORE_INDEX,
    LABELS,
    Fields,
    Sample,
    copy_into,
    empty,
    first_that_does_not_fit,
    num_values,
)


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
    labels_from: LabelsFrom
    num_predictable: int = 0
    """How many would, if no label were −100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collator:
    """Makes the tensors of the two layouts.

    Padded: ``input_ids, attention_mask, position_ids, labels``, each int64 ``(B, S)``. Packed: ``input_ids,
    position_ids, labels``, each int64 ``(1, T)``, ``cu_seqlens`` int32 and ``max_seqlen``, an int. The first
    label of every sample is −100, since nothing comes before it to predict it from. Further fields with one
    value a token become ``(B, S, …)`` or ``(1, T, …)`` of their own dtype; all others become lists with one
    item a sample. Where something else than ``input_ids`` is counted there are no ids, and labels only where
    the data set gives one a position: ``labels[i]`` is what position i predicts.
    """

    first_label_counts: bool = False
    """Something predicts it: ``labels[i]`` is what position i predicts already, or what a decoder that is fed
    the labels shifted by one predicts there."""
    pad_sample: Callable[[Sample, int], Sample] | None = None
    """A user's function that pads one sample to a length, on the right; padded layout only."""

    def __call__(self, samples: Sequence[Sample], shape: PlannedShape, fields: Fields) -> Collated:
        """Collate samples that are, after any cut, as long as planned, and have the run's fields."""
        if self.pad_sample is not None:
            samples = [
                pad_on_the_right(self.pad_sample, sample, shape.padded_seqlen, fields.length_field)
                for sample in samples
            ]
        place = _Packed(shape) if shape.layout == "packed" else _Padded(shape)
        if not fields.counts_ids:
            return self._features(samples, shape, place, fields)
        # (2, B, S): in one piece, since glibc gives several large ones back to the kernel after every batch
        ids, labels = np.empty((2, *shape.size), np.int64)
        place.fill(ids, [sample["input_ids"] for sample in samples], fields.pad_value("input_ids"))
        num_loss_tokens = self._make_labels(labels, samples, shape, place, ids, fields)
        tensors: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(place.positions()),
            **place.tensors(),
            **self._further(samples, shape, place, fields),
        }
        labels_from: LabelsFrom = "dataset" if fields.has_labels else "input_ids"
        return Collated(tensors, num_loss_tokens, labels_from, place.num_tokens - len(samples))

    def _features(
        self, samples: Sequence[Sample], shape: PlannedShape, place: "_Packed | _Padded", fields: Fields
    ) -> Collated:
        """Collate samples that are no token ids; labels, where they have one a position, are not shifted."""
        tensors = {
            **self._further(samples, shape, place, fields),
            "position_ids": torch.from_numpy(place.positions()),
            **place.tensors(),
        }
        if not fields.has_labels:
            if shape.is_filler:
                raise ConfigError(
                    f"a micro-batch is a filler, whose labels must all be {IGNORE_INDEX}, and the samples "
                    f"have none for each of their {fields.length_field}; plan with --remainder drop or fill"
                )
            return Collated(tensors, 0, None)
        labels = np.full(shape.size, IGNORE_INDEX, np.int64)
        if not shape.is_filler:
            place.fill(labels, [sample[LABELS] for sample in samples], IGNORE_INDEX)
        tensors[LABELS] = torch.from_numpy(labels)
        num_loss_tokens = int(np.count_nonzero(labels != IGNORE_INDEX))
        return Collated(tensors, num_loss_tokens, "dataset", place.num_tokens)

    def _further(
        self, samples: Sequence[Sample], shape: PlannedShape, place: "_Packed | _Padded", fields: Fields
    ) -> dict[str, Any]:
        """Return the fields that are neither ids that are counted nor labels."""
        tensors: dict[str, Any] = {}
        for field in fields.aligned:
            out = empty(shape.size, field)
            place.fill(out, [sample[field.name] for sample in samples], fields.pad_value(field.name))
            tensors[field.name] = torch.as_tensor(out)
        for name in fields.listed:
            tensors[name] = [sample[name] for sample in samples]
        return tensors

    def _make_labels(
        self,
        labels: NDArray[np.int64],
        samples: Sequence[Sample],
        shape: PlannedShape,
        place: "_Packed | _Padded",
        ids: NDArray[np.int64],
        fields: Fields,
    ) -> int:
        """Write the labels and return how many of them count."""
        if shape.is_filler:
            labels.fill(IGNORE_INDEX)
            return 0
        if fields.has_labels:
            place.fill(labels, [sample[LABELS] for sample in samples], IGNORE_INDEX)
        else:
            np.copyto(labels, ids)
        place.mask_padding(labels)
        if not self.first_label_counts:
            place.mask_starts(labels)
        if fields.has_labels:
            return int(np.count_nonzero(labels != IGNORE_INDEX))
        return place.num_tokens - (0 if self.first_label_counts else len(samples))


def collate_alike(
    collator: Collator,
    samples: Sequence[Sample],
    sample_ids: NDArray[np.integer],
    shape: PlannedShape,
    fields: Fields,
) -> Collated:
    """Collate samples, or say which of them is unlike the others.

    Raises:
        SourceError: A sample has a field of another type or shape than the run's.
    """
    try:
        return collator(samples, shape, fields)
    except PackerError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        complaint = first_that_does_not_fit(samples, sample_ids, fields)
        if complaint is None:
            raise
        raise SourceError(complaint) from error


class _Padded:
    """One sample a row, each row S long."""

    def __init__(self, shape: PlannedShape) -> None:
        self.seqlens: list[int] = shape.seqlens.tolist()
        self.num_tokens: int = sum(self.seqlens)
        self._size = shape.size

    def fill(self, out: Any, values: Sequence[Any], pad: float) -> None:
        """Write the samples' values on the left of the rows ``(B, S, …)`` and ``pad`` on the right."""
        is_flat = isinstance(out, np.ndarray) and out.ndim == 2
        for row, value in zip(out, values, strict=True):
            if is_flat and isinstance(value, np.ndarray) and value.dtype != np.uint64:
                np.copyto(row[: len(value)], value, casting="safe")
            else:
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
        self.num_tokens: int = sum(self.seqlens)
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
        try:
            if not (self._is_dense and isinstance(out, np.ndarray)):
                raise TypeError
            np.concatenate(values, out=out[0, : self._used], casting="safe")
        except TypeError:  # between them there is padding, or a type that numpy does not trust
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


def pad_on_the_right(
    pad_sample: Callable[[Sample, int], Sample], sample: Sample, length: int, length_field: str
) -> Sample:
    """Let a user's function pad a sample.

    Raises:
        ConfigError: It did not, or put the padding elsewhere, where labels and mask would not look for it.
    """
    padded = pad_sample(sample, length)
    found = num_values(padded.get(length_field)) if isinstance(padded, Mapping) else None
    if found != length:
        what = type(padded).__name__ if found is None else f"{found:,} {length_field}"
        raise ConfigError(
            f"sample_padding_fn returned {what} where {length:,} positions were asked for; let it return the "
            f"sample's mapping with {length_field} of that length"
        )
    tokens = np.asarray(sample[length_field])
    if not np.array_equal(np.asarray(padded[length_field])[: len(tokens)], tokens):
        raise ConfigError(
            f"sample_padding_fn moved the {len(tokens):,} tokens of a sample from its row's head; let it "
            "pad on the right, where the loader's labels, mask and positions expect the padding"
        )
    return padded


_COUNTED = np.arange(4096)


def _counted(length: int) -> NDArray[np.int64]:
    """Return 0, 1, …, ``length`` − 1 out of one array that is made once and grows by doubling."""
    global _COUNTED  # never changed in place, so threads cannot disturb each other
    if len(_COUNTED) < length:
        _COUNTED = np.arange(2 * length)
    return _COUNTED[:length]
