"""What the order of a plan costs a process that reads it out of blocks, told from the metrics alone."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from packer.metrics import Metrics
from packer.plan.reader import Plan
from packer.rereading import CACHE_BYTES, BlockSizes, Rereading, play

_READ_IN_BLOCKS = "parquet"


def rereading_of(plan: Plan, metrics: Metrics, *, cache_bytes: int = CACHE_BYTES) -> Rereading | None:
    """Return what one process of each rank would read; see `packer.rereading.play`.

    Of the formats, Parquet alone is taken to be read in blocks: the manifest does not say which Arrow files
    are compressed.

    Args:
        plan: made of these metrics.
        metrics: with or without blocks.
        cache_bytes: what the process keeps.

    Returns:
        None where the metrics hold no blocks, or nothing would be given up by the cache.
    """
    blocks, manifest = metrics.blocks, metrics.manifest
    if blocks is None or manifest is None or any(file["num_rows"] is None for file in manifest.sources):
        return None
    starts = np.cumsum([0] + [file["num_rows"] for file in manifest.sources])[:-1]
    is_whole = np.array([file["format"] == _READ_IN_BLOCKS for file in manifest.sources])
    owners = np.searchsorted(starts, blocks.firsts, side="right") - 1
    num_bytes = np.where(is_whole[owners], blocks.num_bytes, 0)
    sizes = BlockSizes(blocks.firsts, np.diff(blocks.edges), num_bytes)
    return play(samples_of_a_process(plan, 0, plan.dp_size), sizes, cache_bytes)


def samples_of_a_process(
    plan: Plan, dp_rank: int, dp_size: int, num_processes: int = 1
) -> Iterator[NDArray[np.integer]]:
    """Yield the sample ids that a rank's first process reads in the first epoch, a micro-batch at a time.

    Args:
        plan: for any dp_size × grad_accum of the same product.
        dp_rank: of the run.
        dp_size: of the run.
        num_processes: that read for the rank in turn.
    """
    epoch = plan.epoch(0)
    grad_accum = plan.dp_size * plan.grad_accum // dp_size
    for number in range(0, epoch.num_steps * grad_accum, num_processes):
        yield epoch.microbatch(number * dp_size + dp_rank).sample_ids
