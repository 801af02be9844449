"""``blocks.arrow`` of a metrics directory: the rows that a reader fetches and decodes together."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.arrays import to_arrow, to_numpy
from packer.errors import MetricsError
from packer.metrics.manifest import BLOCKS_NAME, FileDigest
from packer.metrics.writer import HashedFile

_SCHEMA = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("first_sample", "num_bytes")])


@dataclass(frozen=True)
class Blocks:
    """The blocks of a data set in its order, B of them: row groups, record batches, stretches of a file.

    Each lies in one file, begins where the one before ends, and holds a sample at least.

    Raises:
        MetricsError: they do not.
    """

    firsts: NDArray[np.int64]
    """(B,) the sample at which each begins."""
    num_bytes: NDArray[np.int64]
    """(B,) what each takes in memory, decoded."""
    num_samples: int
    """Of all blocks."""

    def __post_init__(self) -> None:
        """Check that the blocks tile the samples."""
        edges = self.edges
        if len(self.firsts) != len(self.num_bytes) or edges[0] != 0 or (np.diff(edges) <= 0).any():
            raise MetricsError(
                f"the blocks do not tile samples 0 to {self.num_samples - 1}; analyze the data set again"
            )

    def __len__(self) -> int:
        return len(self.firsts)

    @cached_property
    def edges(self) -> NDArray[np.int64]:
        """(B + 1,) the sample at which each begins, and the number of samples."""
        return np.append(self.firsts, self.num_samples).astype(np.int64)

    def of(self, samples: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the block of each sample, by number."""
        return np.searchsorted(self.firsts, samples, side="right") - 1


def write_blocks(folder: Path, blocks: Blocks) -> dict[str, FileDigest]:
    """Write ``blocks.arrow``; return its digest by name."""
    columns = [to_arrow(blocks.firsts), to_arrow(blocks.num_bytes)]
    batch = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_batch(batch)
    with HashedFile(folder / BLOCKS_NAME) as file:
        file.write(sink.getvalue().to_pybytes())
    return {BLOCKS_NAME: file.digest}


def read_blocks(folder: Path, digest: FileDigest, num_samples: int) -> Blocks:
    """Read ``blocks.arrow``.

    Raises:
        MetricsError: missing, or not the file that was written.
    """
    path = folder / BLOCKS_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MetricsError(f"cannot read {path}: {error.strerror}; analyze the data set again") from error
    if hashlib.sha256(content).hexdigest() != digest.sha256:
        raise MetricsError(f"{path} is not the file that was written; analyze again")
    batch = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
    firsts, num_bytes = map(to_numpy, batch.columns)
    return Blocks(firsts, num_bytes, num_samples)
