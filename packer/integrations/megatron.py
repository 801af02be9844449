"""What Megatron's ``get_batch`` asks its ``data_iterator`` for, from a plan. Megatron itself is not needed.

    loader = PlanLoader(
        plan,
        dataset,
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        tp_size=mpu.get_tensor_and_context_parallel_world_size(),  # who have the same rows
    )
    data_iterator = MegatronIterator(loader)

Rows are whole: Megatron cuts them for context parallelism itself, padded ones in
``get_batch_on_this_cp_rank``, packed ones in ``get_thd_batch_on_this_cp_rank``. They divide if the plan was
made with ``--pad-multiple`` 2·cp (padded), or ``--pad-segments-to`` 2·cp (packed). Set ``--micro-batch-size
1`` and ``--global-batch-size`` to the plan's dp_size · grad_accum: Megatron counts micro-batches. Its
pipeline stages exchange tensors of one shape unless ``--variable-seq-lengths`` is on; plan with
``--fixed-seqlen`` without it. The loss is right with ``--calculate-per-token-loss`` only. The rate follows
the plan with ``PlanLR(inner, plan, loader)`` for each torch optimizer ``inner`` inside Megatron's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from packer.errors import ConfigError
from packer.integrations.labels import IGNORE_INDEX, labels_are_shifted, shifted_labels
from packer.runtime import Batch, PlanLoader


class MegatronIterator(Iterator[dict[str, torch.Tensor]]):
    """Micro-batches of all epochs of a plan, under Megatron's names.

    Padded: ``tokens, labels, position_ids`` int64 and ``loss_mask`` float32, each ``(B, S)``. Packed: the
    same as ``(1, T)``, and ``cu_seqlens, cu_seqlens_padded`` int32 ``(1, n + 1)``, ``max_seqlen`` int32
    ``(1,)``. Labels are shifted; where ``loss_mask`` is 0 they are 0. ``cu_seqlens`` counts the tokens of
    the samples, ``cu_seqlens_padded`` the positions that they take; padding at a row's end is a sample of
    its own.
    """

    def __init__(self, loader: PlanLoader) -> None:
        """Play what ``loader`` plays.

        Raises:
            ConfigError: The loader cuts rows, which Megatron would cut once more.
        """
        if loader.sp_size > 1:
            raise ConfigError(
                f"sp_size={loader.sp_size}: Megatron cuts rows for its context-parallel ranks itself, and "
                "would cut these a second time; leave sp_size out"
            )
        self.loader = loader
        self._flat = loader.microbatches()
        self._batches: Iterator[Batch] | None = None
        self._are_shifted = labels_are_shifted(loader.plan)

    def __iter__(self) -> "MegatronIterator":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next micro-batch; one epoch follows the other.

        Raises:
            StopIteration: All epochs of the plan were played.
        """
        while True:
            if self._batches is None:
                if self.loader.epoch >= self.loader.plan.num_epochs:
                    raise StopIteration
                self._batches = iter(self._flat)
            batch = next(self._batches, None)
            if batch is not None:
                return megatron_fields(batch, are_shifted=self._are_shifted)
            self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the plan stands."""
        return self._flat.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called.

        Raises:
            StateError: The state belongs to another plan.
        """
        self._flat.load_state_dict(state)
        self._batches = None


def megatron_fields(batch: Batch, *, are_shifted: bool = False) -> dict[str, torch.Tensor]:
    """Return one micro-batch under Megatron's names; on a stage that reads no samples, nothing.

    Args:
        batch: A micro-batch with whole rows.
        are_shifted: The plan's data set has labels that are shifted already (``analyze --no-shift``).
    """
    if not batch:
        return {}
    labels = shifted_labels(batch, are_shifted=are_shifted)
    counts = labels != IGNORE_INDEX
    fields = {
        "tokens": batch["input_ids"],
        "labels": labels.where(counts, 0),
        "loss_mask": counts.float(),
        "position_ids": batch["position_ids"],
    }
    if "cu_seqlens" in batch:
        padded = batch["cu_seqlens"]
        lengths = padded.diff()
        seqlens = torch.tensor(batch.seqlens.tolist(), dtype=lengths.dtype, device=lengths.device)
        lengths[: len(seqlens)] = seqlens  # beyond them, the padding at the row's end
        fields["cu_seqlens"] = torch.cat([padded[:1], lengths.cumsum(0, dtype=torch.int32)])[None]
        fields["cu_seqlens_padded"] = padded[None]
        fields["max_seqlen"] = torch.tensor([batch["max_seqlen"]], dtype=torch.int32, device=padded.device)
    return fields
