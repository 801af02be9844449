"""Who reads micro-batches, and in which order: worker processes ahead of time, or this process when asked."""

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from packer.errors import PackerError
from packer.runtime.loader.progress import Place, Read
from packer.runtime.loader.reader import MicroBatchReader
from packer.runtime.loader.workers import WorkerLoader, WorkerReader, Workers, as_it_is


class Schedule:
    """This rank's micro-batches from a place to the end of its epoch."""

    def __init__(self, grad_accum: int) -> None:
        self._grad_accum = grad_accum
        self._start = Place(0, 0, 0)
        self._num_steps = 0

    def start(self, place: Place, *, num_steps: int) -> None:
        """Let the next iteration start at ``place``, in an epoch of so many steps."""
        self._start, self._num_steps = place, num_steps

    def __iter__(self) -> Iterator[Place]:
        epoch, first_step, first_accum = self._start
        for step in range(first_step, self._num_steps):
            for accum in range(first_accum, self._grad_accum):
                yield Place(epoch, step, accum)
            first_accum = 0


class Source(Protocol):
    """What reads the scheduled micro-batches, each iteration from where the schedule starts."""

    def __iter__(self) -> Iterator[Read]: ...

    def end(self) -> None:
        """Let go of all that an iteration holds."""


def read_in_order(
    reader: MicroBatchReader,
    schedule: Schedule,
    *,
    num_workers: int,
    pin_memory: bool,
    persistent_workers: bool,
    seed: int,
    **options: Any,
) -> Source:
    """Return what reads the scheduled micro-batches.

    With W workers, torch's loader lets worker w read micro-batches w, w + W, and so on.

    Args:
        reader: Makes one micro-batch; sent to the workers.
        schedule: Which ones, in which order.
        num_workers: Processes; 0 reads here, without the ways that processes need.
        pin_memory: Page-locked host memory.
        persistent_workers: Keep the processes for the next iteration.
        seed: Of the workers' own generators.
        **options: Further ones of ``torch.utils.data.DataLoader``.
    """
    if num_workers == 0:
        return _InProcess(reader, schedule, pin_memory=pin_memory)
    make_loader = functools.partial(
        WorkerLoader,
        WorkerReader(reader),  # type: ignore[arg-type]
        batch_size=None,
        sampler=schedule,
        collate_fn=as_it_is,  # type: ignore[arg-type]
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        # Its own, or every epoch would draw a number from the generator that the model's dropout uses.
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    return Workers(make_loader)


class _InProcess:
    """Reads each micro-batch when it is asked for."""

    def __init__(self, reader: MicroBatchReader, schedule: Schedule, *, pin_memory: bool) -> None:
        self._reader = reader
        self._schedule = schedule
        self._pin_memory = pin_memory

    def __iter__(self) -> Iterator[Read]:
        reads = _OneByOne(self._reader, iter(self._schedule))
        return map(_pinned, reads) if self._pin_memory else reads

    def end(self) -> None:
        """Nothing is held."""


class _OneByOne:
    """Stands at a micro-batch until it was read, so that an interrupt loses none."""

    def __init__(self, reader: MicroBatchReader, places: Iterator[Place]) -> None:
        self._reader = reader
        self._places = places
        self._due: Place | None = None

    def __iter__(self) -> "_OneByOne":
        return self

    def __next__(self) -> Read:
        if self._due is None:
            self._due = next(self._places)
        read = self._reader.read(self._due)
        self._due = None
        return read


def _pinned(read: Read) -> Read:
    if isinstance(read.outcome, PackerError):
        return read
    return Read(read.place, read.outcome.pin_memory())
