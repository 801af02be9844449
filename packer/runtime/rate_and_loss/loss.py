"""Loss arithmetic: what a step's summed loss is divided by, and what it is multiplied by."""

import torch
import torch.distributed as dist

from packer.errors import PlanError
from packer.runtime.loader.step import Step


def count_loss_tokens(step: Step, group: dist.ProcessGroup | None = None) -> int:
    """Count the labels of a whole step that are not −100, on all ranks: one all-reduce of two integers.

    The step's micro-batches are read first, and kept for the loop over the step; those that it has handed out
    already count, too. Where the plan knows the number, ``step.num_loss_tokens`` says it for nothing.

    Ranks that have the same tokens, as the first and the last pipeline stage or those of a tensor-parallel
    group do, count once: the second integer is the number of ranks that counted, which a step is dealt to
    ``dp_size · sp_size`` of.

    Args:
        step: A step of the iteration that goes on.
        group: The ranks that share the step, sequence-parallel ones included; default: all of them. Without
            ``torch.distributed`` this process is alone.

    Raises:
        PlanError: The step was left before its end, belongs to an iteration that is over, or was resumed
            within; or the group has a part of the step more often than another, or not at all.
    """
    num_loss_tokens = step.count_loss_tokens()
    if not (dist.is_available() and dist.is_initialized()):
        return num_loss_tokens
    on_gpu = "nccl" in dist.get_backend(group)
    # (2,): loss tokens, ranks that counted them
    counts = torch.tensor(
        [num_loss_tokens, int(step.share.reads_samples)],
        dtype=torch.int64,
        device="cuda" if on_gpu else "cpu",
    )
    dist.all_reduce(counts, group=group)
    total, num_counted = counts.tolist()
    num_copies, rest = divmod(num_counted, step.share.num_parts)
    if rest or not num_copies or total % num_copies:
        raise PlanError(
            f"{num_counted} ranks of the group read samples, and a step is dealt to "
            f"{step.share.num_parts} (dp_size · sp_size); give a group with every one of these equally often"
        )
    return int(total // num_copies)
