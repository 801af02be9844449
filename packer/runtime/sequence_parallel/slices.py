"""A sequence-parallel rank's slice of a micro-batch as tensors, read from the slice's own tokens alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import LengthMismatchError
from packer.runtime.batches.fields import IGNORE_INDEX, INPUT_IDS, LABELS, Fields, empty, put
from packer.runtime.batches.pieces import (
    length_mismatch,
    num_tokens,
    read_samples,
    read_slice,
    require_one_dimension,
)
from packer.runtime.sequence_parallel.shard import Piece, RowLayout, cut, position_ids


class MapStyle(Protocol):
    """What the loader asks of a data set: ``dataset[sample_id]`` → mapping with ``input_ids``."""

    def __getitem__(self, sample_id: int, /) -> Mapping[str, Any]: ...


class Slice(NamedTuple):
    """What one rank holds of a micro-batch."""

    tensors: dict[str, torch.Tensor]
    num_predictable: int
    """Positions whose next token is in the same sample: loss tokens, where no label is −100."""


def read_shard(
    dataset: MapStyle,
    sample_ids: NDArray[np.integer],
    layout: RowLayout,
    spans: NDArray[np.int64],
    fields: Fields,
    *,
    starts: NDArray[np.integer] | None = None,
    is_filler: bool = False,
    labels_are_shifted: bool = False,
    reads_whole_row: bool = False,
) -> Slice:
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
        fields: What the samples of this run have.
        starts: (n,) offset of each planned piece in its sample; None where no sample of the plan is cut.
        is_filler: All labels −100.
        labels_are_shifted: ``labels[i]`` is what position i predicts already.
        reads_whole_row: Read every sample of the row whole, in order, as every other rank of it does: random
            numbers that are drawn meanwhile are then the same on all of them.

    Returns:
        Field name → ``(B, t, …)``; ids and labels int64. Where no sample has ``labels`` they are the ids.

    Raises:
        LengthMismatchError: A sample does not have the planned length.
        SourceError: A sample has other fields than the run's, or values that do not fit.
    """
    pieces = cut(layout, spans)
    shape = (layout.num_rows, int((spans[:, 1] - spans[:, 0]).sum()))
    read = _Reader(dataset, sample_ids, layout.seqlens, starts, fields, reads_whole_row=reads_whole_row)
    read.fetch(sorted({piece.sample for piece in pieces}))
    if not (pieces or fields.are_settled):
        # A slice of nothing but padding has every field, too: a sample of the row tells which they are.
        read(Piece(0, 0, 0, 0, int(layout.seqlens[0])))
    samples = [read(piece) for piece in pieces]
    ids = np.full(shape, fields.pad_value(INPUT_IDS), np.int64)
    shift_labels = np.full(shape, IGNORE_INDEX, np.int64)
    buffers = {field.name: empty(shape, field) for field in fields.aligned}
    for name, buffer in buffers.items():
        buffer[...] = fields.pad_value(name)
    ahead = 0 if labels_are_shifted and fields.has_labels else 1
    num_predictable = 0
    for piece, sample in zip(pieces, samples, strict=True):
        count = piece.stop - piece.start
        sample_id = int(sample_ids[piece.sample])
        place = (piece.row, slice(piece.offset, piece.offset + count))
        put(ids[place], _array(sample[INPUT_IDS])[:count], name=INPUT_IDS, sample_id=sample_id)
        for name, buffer in buffers.items():
            put(buffer[place], _array(sample[name])[:count], name=name, sample_id=sample_id)
        labels = _array(sample[LABELS if fields.has_labels else INPUT_IDS])[ahead : count + ahead]
        num_predictable += len(labels)
        if not is_filler:
            out = shift_labels[piece.row, piece.offset : piece.offset + len(labels)]
            put(out, labels, name=LABELS, sample_id=sample_id)
    positions = np.tile(position_ids(layout, spans), (layout.num_rows, 1))
    tensors = {
        INPUT_IDS: torch.from_numpy(ids),
        "position_ids": torch.from_numpy(positions),
        "shift_labels": torch.from_numpy(shift_labels),
        # position_ids among them, where the data set's own were asked for
        **{name: torch.as_tensor(buffer) for name, buffer in buffers.items()},
    }
    return Slice(tensors, num_predictable)


class _Reader:
    """A piece's fields and, up to the sample's end, those of the token after it."""

    def __init__(
        self,
        dataset: MapStyle,
        sample_ids: NDArray[np.integer],
        seqlens: NDArray[np.int64],
        starts: NDArray[np.integer] | None,
        fields: Fields,
        *,
        reads_whole_row: bool,
    ) -> None:
        self._dataset = dataset
        self._sample_ids = sample_ids
        self._seqlens = seqlens.tolist()
        self._starts = None if starts is None else starts.tolist()
        self._fields = fields
        self._reads_whole_row = reads_whole_row
        self._reads_slices = hasattr(dataset, "read_slice") and not reads_whole_row
        self._whole: dict[int, Mapping[str, Any]] = {}

    def fetch(self, touched: Sequence[int]) -> None:
        """Read the samples that the slice touches whole, where the data set cannot read parts of them."""
        if self._reads_slices:
            return
        wanted = list(range(len(self._sample_ids))) if self._reads_whole_row else touched or [0]
        ids = self._sample_ids[wanted]
        samples = read_samples(self._dataset, ids.tolist())
        found = [
            num_tokens(sample, sample_id) for sample, sample_id in zip(samples, ids.tolist(), strict=True)
        ]
        for index, sample, length in zip(wanted, samples, found, strict=True):
            # Of a cut sample the plan knows only what it uses.
            if self._starts is None and length != self._seqlens[index]:
                raise self._mismatch(index, sample, length)
        self._fields.hold(samples, ids, found)
        self._whole = dict(zip(wanted, samples, strict=True))

    def __call__(self, piece: Piece) -> Mapping[str, Any]:
        planned = self._seqlens[piece.sample]
        begin = 0 if self._starts is None else self._starts[piece.sample]
        # One token past the planned end tells a sample that has grown; a cut sample may well go on.
        ahead = 1 if self._starts is None or piece.stop < planned else 0
        start, stop = begin + piece.start, begin + piece.stop + ahead
        sample_id = int(self._sample_ids[piece.sample])
        expected = min(piece.stop + ahead, planned) - piece.start
        if self._reads_slices:
            sample: Mapping[str, Any] = read_slice(self._dataset, sample_id, start, stop)
        else:
            cut = self._fields.cut
            sample = {
                name: _array(values)[start:stop] if name in cut else values
                for name, values in self._whole[piece.sample].items()
            }
        if num_tokens(sample, sample_id) != expected:
            (whole,) = read_samples(self._dataset, [sample_id])
            raise self._mismatch(piece.sample, whole, num_tokens(whole, sample_id))
        if self._reads_slices:
            self._fields.hold([sample], self._sample_ids[[piece.sample]], [expected])
        return sample

    def _mismatch(self, index: int, sample: Mapping[str, Any], found: int) -> LengthMismatchError:
        require_one_dimension(sample, int(self._sample_ids[index]))
        start = None if self._starts is None else self._starts[index]
        return LengthMismatchError(
            length_mismatch(int(self._sample_ids[index]), found, self._seqlens[index], start)
        )


def _array(values: Any) -> Any:
    return values if isinstance(values, torch.Tensor) else np.asarray(values)
