"""Worker processes: one owner starts them, asks whether they live, tells what became of them, ends them."""

import multiprocessing.connection
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from packer.errors import ConfigError, PackerError, SourceError, WorkerLostError
from packer.runtime.loader.parcel import Parcel
from packer.runtime.loader.progress import Place, Read
from packer.runtime.loader.reader import MicroBatchReader

STATUS_CHECK_SECONDS = 1.0
"""How long to wait for a micro-batch before asking whether the workers live."""

DEATH_SECONDS = 2.0
"""How long a process takes, at most, from closing its files to being told dead."""


class Workers:
    """Processes that read ahead for one loader.

    A worker may be killed from outside at any moment. Then what breaks depends on what it was doing: a queue
    stays silent, a file that it was handing over is gone, a lock is never given back. All of these come out
    as one ``WorkerLostError``; the other workers are ended, and the next iteration starts new ones.
    """

    def __init__(self, make_loader: Callable[[], "WorkerLoader"]) -> None:
        self._make_loader = make_loader
        self._loader = make_loader()
        self._iteration: weakref.ref[_Iteration] | None = None
        """Not held, so that workers end with the loop that they read for."""
        self._owner: int | None = None
        self._fields: tuple[Any, ...] | None = None
        self._has_fields = False

    def __iter__(self) -> Iterator[Read]:
        self.require_owner()
        if self._has_lost_one():
            self.end()
        try:
            iteration: Any = iter(self._loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"what a worker needs cannot be sent to it: {error}; define the data set's class and the "
                "functions given to PlanLoader in a module, not within a function"
            ) from error
        except (RuntimeError, OSError, EOFError) as error:
            told = self.lost(error)
            if told is error:
                raise
            raise told from error
        self._iteration = weakref.ref(iteration)
        self._owner = os.getpid()
        return _Received(self, iteration)

    def held_alike(self, read: Read) -> Read:
        """Return what a worker read, or an error in its place, where another one settled other fields.

        Each worker settles them by the first micro-batch that it reads; the run has one set of them.
        """
        if isinstance(read.outcome, PackerError) or (self._has_fields and read.fields == self._fields):
            return read
        if not self._has_fields:
            self._fields, self._has_fields = read.fields, True
            return read
        return Read(
            read.place,
            SourceError(
                f"micro-batch {read.place.accum} of step {read.place.step} has the fields {read.fields}, and "
                f"another worker found {self._fields}; the data set must return the same fields, of one type "
                "and trailing shape, for every sample: name those with one value a token in token_fields"
            ),
        )

    def lost(self, error: Exception) -> Exception:
        """End all workers if one of them is dead, and return what to raise: the error itself, if none is."""
        dead = self._wait_for_dead()
        is_timeout = isinstance(error, RuntimeError) and "timed out" in str(error)
        if not (dead or is_timeout or _names_a_dead_worker(error)):
            return error
        self.end()
        if is_timeout:
            return WorkerLostError(
                f"no worker had the next micro-batch ready in time ({error}); raise timeout=, or read with "
                "num_workers=0 to see what takes so long"
            )
        how = ", ".join(dead) or str(error)
        return WorkerLostError(
            f"a worker of the loader exited unexpectedly ({how}); the likely causes are too little memory, "
            "for which fewer workers or a smaller prefetch_factor are the cure, and a data set that ends its "
            "process: read with num_workers=0 to see where"
        )

    def end(self) -> None:
        """End the workers; the next iteration starts others."""
        iteration = self._current()
        self._iteration = None
        self._loader = self._make_loader()
        if iteration is not None and self._owner == os.getpid():
            iteration.end()

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

    def _current(self) -> "_Iteration | None":
        return None if self._iteration is None else self._iteration()

    def _has_lost_one(self) -> bool:
        iteration = self._current()
        return iteration is not None and not all(worker.is_alive() for worker in iteration.workers)

    def _wait_for_dead(self) -> list[str]:
        """Say how the dead workers ended; wait a moment for the first, whose files are closed before."""
        iteration = self._current()
        if iteration is None:
            return []
        ended = multiprocessing.connection.wait(
            [worker.sentinel for worker in iteration.workers], DEATH_SECONDS
        )
        for worker in iteration.workers:
            if worker.sentinel in ended:  # which it says before it can be waited for
                worker.join(DEATH_SECONDS)
        return [
            f"pid {worker.pid}, exit code {worker.exitcode}"
            for worker in iteration.workers
            if not worker.is_alive()
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return Workers, (self._make_loader,)


class WorkerLoader(DataLoader[Any]):
    """Torch's loader, with iterations whose dead workers are told by asking."""

    def _get_iterator(self) -> _BaseDataLoaderIter:
        self.check_worker_number_rationality()
        return _Iteration(self)


class _Iteration(_MultiProcessingDataLoaderIter):
    """Torch's iteration over workers, taken from its handler of SIGCHLD.

    The handler raises a RuntimeError wherever the training process happens to be, in the midst of an update,
    say. Here nobody hears of a dead worker but who asks for a micro-batch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        _remove_worker_pids(id(self))
        self._worker_pids_set = False
        self._workers_done_event: Any = _Done(self._workers_done_event)

    @property
    def workers(self) -> list[Any]:
        return list(self._workers)

    def end(self) -> None:
        """End the workers, peacefully if all of them live."""
        self._shutdown_workers()

    def _try_get_data(self, timeout: float = STATUS_CHECK_SECONDS) -> Any:
        return super()._try_get_data(timeout)  # type: ignore[no-untyped-call]

    def _shutdown_workers(self) -> None:
        if not self._shutdown and not all(worker.is_alive() for worker in self._workers):
            for worker in self._workers:  # who may wait for ever for what the dead one held
                worker.kill()
            self._workers_done_event = threading.Event()  # nobody is left to whom it could tell anything
        super()._shutdown_workers()


class _Done:
    """What tells the workers to end, for the one process that says so.

    The event has a lock in shared memory that a worker takes to look at it, and dies with if killed then.
    So nobody here waits for that lock: what this process said it knows by itself, and to say it takes an own
    thread, which is not waited for for long. Workers that did not hear of it are terminated by torch.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        teller = threading.Thread(target=self._event.set, daemon=True)
        teller.start()
        teller.join(DEATH_SECONDS)


class _Received:
    """The micro-batches of one iteration. No generator: it would hold on to the last one between two."""

    def __init__(self, workers: Workers, parcels: Iterator[Parcel]) -> None:
        self._workers = workers
        self._parcels = parcels

    def __iter__(self) -> "_Received":
        return self

    def __next__(self) -> Read:
        self._workers.require_owner()
        try:
            return self._workers.held_alike(next(self._parcels).unpack())
        except StopIteration:
            raise
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            told = self._workers.lost(error)
            if told is error:
                raise
            self._parcels = iter(())
            raise told from error


def _names_a_dead_worker(error: Exception) -> bool:
    """Whether torch says so itself: a worker that it found dead is not asked about again."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


class WorkerReader:
    """What a worker reads: the micro-batch of a place, ready for its way."""

    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader = reader

    def __getitem__(self, place: Place) -> Parcel:
        return Parcel.of(self._reader.read(place, in_worker=True))


def as_it_is(parcel: Parcel) -> Parcel:
    """Collate nothing; a function of the module, since workers are sent its name."""
    return parcel
