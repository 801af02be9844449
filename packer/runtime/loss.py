"""Loss arithmetic: what a step's summed loss is divided by, and what it is multiplied by."""

import torch
import torch.distributed as dist

from packer.runtime.step import Step


def count_loss_tokens(step: Step, group: dist.ProcessGroup | None = None) -> int:
    """Count the labels of a whole step that are not −100, on all ranks: one all-reduce of one integer.

    The step's micro-batches are read first, and kept for the loop over the step. Where the plan knows the
    number, ``step.num_loss_tokens`` says it for nothing.

    Args:
        step: A step that has not been played.
        group: The ranks that share the step, sequence-parallel ones included; default: all of them. Without
            ``torch.distributed`` this process is alone.
    """
    num_loss_tokens = sum(batch.num_loss_tokens for batch in step.buffered())
    if not (dist.is_available() and dist.is_initialized()):
        return int(num_loss_tokens)
    on_gpu = "nccl" in dist.get_backend(group)
    total = torch.tensor(num_loss_tokens, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(total, group=group)
    return int(total)
