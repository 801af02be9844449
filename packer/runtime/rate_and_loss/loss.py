"""Loss arithmetic: what a step's summed loss is divided by, and what it is multiplied by."""

import torch
import torch.distributed as dist

from packer.runtime.loader.step import Step


def count_loss_tokens(step: Step, group: dist.ProcessGroup | None = None) -> int:
    """Count the labels of a whole step that are not −100, on all ranks: one all-reduce of one integer.

    The step's micro-batches are read first, and kept for the loop over the step; those that it has handed out
    already count, too. Where the plan knows the number, ``step.num_loss_tokens`` says it for nothing.

    Args:
        step: A step of the iteration that goes on.
        group: The ranks that share the step, sequence-parallel ones included; default: all of them. Without
            ``torch.distributed`` this process is alone.

    Raises:
        PlanError: The step was left before its end, belongs to an iteration that is over, or was resumed
            within.
    """
    num_loss_tokens = step.count_loss_tokens()
    if not (dist.is_available() and dist.is_initialized()):
        return num_loss_tokens
    on_gpu = "nccl" in dist.get_backend(group)
    total = torch.tensor(num_loss_tokens, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(total, group=group)
    return int(total)
