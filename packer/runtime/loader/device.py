"""Batches onto the device: copied one ahead on a stream of their own, while the one before is computed on."""

from collections.abc import Iterator

import torch

from packer.errors import PackerError
from packer.runtime.batches.batch import Batch
from packer.runtime.loader.progress import Read


def to_device(reads: Iterator[Read], device: torch.device) -> Iterator[Read]:
    """Yield what was read with its tensors on ``device``; errors pass through and keep their place."""
    if device.type == "cuda":
        return _CopyAhead(reads, device)
    return _Moved(reads, device)


class _Moved:
    """Moves each batch when it is asked for. No generator: one that raised an error would be at its end."""

    def __init__(self, reads: Iterator[Read], device: torch.device) -> None:
        self._reads = reads
        self._device = device

    def __iter__(self) -> "_Moved":
        return self

    def __next__(self) -> Read:
        read = next(self._reads)
        if isinstance(read.outcome, PackerError):
            return read
        return read._replace(outcome=read.outcome.to(self._device))


class _CopyAhead:
    """Copies batch i + 1 while the device works on batch i; nothing here waits for the device.

    Tensors are allocated on the copying stream. The consumer's stream waits for their copies by an event, and
    each tensor is recorded on it, so that the allocator does not hand its memory to a later copy while
    kernels launched before the tensor was freed may still read it. Host memory is page-locked, and the pinned
    allocator holds it until its copies are done.
    """

    def __init__(self, reads: Iterator[Read], device: torch.device) -> None:
        self._reads = reads
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ahead: tuple[Read, torch.cuda.Event] | None = None
        self._failure: Exception | None = None
        """What ended the reading ahead; raised in its turn."""
        self._look_ahead()

    def __iter__(self) -> "_CopyAhead":
        return self

    def __next__(self) -> Read:
        if self._ahead is None:
            failure, self._failure = self._failure, None
            if failure is None:
                raise StopIteration
            try:
                raise failure
            finally:
                del failure  # or its trace, which holds this frame, would be a cycle around the workers
        read, copied = self._ahead
        self._look_ahead()
        if isinstance(read.outcome, Batch):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            read.outcome.map_tensors(lambda tensor: _used_on(tensor, stream))
        return read

    def _look_ahead(self) -> None:
        self._ahead = None
        try:
            read = next(self._reads, None)
        except Exception as error:
            self._failure = error
            return
        if read is None:
            return
        with torch.cuda.stream(self._stream):
            if isinstance(read.outcome, Batch):
                read = Read(read.place, read.outcome.to(self._device, non_blocking=True))
            self._ahead = read, self._stream.record_event()


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
