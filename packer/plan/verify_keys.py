"""No micro-batch holds two samples of one key, where the plan promises it."""

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.plan.reader import Plan
from packer.plan.verify_samples import place_of


def check_keys(plan: Plan, epoch: int, keys: NDArray[np.integer]) -> None:
    """Check one epoch; copies are checked as well, but not counted.

    Memory: eight bytes for each value of the key.

    Args:
        plan: the plan.
        epoch: which epoch.
        keys: (num_samples,) the metric that ``no_repeat_key`` names; below 0 where a sample has no key.

    Raises:
        InvariantError: a key that comes twice in a micro-batch, or another count of the most frequent one.
    """
    name = plan.config["no_repeat_key"]
    values = np.unique(keys[keys >= 0])
    counts = np.zeros(len(values), np.int64)
    for table in plan.epoch(epoch).microbatches():
        own = keys[table.sample_ids]
        keyed = np.flatnonzero(own >= 0)
        row = np.repeat(np.arange(len(table.step)), np.diff(table.offsets))
        order = keyed[np.lexsort((own[keyed], row[keyed]))]
        repeats = (own[order[1:]] == own[order[:-1]]) & (row[order[1:]] == row[order[:-1]])
        if repeats.any():
            at = int(np.argmax(repeats))
            sample, other = (int(table.sample_ids[order[place]]) for place in (at, at + 1))
            raise InvariantError(
                f"{place_of(epoch, table, sample)}: it has the same {name} as sample {other} beside it"
            )
        planned = keyed[~(table.is_filler | table.is_repeat)[row[keyed]]]
        counts += np.bincount(np.searchsorted(values, own[planned]), minlength=len(values))
    stated, actual = plan.header["epochs"][epoch]["figures"].get("key_max_count"), int(counts.max(initial=0))
    if stated != actual:
        raise InvariantError(f"epoch {epoch}: key_max_count is {stated}, the rows give {actual}")
