"""Compare the planned lengths of some samples with lengths measured again."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.plan.reader import Plan
from packer.plan.sources import PlanSource, with_rows


def check_lengths(plan: Plan, sample_ids: NDArray[np.integer], seqlens: NDArray[np.integer]) -> None:
    """Check, in every epoch, that samples are planned and dropped with the lengths that they have.

    Args:
        plan: the plan.
        sample_ids: (K,) some samples, without repeats.
        seqlens: (K,) their lengths.

    Raises:
        InvariantError: a length differs, or a piece ends beyond its sample.
    """
    # (num_samples,) position among the samples asked for, −1 elsewhere
    asked = np.full(plan.num_samples, -1, np.int32)
    asked[sample_ids] = np.arange(len(sample_ids))
    for part in plan.dropped():
        at = asked[part.sample_id]
        wrong = (at >= 0) & (seqlens[at] != part.seqlen)
        _refuse(wrong, "dropped", part.sample_id, part.seqlen, seqlens[at], plan.sources)
    for epoch in range(plan.num_epochs):
        for table in plan.epoch(epoch).microbatches():
            at = asked[table.sample_ids]
            actual = seqlens[at]
            if table.starts is None:
                wrong = actual != table.seqlens
            else:
                wrong = actual < table.starts.astype(np.int64) + table.seqlens
            wrong &= at >= 0
            _refuse(wrong, f"epoch {epoch}", table.sample_ids, table.seqlens, actual, plan.sources)


def _refuse(
    wrong: NDArray[np.bool_],
    where: str,
    sample_ids: NDArray[np.integer],
    stated: NDArray[np.integer],
    actual: NDArray[np.integer],
    sources: Sequence[PlanSource],
) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        told = (
            f"{where}, sample {sample_ids[at]}: the plan says {stated[at]} tokens, the source has "
            f"{actual[at]}; analyze and plan again"
        )
        raise InvariantError(with_rows(told, sources))
