"""Batches onto the device: copied one ahead on a stream of their own, while the one before is computed on."""

from collections.abc import Iterator

import torch

from packer.errors import PackerError
from packer.runtime.batches.batch import Batch


def to_device(batches: Iterator[Batch | PackerError], device: torch.device) -> Iterator[Batch | PackerError]:
    """Yield the batches with their tensors on ``device``; errors pass through and keep their place."""
    if device.type == "cuda":
        return _CopyAhead(batches, device)
    return (batch if isinstance(batch, PackerError) else batch.to(device) for batch in batches)


class _CopyAhead:
    """Copies batch i + 1 while the device works on batch i; nothing here waits for the device.

    Tensors are allocated on the copying stream. The consumer's stream waits for their copies by an event, and
    each tensor is recorded on it, so that the allocator does not hand its memory to a later copy while
    kernels launched before the tensor was freed may still read it. Host memory is page-locked, and the pinned
    allocator holds it until its copies are done.
    """

    def __init__(self, batches: Iterator[Batch | PackerError], device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ahead = self._start_next()

    def __iter__(self) -> "_CopyAhead":
        return self

    def __next__(self) -> Batch | PackerError:
        if self._ahead is None:
            raise StopIteration
        batch, copied = self._ahead
        self._ahead = self._start_next()
        if isinstance(batch, Batch):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            batch.map_tensors(lambda tensor: _used_on(tensor, stream))
        return batch

    def _start_next(self) -> tuple[Batch | PackerError, torch.cuda.Event] | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self._stream):
            if isinstance(batch, Batch):
                batch = batch.to(self._device, non_blocking=True)
            return batch, self._stream.record_event()


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
