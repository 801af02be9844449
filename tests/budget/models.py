"""Small trainings to rehearse, and a device that ends where a test says."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from packer.budget import HostDevice

VOCABULARY = 100


class Model(nn.Module):
    """Enough of a language model: memory grows with tokens, or, with dense attention, with their squares."""

    def __init__(self, *, attends: bool = False, hidden_size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, hidden_size)
        self.norm = nn.BatchNorm1d(hidden_size)
        self.head = nn.Linear(hidden_size, VOCABULARY)
        self.attends = attends

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        x = self.embedding(batch["input_ids"])
        if self.attends:
            x = torch.softmax(x @ x.transpose(1, 2), -1) @ x
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"].roll(-1, 1)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def training(**options: Any) -> dict[str, Any]:
    """Return what ``rehearse`` and ``calibrate`` take of a training."""
    model = Model(**options)
    return {
        "train_step": model,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
    }


class NotingDevice(HostDevice):
    """Notes how often it was told to let memory go."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self.num_released = 0

    def release(self) -> None:
        super().release()
        self.num_released += 1


class Breaks:
    """A step that runs into an error at the n-th micro-batch."""

    def __init__(self, model: Callable[..., Tensor], at: int, error: Exception) -> None:
        self._model = model
        self._left = at
        self._error = error

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return self._model(batch)
