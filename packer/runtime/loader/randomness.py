"""Random numbers that a data set draws while it is read: those of the row, whoever reads it, and when."""

import hashlib
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

Result = TypeVar("Result")


class Randomness:
    """The global generators of ``random``, NumPy and torch (on the CPU) while a micro-batch is made.

    They are seeded from the plan's fingerprint, the loader's seed, the epoch and the row. So the numbers
    differ between rows, hence between ranks, and are the same with and without workers, on every
    sequence-parallel rank of a row, after a resume and on another topology.

    A worker's generators are its own, and are seeded for every row. Those of the training process are put
    back after each row. That costs more than reading a short row does, and most data sets draw nothing; so
    here the 1st, 2nd, 4th, 8th … row is watched, and every one from the first on that draws.
    """

    def __init__(self, fingerprint: str, seed: int) -> None:
        self._fingerprint = fingerprint
        self.seed = seed
        """A part of the loader's state."""
        self.is_used = False
        """A row was seen to draw."""
        self._num_rows = 0
        self._next_watched = 1

    def is_due(self, *, in_worker: bool) -> bool:
        """Count a row, and return whether it is to be made with random numbers of its own."""
        self._num_rows += 1
        return in_worker or self.is_used or self._num_rows >= self._next_watched

    def make(self, epoch: int, row: int, make: Callable[[], Result], *, in_worker: bool) -> Result:
        """Make what a row holds, with the row's random numbers."""
        is_watched = not self.is_used and self._num_rows >= self._next_watched
        before = None if in_worker else _states()
        try:
            self._seed(epoch, row)
            if not is_watched:
                return make()
            self._next_watched = 2 * self._num_rows
            seeded = _states()
            made = make()
            self.is_used = not _equal(seeded, _states())
            return made
        finally:
            if before is not None:
                _restore(before)

    def _seed(self, epoch: int, row: int) -> None:
        text = f"{self._fingerprint} {self.seed} {epoch} {row}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        random.seed(key)
        np.random.seed(key & 0xFFFF_FFFF)  # noqa: NPY002 (the one that data sets draw from)
        torch.default_generator.manual_seed(key >> 1)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002


def _equal(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    (_, words, *rest), (_, other_words, *other_rest) = left[1], right[1]
    return (
        left[0] == right[0]
        and rest == other_rest
        and np.array_equal(words, other_words)
        and torch.equal(left[2], right[2])
    )


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.default_generator.set_state(states[2])
