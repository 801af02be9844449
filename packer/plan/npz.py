"""A plan as NumPy archives, written piece by piece: no array is ever whole in memory."""

import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import numpy_dtype
from packer.plan import schema
from packer.plan.reader import Plan

_OLDEST_DATE = (1980, 1, 1, 0, 0, 0)
"""Of an archive's members: the same plan gives the same bytes."""


def write_npz(plan: Plan, folder: Path) -> Iterator[float]:
    """Write ``epoch-NNNNN.npz`` for every epoch, and ``dropped.npz``; see ``export_plan``.

    Yields:
        The share that is written.
    """
    for epoch in range(plan.num_epochs):
        name = schema.microbatches_file(epoch)
        num_arrays = 1 + len(plan.columns(name))
        with zipfile.ZipFile(folder / f"epoch-{epoch:05d}.npz", "w") as archive:
            for number, _ in enumerate(_write_microbatches(archive, plan, name)):
                yield (epoch + (number + 1) / num_arrays) / plan.num_epochs
            steps = schema.steps_file(epoch)
            yield from (
                (epoch + 1) / plan.num_epochs
                for _ in _write_columns(archive, plan, steps, prefix="step_", leave_out=("step",))
            )
    with zipfile.ZipFile(folder / "dropped.npz", "w") as archive:
        yield from (1.0 for _ in _write_columns(archive, plan, schema.DROPPED_FILE, leave_out=("reason",)))
        reasons = np.array(schema.reason_dictionary().to_pylist())
        names = (reasons[part.reason] for part in plan.dropped())
        _write_array(archive, "reason", reasons.dtype, _num_rows(plan, schema.DROPPED_FILE), names)


def _write_microbatches(archive: zipfile.ZipFile, plan: Plan, name: str) -> Iterator[None]:
    """Write every column, and yield after each."""
    lists = [field for field in plan.columns(name) if pa.types.is_list(field.type)]
    num_rows = _num_rows(plan, name)
    _write_array(archive, "offsets", np.dtype(np.int64), num_rows + 1, _offsets(plan, name))
    yield
    num_pieces = sum(len(batch["seqlens"]) for batch in plan.batches(name))
    for field in lists:
        dtype = numpy_dtype(field.type.value_type)
        pieces = (batch[field.name] for batch in plan.batches(name))
        _write_array(archive, field.name, dtype, num_pieces, pieces)
        yield
    yield from _write_columns(archive, plan, name, leave_out=[field.name for field in lists])


def _write_columns(
    archive: zipfile.ZipFile, plan: Plan, name: str, *, prefix: str = "", leave_out: Iterable[str] = ()
) -> Iterator[None]:
    """Write every flat column of a table that has values, and yield after each."""
    num_rows = _num_rows(plan, name)
    for field in plan.columns(name):
        if field.name in leave_out or any(field.name not in batch for batch in plan.batches(name)):
            continue
        dtype = numpy_dtype(field.type)
        pieces = (batch[field.name] for batch in plan.batches(name))
        _write_array(archive, prefix + field.name, dtype, num_rows, pieces)
        yield


def _offsets(plan: Plan, name: str) -> Iterator[NDArray[np.int64]]:
    """Yield the offsets of the lists over the whole table."""
    yield np.zeros(1, np.int64)
    before = 0
    for batch in plan.batches(name):
        offsets = batch["offsets"].astype(np.int64)
        yield before + offsets[1:]
        before += int(offsets[-1])


def _num_rows(plan: Plan, name: str) -> int:
    return int(plan.header["files"][name]["num_rows"])


def _write_array(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], size: int, pieces: Iterable[NDArray[Any]]
) -> None:
    """Write one member in NumPy's format."""
    little = dtype.newbyteorder("<")
    member = zipfile.ZipInfo(f"{name}.npy", _OLDEST_DATE)
    with archive.open(member, "w", force_zip64=True) as stream:
        header = {"descr": little.str, "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(stream, header)
        for piece in pieces:
            stream.write(np.ascontiguousarray(piece, little).tobytes())
