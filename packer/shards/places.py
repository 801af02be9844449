"""Where each sample goes: the plan turned round, on disk, in the order of the data set.

A plan says for each place which sample stands there. The shuffle passes over the data set and asks the
other way: at which places does this sample stand? Fillers, repeats, epochs and pieces make several.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.plan import Plan
from packer.plan.rows import MicroBatches

_RUN_PLACES = 1 << 21
"""Places sorted at once, in memory."""
_WINDOW = 1 << 18
"""Places that are looked up at once, about."""
_COLUMNS = (("sample_id", np.int64), ("place", np.int64), ("start", np.int32), ("seqlen", np.int32))
BYTES_PER_PLACE = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)


class Places(NamedTuple):
    """Places of some samples, by sample id, those of one sample in the order of the plan."""

    sample_id: NDArray[np.int64]
    """(n,)"""
    place: NDArray[np.int64]
    """(n,) samples and pieces of the plan before this one, over the epochs written."""
    start: NDArray[np.int32]
    """(n,) first token of the piece."""
    seqlen: NDArray[np.int32]
    """(n,) tokens of the piece."""

    def between(self, first_id: int, last_id: int) -> "Places":
        """Return the places of samples ``[first_id, last_id)``."""
        low, high = np.searchsorted(self.sample_id, [first_id, last_id]).tolist()
        return self.at(slice(low, high))

    def at(self, chosen: NDArray[np.integer] | slice) -> "Places":
        """Return some of them, in the order given."""
        return Places(self.sample_id[chosen], self.place[chosen], self.start[chosen], self.seqlen[chosen])

    @classmethod
    def joined(cls, parts: "Sequence[Places]") -> "Places":
        """Return the places of all parts, one after the other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else _NOTHING


def rows_of(plan: Plan, epochs: Sequence[int]) -> Iterator[MicroBatches]:
    """Yield the rows of the epochs that are written, some thousand at a time."""
    for epoch in epochs:
        yield from plan.epoch(epoch).microbatches()


def write_places(plan: Plan, epochs: Sequence[int], folder: Path) -> None:
    """Write the places of all samples as sorted runs into ``folder``, which is made anew."""
    for old in folder.glob("*"):
        old.unlink()
    folder.mkdir(exist_ok=True)
    held: list[Places] = []
    num_held = place = num_runs = 0
    for table in rows_of(plan, epochs):
        ids = table.sample_ids
        for first in range(0, len(ids), _RUN_PLACES):
            part = slice(first, min(first + _RUN_PLACES, len(ids)))
            count = part.stop - part.start
            starts = np.zeros(count, np.int32) if table.starts is None else table.starts[part]
            places = np.arange(place, place + count)
            held.append(Places(ids[part].astype(np.int64), places, starts, table.seqlens[part]))
            num_held, place = num_held + count, place + count
            if num_held >= _RUN_PLACES:
                _write_run(folder / f"run-{num_runs:05d}.bin", held)
                held, num_held, num_runs = [], 0, num_runs + 1
    if held:
        _write_run(folder / f"run-{num_runs:05d}.bin", held)


def _write_run(path: Path, parts: Sequence[Places]) -> None:
    joined = _sorted(parts)
    with open(path, "wb") as file:
        for column, (_, dtype) in zip(joined, _COLUMNS, strict=True):
            file.write(np.ascontiguousarray(column, dtype).data)


def _sorted(parts: Sequence[Places]) -> Places:
    joined = Places.joined(parts)
    return joined.at(np.argsort(joined.sample_id, kind="stable"))


class PlaceFinder:
    """Looks places up in the runs; what it holds is small, and nothing stays mapped."""

    def __init__(self, folder: Path, *, num_epochs: int) -> None:
        """Take what ``write_places`` wrote of so many epochs."""
        self._runs = sorted(folder.glob("run-*.bin"))
        self._window_ids = max(_WINDOW // num_epochs, 1)
        self._window = _NOTHING
        self._covers = (0, 0)

    def between(self, first_id: int, last_id: int) -> Places:
        """Return the places of samples ``[first_id, last_id)``."""
        begin, end = self._covers
        if not begin <= first_id <= last_id <= end:
            self._covers = (first_id, max(last_id, first_id + self._window_ids))
            self._window = self._read(*self._covers)
        return self._window.between(first_id, last_id)

    def _read(self, first_id: int, last_id: int) -> Places:
        found = []
        for path in self._runs:
            length = os.path.getsize(path) // BYTES_PER_PLACE
            columns = []
            offset = 0
            low = high = 0
            for name, dtype in _COLUMNS:
                column = np.memmap(path, dtype, "r", offset, (length,))
                if name == "sample_id":
                    low, high = np.searchsorted(column, [first_id, last_id]).tolist()
                    if low == high:
                        break
                columns.append(np.array(column[low:high]))
                offset += length * np.dtype(dtype).itemsize
            if columns:
                found.append(Places(*columns))
        return _sorted(found)


_NOTHING = Places(*(np.zeros(0, dtype) for _, dtype in _COLUMNS))  # type: ignore[arg-type]
