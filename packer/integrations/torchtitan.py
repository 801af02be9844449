"""A plan as torchtitan's data loader: ``build_dataloader_fn`` returns it. torchtitan itself is not needed.

    def build_dataloader(dp_world_size, dp_rank, tokenizer, job_config):
        copies = dist.get_world_size() // dp_world_size  # of the same batches: tp, cp and pp ranks
        loader = PlanLoader(plan, dataset, dp_rank=dp_rank, dp_size=dp_world_size, tp_size=copies)
        return TorchtitanLoader(loader)

torchtitan divides the loss of each micro-batch by its own number of micro-batches; for the mean over the
step's tokens hand its loss function a sum and multiply it by ``loader.loss_weight()``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from packer.integrations.labels import labels_are_shifted, shifted_labels
from packer.runtime import PlanLoader


class TorchtitanLoader:
    """``({"input": ids, "positions": …}, labels)`` of all epochs: int64 ``(B, S)``, or ``(1, T)`` packed.

    Labels are shifted, and −100 where nothing is to be learned. ``positions`` restart at 0 in each sample
    of a packed row, which is how torchtitan's models tell them apart.
    """

    def __init__(self, loader: PlanLoader, *, positions: str | None = "positions") -> None:
        """Play what ``loader`` plays.

        Args:
            loader: This rank's place in the plan.
            positions: The name under which the model takes positions; None leaves them out.
        """
        self.loader = loader
        self._flat = loader.microbatches()
        self._positions = positions
        self._are_shifted = labels_are_shifted(loader.plan)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Play on, to the end of the last epoch."""
        while self.loader.epoch < self.loader.plan.num_epochs:
            for batch in self._flat:
                inputs = {"input": batch["input_ids"]}
                if self._positions is not None:
                    inputs[self._positions] = batch["position_ids"]
                yield inputs, shifted_labels(batch, are_shifted=self._are_shifted)

    def loss_weight(self, num_averaged: int = 1) -> float:
        """Return what the sum of a micro-batch's loss is multiplied by.

        Args:
            num_averaged: Ranks that the gradients are averaged over; FSDP in torchtitan averages over none.

        Raises:
            PlanError: The plan does not know the step's loss tokens.
        """
        step = self.loader.current_step
        return num_averaged * self.loader.grad_accum / max(step.num_loss_tokens, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return where the plan stands: the same on every rank."""
        return self._flat.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called.

        Raises:
            StateError: The state belongs to another plan.
        """
        self._flat.load_state_dict(state_dict)
