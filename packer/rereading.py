"""Bytes read for each byte needed: what an order of samples costs where a row is read with a block around it.

A row group is fetched and decoded whole, for one row of it, too. Kept in a cache, it serves the rows that are
wanted next; where the cache is full before they are, it is read again. How often is not estimated here but
played: the first micro-batches of a plan against a cache of the size that the loader has.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CACHE_BYTES = 256 << 20
"""What a process keeps of decoded blocks, unless it was told otherwise."""

TOLERATED_FACTOR = 4.0
"""Bytes read for a byte needed before anybody is told."""

PLAYED_MICROBATCHES = 512
"""Enough for a cache to fill, and few enough that nobody waits for it."""

_CURES = (
    "`packer materialize PLAN SOURCE --out SHARDS` writes the samples as the plan reads them (each byte is "
    "read once then; as much disk as the data), `packer plan --shuffle-blocks K` shuffles the samples of K "
    "blocks at a time (no disk; steps are less of a mix along the epoch), and open_dataset(cache_bytes=…) "
    "keeps more (in the memory of every worker)"
)


class BlockSizes(NamedTuple):
    """The blocks that rows are read with, over all files of a source."""

    firsts: NDArray[np.int64]
    """(B,) the row at which each begins, ascending from 0."""
    num_rows: NDArray[np.int64]
    """(B,) rows of each."""
    num_bytes: NDArray[np.int64]
    """(B,) what each takes in memory, decoded; 0: its rows are read without the others."""


class Rereading(NamedTuple):
    """What a plan costs a process that reads it."""

    factor: float
    """Bytes read for each byte needed."""
    cache_bytes: int
    """What the process keeps."""
    num_bytes: int
    """Of all blocks."""

    @property
    def is_dear(self) -> bool:
        """Whether somebody should be told."""
        return self.factor > TOLERATED_FACTOR

    def told(self) -> str:
        """Return what it costs, and the cures with their prices."""
        return (
            f"the data set is read in blocks, and about {self.factor:,.0f} bytes are decoded for each byte "
            f"that the plan needs: its blocks are {_size(self.num_bytes)} together, the cache of a process "
            f"holds {_size(self.cache_bytes)}. {_CURES}"
        )


def play(
    microbatches: Iterable[NDArray[np.integer]], blocks: BlockSizes, cache_bytes: int
) -> Rereading | None:
    """Play the reads of one process, in its order, against a cache from which the least recently used go.

    A block counts once it is given up, with the rows that it served until then: what is still kept may serve
    others. So nothing is told of data that the cache holds, nor of an order that goes through the blocks.

    Args:
        microbatches: the rows of each, of the whole source; taken until `PLAYED_MICROBATCHES` are played.
        blocks: of the source.
        cache_bytes: what may be kept; the newest block stays, however large.

    Returns:
        None where no block was given up.
    """
    total = int(blocks.num_bytes.sum())
    if total <= cache_bytes:
        return None
    row_bytes = blocks.num_bytes / np.maximum(blocks.num_rows, 1)
    held: OrderedDict[int, float] = OrderedDict()  # block -> bytes that it has served
    num_held = num_read = 0
    num_needed = 0.0
    for _, rows in zip(range(PLAYED_MICROBATCHES), microbatches, strict=False):
        owners = np.searchsorted(blocks.firsts, rows, side="right") - 1
        for block, count in zip(
            *(found.tolist() for found in np.unique(owners, return_counts=True)), strict=True
        ):
            size = int(blocks.num_bytes[block])
            if size == 0:
                continue
            if block not in held:
                held[block] = 0.0
                num_held += size
            held[block] += count * float(row_bytes[block])
            held.move_to_end(block)
            while num_held > cache_bytes and len(held) > 1:
                oldest, served = held.popitem(last=False)
                num_held -= int(blocks.num_bytes[oldest])
                num_read += int(blocks.num_bytes[oldest])
                num_needed += served
    return Rereading(num_read / num_needed, cache_bytes, total) if num_needed else None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
