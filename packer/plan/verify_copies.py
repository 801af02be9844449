"""Micro-batches that fill up a last step: masked copies of its cheapest one, or repeats of planned ones."""

import numpy as np

from packer.errors import InvariantError
from packer.plan.reader import Epoch, Plan
from packer.plan.verify_samples import pieces_of, place_of


def check_copies(plan: Plan, epoch: int) -> None:
    """Check the fillers and repeats of one epoch.

    Raises:
        InvariantError: a filler copies no cheapest micro-batch of its step, a repeat nothing that is planned,
            or their number is not that of the header.
    """
    opened = plan.epoch(epoch)
    found = {"is_filler": 0, "is_repeat": 0}
    for table in opened.microbatches():
        found["is_filler"] += int(np.count_nonzero(table.is_filler))
        found["is_repeat"] += int(np.count_nonzero(table.is_repeat))
        for step in np.unique(table.step[table.is_filler]).tolist():
            _check_fillers(opened, epoch, step, plan.dp_size, plan.grad_accum)
    counts = plan.header["epochs"][epoch]
    for name, stated in (("is_filler", counts["num_fillers"]), ("is_repeat", counts["num_repeats"])):
        if found[name] != stated:
            raise InvariantError(
                f"epoch {epoch}: {stated} micro-batches are {name} in plan.json, {found[name]} in the rows"
            )
    if found["is_repeat"]:
        _check_repeats(opened, epoch, plan.num_samples)


def _check_fillers(opened: Epoch, epoch: int, step: int, dp_size: int, grad_accum: int) -> None:
    per_step = dp_size * grad_accum
    rows = [opened.microbatch(row) for row in range(step * per_step, (step + 1) * per_step)]
    trained = [row for row in rows if not row.is_filler]
    cheapest = min((row.cost for row in trained), default=-1)
    originals = {row.sample_ids.tobytes() for row in trained if row.cost == cheapest}
    for at, row in enumerate(rows, start=step * per_step):
        if row.is_filler and row.sample_ids.tobytes() not in originals:
            raise InvariantError(
                f"epoch {epoch}, step {step}, micro-batch {row.accum} of rank {row.dp_rank} (row {at}), "
                f"sample {row.sample_ids[0]}: a filler, but copies no cheapest micro-batch of the step"
            )


def _check_repeats(opened: Epoch, epoch: int, num_samples: int) -> None:
    seen = np.zeros(num_samples, np.bool_)
    for _, pieces in pieces_of(opened):
        seen[pieces.sample_ids] = True
    for table, pieces in pieces_of(opened, copies=True):
        if not seen[pieces.sample_ids].all():
            sample = int(pieces.sample_ids[np.argmin(seen[pieces.sample_ids])])
            raise InvariantError(f"{place_of(epoch, table, sample)}: it is repeated, but planned nowhere")
