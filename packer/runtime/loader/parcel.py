"""A batch on its way from a worker process: its tensors in one piece, however many they are.

Torch sends each tensor as a file of its own in shared memory: made, mapped, handed over a socket and mapped
again, which costs several times what reading and collating 8k tokens does. One piece goes that way once.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from packer.runtime.batches.batch import Batch

INLINE_BYTES = 2048
"""What goes through the pipe that carries the message. More would be faster there up to about a mebibyte, but
a worker that is killed would leave half of it behind, and the receiver waiting for the rest; a message of up
to 4,096 bytes is written whole or not at all."""

_ALIGNMENT = 64


class _Place(NamedTuple):
    """Where in the piece a tensor lies."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Parcel:
    """A batch whose tensors were replaced by their places in one piece of bytes."""

    __slots__ = ("_contents", "_piece")

    def __init__(self, piece: torch.Tensor, contents: Batch) -> None:
        self._piece = piece
        self._contents = contents

    @classmethod
    def of(cls, batch: Batch) -> "Parcel":
        """Copy a batch's tensors, those of nested batches too, into one piece."""
        stowed: list[tuple[_Place, torch.Tensor]] = []
        size = 0

        def stow(tensor: torch.Tensor) -> _Place | torch.Tensor:
            nonlocal size
            if not _is_plain(tensor):
                return tensor  # which torch sends in its own way
            place = _Place(size, size + tensor.nbytes, tensor.dtype, tuple(tensor.shape))
            stowed.append((place, tensor))
            size = -(-place.stop // _ALIGNMENT) * _ALIGNMENT
            return place

        contents = batch.map_values(torch.Tensor, stow)
        piece = torch.empty(size, dtype=torch.uint8)
        for place, tensor in stowed:
            _at(piece, place).copy_(tensor)
        return cls(piece, contents)

    def unpack(self) -> Batch:
        """Return the batch, its tensors views of the piece."""
        piece = self._piece
        return self._contents.map_values(_Place, lambda place: _at(piece, place))

    def pin_memory(self) -> "Parcel":
        """Return the parcel in page-locked memory; called by torch's loader where that was asked for."""
        return Parcel(
            self._piece.pin_memory(), self._contents.map_values(torch.Tensor, torch.Tensor.pin_memory)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self._piece.nbytes <= INLINE_BYTES:
            return _from_array, (self._piece.numpy(), self._contents)
        return Parcel, (self._piece, self._contents)


def _from_array(piece: NDArray[np.uint8], contents: Batch) -> Parcel:
    return Parcel(torch.from_numpy(piece), contents)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its bytes and nothing else."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized)
    )


def _at(piece: torch.Tensor, place: _Place) -> torch.Tensor:
    return piece[place.start : place.stop].view(place.dtype).view(place.shape)
