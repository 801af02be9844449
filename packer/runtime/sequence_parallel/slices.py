"""A sequence-parallel rank's slice of a micro-batch as tensors, read from the slice's own tokens alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import LengthMismatchError
from packer.runtime.batches.fields import IGNORE_INDEX, num_values, put, require_aligned
from packer.runtime.batches.pieces import length_mismatch, num_tokens, read_samples, read_slice
from packer.runtime.sequence_parallel.shard import Piece, RowLayout, cut, position_ids

_MADE_HERE = frozenset(
    {"attention_mask", "cu_seqlens", "labels", "max_seqlen", "position_ids", "shift_labels"}
)


class MapStyle(Protocol):
    """What the loader asks of a data set: ``dataset[sample_id]`` → mapping with ``input_ids``."""

    def __getitem__(self, sample_id: int, /) -> Mapping[str, Any]: ...


def read_shard(
    dataset: MapStyle,
    sample_ids: NDArray[np.integer],
    layout: RowLayout,
    spans: NDArray[np.int64],
    *,
    starts: NDArray[np.integer] | None = None,
    is_filler: bool = False,
    pad_values: Mapping[str, float] | None = None,
    token_fields: Collection[str] | None = None,
    labels_are_shifted: bool = False,
) -> dict[str, torch.Tensor]:
    """This rank's slice of ``input_ids, position_ids, shift_labels`` and of further token-aligned fields.

    A data set with ``read_slice(sample_id, start, stop)`` (which stops at the sample's end, as slices do) is
    asked for the slice's tokens and the one after them, whose label belongs to the last of them. Of any other
    data set, the samples that touch the slice are read whole. Fields that are not token-aligned have no slice
    and are left out.

    Args:
        dataset: The samples.
        sample_ids: (n,) ids, in the order of ``layout``.
        layout: Where the samples lie.
        spans: What ``rank_spans`` gave for this rank.
        starts: (n,) offset of each planned piece in its sample; None where no sample of the plan is cut.
        is_filler: All labels −100.
        pad_values: Field name → what padding holds; 0 where not named.
        token_fields: Fields with one value a token; None: those whose first dimension is the sample's length.
        labels_are_shifted: ``labels[i]`` is what position i predicts already.

    Returns:
        Field name → ``(B, t, …)``; ids and labels int64. Where no sample has ``labels`` they are the ids.

    Raises:
        LengthMismatchError: A sample does not have the planned length.
    """
    pads = pad_values or {}
    pieces = cut(layout, spans)
    shape = (layout.num_rows, int((spans[:, 1] - spans[:, 0]).sum()))
    read = _Reader(dataset, sample_ids, layout.seqlens, starts, token_fields)
    read.fetch(sorted({piece.sample for piece in pieces}))
    shift_labels = np.full(shape, IGNORE_INDEX, np.int64)
    buffers: dict[str, np.ndarray[Any, Any] | torch.Tensor] = {}
    # A slice of nothing but padding still has every field: an empty read tells dtypes and trailing shapes.
    for piece in pieces or [Piece(0, 0, 0, 0, 0)]:
        fields = read(piece)
        count = piece.stop - piece.start
        sample_id = int(sample_ids[piece.sample])
        for name, values in fields.items():
            if name in _MADE_HERE:
                continue
            if name not in buffers:
                buffers[name] = _full(name, values, shape, pads.get(name, 0))
            out = buffers[name][piece.row, piece.offset : piece.offset + count]
            put(out, values[:count], name=name, sample_id=sample_id)
        if not is_filler:
            ahead = 0 if labels_are_shifted and "labels" in fields else 1
            labels = fields.get("labels", fields["input_ids"])[ahead : count + ahead]
            out = shift_labels[piece.row, piece.offset : piece.offset + len(labels)]
            put(out, labels, name="labels", sample_id=sample_id)
    positions = np.tile(position_ids(layout, spans), (layout.num_rows, 1))
    tensors = {name: torch.as_tensor(buffer) for name, buffer in buffers.items()}
    return tensors | {
        "position_ids": torch.from_numpy(positions),
        "shift_labels": torch.from_numpy(shift_labels),
    }


class _Reader:
    """Token-aligned fields of a piece and, up to the sample's end, of the token after it."""

    def __init__(
        self,
        dataset: MapStyle,
        sample_ids: NDArray[np.integer],
        seqlens: NDArray[np.int64],
        starts: NDArray[np.integer] | None,
        token_fields: Collection[str] | None,
    ) -> None:
        self._dataset = dataset
        self._sample_ids = sample_ids.tolist()
        self._seqlens = seqlens.tolist()
        self._starts = None if starts is None else starts.tolist()
        self._token_fields = token_fields
        self._reads_slices = hasattr(dataset, "read_slice")
        self._whole: dict[int, Mapping[str, Any]] = {}

    def fetch(self, touched: Sequence[int]) -> None:
        """Read the samples that the slice touches whole, where the data set cannot read parts of them."""
        if not self._reads_slices:
            wanted = touched or [0]
            sample_ids = [self._sample_ids[index] for index in wanted]
            for index, sample in zip(wanted, read_samples(self._dataset, sample_ids), strict=True):
                found = num_tokens(sample, self._sample_ids[index])
                # Of a cut sample the plan knows only what it uses.
                if self._starts is None and found != self._seqlens[index]:
                    raise self._mismatch(index, found)
                self._whole[index] = self._aligned(sample, self._sample_ids[index])

    def __call__(self, piece: Piece) -> dict[str, Any]:
        planned = self._seqlens[piece.sample]
        begin = 0 if self._starts is None else self._starts[piece.sample]
        # One token past the planned end tells a sample that has grown; a cut sample may well go on.
        ahead = 1 if piece.stop > piece.start and (self._starts is None or piece.stop < planned) else 0
        start, stop = begin + piece.start, begin + piece.stop + ahead
        if self._reads_slices:
            fields = read_slice(self._dataset, self._sample_ids[piece.sample], start, stop)
        else:
            fields = {name: values[start:stop] for name, values in self._whole[piece.sample].items()}
        if (
            num_tokens(fields, self._sample_ids[piece.sample])
            != min(piece.stop + ahead, planned) - piece.start
        ):
            sample_id = self._sample_ids[piece.sample]
            (whole,) = read_samples(self._dataset, [sample_id])
            raise self._mismatch(piece.sample, num_tokens(whole, sample_id))
        return self._aligned(fields, self._sample_ids[piece.sample])

    def _mismatch(self, index: int, found: int) -> LengthMismatchError:
        start = None if self._starts is None else self._starts[index]
        return LengthMismatchError(
            length_mismatch(self._sample_ids[index], found, self._seqlens[index], start)
        )

    def _aligned(self, sample: Mapping[str, Any], sample_id: int) -> dict[str, Any]:
        length = len(sample["input_ids"])
        for name in ("labels", *(self._token_fields or ())):
            if name in sample:
                require_aligned(name, sample[name], sample_id, length)
        if self._token_fields is None:
            names = [name for name in sample if num_values(sample[name]) == length]
        else:
            names = [name for name in sample if name in self._token_fields or name == "input_ids"]
        return {name: _as_array(sample[name]) for name in names}


def _as_array(values: Any) -> Any:
    return values if isinstance(values, torch.Tensor) else np.asarray(values)


def _full(name: str, values: Any, shape: tuple[int, ...], fill: float) -> Any:
    """A buffer of padding for one field, of the samples' kind, dtype and trailing shape; ids are int64."""
    shape = (*shape, *values.shape[1:])
    if name == "input_ids":
        return np.full(shape, fill, np.int64)
    if isinstance(values, torch.Tensor):
        return torch.full(shape, fill, dtype=values.dtype)
    return np.full(shape, fill, values.dtype)
