"""Who reads micro-batches, and in which order: worker processes ahead of time, or this process when asked."""

import functools
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from packer.errors import ConfigError, PackerError, WorkerLostError
from packer.runtime.batches.batch import Batch
from packer.runtime.loader.parcel import Parcel
from packer.runtime.loader.progress import Place
from packer.runtime.loader.reader import MicroBatchReader

ReadBatch = Batch | PackerError
"""A batch, or, in its place, what kept it from being made."""


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


def read_in_order(
    reader: MicroBatchReader,
    schedule: Schedule,
    *,
    num_workers: int,
    pin_memory: bool,
    persistent_workers: bool,
    seed: int,
    **options: Any,
) -> Iterable[ReadBatch]:
    """Return what reads the scheduled micro-batches, each iteration from where the schedule starts.

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
        DataLoader,
        reader,  # type: ignore[arg-type]
        batch_size=None,
        sampler=schedule,
        collate_fn=_wrapped,  # type: ignore[arg-type]
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        # Its own, or every epoch would draw a number from the generator that the model's dropout uses.
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    return _InWorkers(make_loader)


class _InProcess:
    """Reads each micro-batch when it is asked for."""

    def __init__(self, reader: MicroBatchReader, schedule: Schedule, *, pin_memory: bool) -> None:
        self._reader = reader
        self._schedule = schedule
        self._pin_memory = pin_memory

    def __iter__(self) -> Iterator[ReadBatch]:
        batches = map(self._reader.__getitem__, self._schedule)
        return map(_pinned, batches) if self._pin_memory else batches


def _pinned(batch: ReadBatch) -> ReadBatch:
    return batch if isinstance(batch, PackerError) else batch.pin_memory()


class _InWorkers:
    """Takes what worker processes made."""

    def __init__(self, make_loader: Callable[[], "DataLoader[Parcel | PackerError]"]) -> None:
        self._make_loader = make_loader
        self._loader = make_loader()
        self._owner: int | None = None

    def __iter__(self) -> Iterator[ReadBatch]:
        self.require_owner()
        try:
            parcels = iter(self._loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"what a worker needs cannot be sent to it: {error}; define the data set's class and the "
                "functions given to PlanLoader in a module, not within a function"
            ) from error
        self._owner = os.getpid()
        return _Received(self, parcels)

    def lost(self) -> None:
        """Let the next iteration start other workers."""
        self._loader = self._make_loader()

    def require_owner(self) -> None:
        """Refuse a process that was forked from the one whose workers these are.

        Raises:
            ConfigError: It is another one.
        """
        if self._owner not in (None, os.getpid()):
            raise ConfigError(
                f"this loader's workers belong to process {self._owner}, from which this one was forked; "
                "make a PlanLoader in each process, or fork before the first iteration"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _InWorkers, (self._make_loader,)


class _Received:
    """The batches of one iteration. No generator: between two batches it would hold on to the one before."""

    def __init__(self, source: _InWorkers, parcels: Iterator[Parcel | PackerError]) -> None:
        self._source = source
        self._parcels = parcels

    def __iter__(self) -> "_Received":
        return self

    def __next__(self) -> ReadBatch:
        self._source.require_owner()
        try:
            parcel = next(self._parcels)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            self._source.lost()
            raise WorkerLostError(
                f"{error}; the likely causes are too little memory, for which fewer workers or a smaller "
                "prefetch_factor are the cure, and a data set that ends its process: read with "
                "num_workers=0 to see where"
            ) from error
        return parcel if isinstance(parcel, PackerError) else parcel.unpack()


def _wrapped(batch: ReadBatch) -> Parcel | PackerError:
    """Make a batch ready for its way; a function of the module, since workers are sent its name."""
    if not isinstance(batch, PackerError):
        return Parcel.of(batch)
    if batch.__cause__ is not None:  # which does not travel with the error
        batch.add_note("".join(traceback.format_exception(batch.__cause__)))
    return batch
