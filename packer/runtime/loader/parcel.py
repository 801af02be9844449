"""A micro-batch on its way from a worker process: in one piece of memory, however many tensors it has.

Torch sends each tensor as a file of its own in shared memory: made, mapped, handed over a socket and mapped
again, which costs several times what reading and collating 8k tokens does. One piece goes that way once.
"""

import io
import pickle
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import PackerError, SourceError
from packer.runtime.batches.batch import Batch
from packer.runtime.loader.progress import Read

INLINE_BYTES = 2048
"""What goes through the pipe that carries the message; all else lies in the piece. More would be faster there
up to about a mebibyte, but a worker that is killed would leave half of it behind, and the receiver waiting
for the rest; a message of up to 4,096 bytes is written whole or not at all."""

_ALIGNMENT = 64


class _Span(NamedTuple):
    """Where in the piece a tensor lies."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Parcel:
    """A micro-batch as bytes: its tensors first, then, pickled, what is left of it without them."""

    __slots__ = ("_piece", "_rest")

    def __init__(self, piece: torch.Tensor, rest: int) -> None:
        self._piece = piece
        self._rest = rest
        """Where in the piece the tensors end."""

    @classmethod
    def of(cls, read: Read) -> "Parcel":
        """Copy what was read, a batch with its nested ones or an error, into one piece."""
        outcome = read.outcome
        if (
            isinstance(outcome, PackerError) and outcome.__cause__ is not None
        ):  # which does not travel with it
            outcome.add_note("".join(traceback.format_exception(outcome.__cause__)))
        stowed: list[tuple[_Span, torch.Tensor]] = []
        size = 0
        is_plain = True

        def stow(tensor: torch.Tensor) -> _Span | torch.Tensor:
            nonlocal size, is_plain
            if not _is_plain(tensor):
                is_plain = False
                return tensor  # which torch sends in its own way
            span = _Span(size, size + tensor.nbytes, tensor.dtype, tuple(tensor.shape))
            stowed.append((span, tensor))
            size = -(-span.stop // _ALIGNMENT) * _ALIGNMENT
            return span

        if isinstance(outcome, Batch):
            outcome = outcome.map_values(torch.Tensor, stow)
        try:
            rest = _pickled((read.place, outcome, read.fields), only_bytes=is_plain)
        except Exception as error:
            return cls.of(Read(read.place, _cannot_be_sent(read, error)))
        piece = torch.empty(size + len(rest), dtype=torch.uint8)
        for span, tensor in stowed:
            _at(piece, span).copy_(tensor)
        piece[size:] = torch.frombuffer(rest, dtype=torch.uint8)
        return cls(piece, size)

    def unpack(self) -> Read:
        """Return what was read, its tensors views of the piece."""
        piece = self._piece
        rest: Any = piece[self._rest :].numpy()
        place, outcome, fields = pickle.loads(rest)
        if isinstance(outcome, Batch):
            outcome = outcome.map_values(_Span, lambda span: _at(piece, span))
        return Read(place, outcome, fields)

    def pin_memory(self) -> "Parcel":
        """Return the parcel in page-locked memory; called by torch's loader where that was asked for."""
        return Parcel(self._piece.pin_memory(), self._rest)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._piece.nbytes <= INLINE_BYTES:
            return _from_array, (self._piece.numpy(), self._rest)
        return Parcel, (self._piece, self._rest)


def _from_array(piece: NDArray[np.uint8], rest: int) -> Parcel:
    return Parcel(torch.from_numpy(piece), rest)


def _pickled(value: Any, *, only_bytes: bool) -> bytearray:
    if only_bytes:
        return bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    out = io.BytesIO()
    ForkingPickler(out, pickle.HIGHEST_PROTOCOL).dump(value)
    return bytearray(out.getbuffer())


def _cannot_be_sent(read: Read, error: Exception) -> SourceError:
    return SourceError(
        f"micro-batch {read.place.accum} of step {read.place.step} holds what cannot be sent from a worker: "
        f"{error}; let the data set and collate return tensors, arrays, numbers and texts, or read with "
        "num_workers=0"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its bytes and nothing else."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized)
    )


def _at(piece: torch.Tensor, span: _Span) -> torch.Tensor:
    return piece[span.start : span.stop].view(span.dtype).view(span.shape)
