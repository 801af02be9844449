"""What a plan states of its order by blocks: how many are open at a time, and the mix along the epoch."""

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.metrics import Blocks
from packer.plan.design_effect import design_effects_by_stretch
from packer.plan.reader import Epoch, Plan
from packer.plan.verify_figures import compare


def check_blocks(plan: Plan, epoch: int, blocks: Blocks | None) -> None:
    """Hold one epoch against the blocks that its samples lie in.

    Args:
        plan: the plan; one without ``shuffle_blocks`` promises nothing.
        epoch: which epoch.
        blocks: of the metrics.

    Raises:
        InvariantError: a figure is not the one that the rows and the blocks give.
    """
    at_a_time = plan.config.get("shuffle_blocks")
    if at_a_time is None:
        return
    stated = plan.header["epochs"][epoch]["figures"].get("blocks")
    if stated is None:
        raise InvariantError(f"epoch {epoch}: --shuffle-blocks {at_a_time} without figures of its blocks")
    if blocks is None or len(blocks) != stated["num_blocks"]:
        found = "no" if blocks is None else len(blocks)
        raise InvariantError(
            f"epoch {epoch}: planned over {stated['num_blocks']} blocks, the metrics list {found}; give "
            "those that the plan was made from"
        )
    opened = plan.epoch(epoch)
    first, last = _lifetimes(opened, blocks)
    open_blocks, open_bytes = _most_open(first, last, blocks.num_bytes)
    for name, actual in (("open_blocks", open_blocks), ("open_bytes", open_bytes)):
        if stated[name] != actual:
            raise InvariantError(f"epoch {epoch}: {name} is {stated[name]}, the rows give {actual}")
    first_steps = np.unique(np.sort(first[last >= 0])[::at_a_time])
    effects = design_effects_by_stretch(opened, plan.dp_size * plan.grad_accum, first_steps)
    for name, effect in zip(("design_effect_of_steps", "design_effect_of_stretches"), effects, strict=True):
        compare(epoch, name, stated[name], effect)


def _lifetimes(epoch: Epoch, blocks: Blocks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (B,) first, and the (B,) last, step that reads of each block; −1 as the last of none."""
    first = np.full(len(blocks), epoch.num_steps)
    last = np.full(len(blocks), -1)
    for table in epoch.microbatches():
        of_piece = blocks.of(table.sample_ids)
        step = np.repeat(table.step, np.diff(table.offsets))
        np.minimum.at(first, of_piece, step)
        np.maximum.at(last, of_piece, step)
    return first, last


def _most_open(
    first: NDArray[np.int64], last: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[int, int]:
    """Return the most blocks, and the most bytes of them, that are open at a step."""
    read = np.flatnonzero(last >= 0)
    opens = read[np.argsort(first[read], kind="stable")]
    closes = read[np.argsort(last[read], kind="stable")]
    most_blocks = most_bytes = num_bytes = closed = 0
    for number, block in enumerate(opens):
        while last[closes[closed]] < first[block]:
            num_bytes -= int(sizes[closes[closed]])
            closed += 1
        num_bytes += int(sizes[block])
        most_blocks, most_bytes = max(most_blocks, number + 1 - closed), max(most_bytes, num_bytes)
    return most_blocks, most_bytes
