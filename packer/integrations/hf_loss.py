"""Next-token loss from a model's logits: summed here, so that nothing a model does to it can matter."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from packer.errors import ConfigError
from packer.integrations.hf_inputs import inner_model
from packer.integrations.labels import IGNORE_INDEX
from packer.integrations.together import sum_over_processes


def logits_of(outputs: Any, labels: torch.Tensor, model: Any) -> torch.Tensor:
    """Return a model's logits ``(B, S, vocabulary)``.

    Raises:
        ConfigError: It returns none, or not one row for each label.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[0]
    if isinstance(logits, torch.Tensor) and logits.dim() == 3 and logits.shape[:2] == labels.shape:
        return logits
    found = f"logits of shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else "no logits"
    raise ConfigError(
        f"{type(inner_model(model)).__name__} returns {found} for labels of shape {tuple(labels.shape)}, and "
        "a plan's loss is computed from one row of logits a token; take a model with a language-modeling "
        "head, or override compute_loss"
    )


def loss_sum(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the cross-entropy in float32, summed over the labels that are not −100; 0 where none is.

    Args:
        logits: ``(B, S, vocabulary)``
        labels: ``(B, S)``, what each position is to predict.
        label_smoothing: The share of each target that is spread over the vocabulary.
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def auxiliary_loss(outputs: Any, model: Any) -> torch.Tensor | float:
    """Return what a mixture of experts adds to balance its experts, as its own loss would; else 0."""
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
    if auxiliary is None:
        return 0.0
    coefficient = getattr(inner_model(model).config.get_text_config(), "router_aux_loss_coef", None) or 0.0
    weighted: torch.Tensor = coefficient * auxiliary
    return weighted


class TokenMean:
    """The mean over the tokens of many micro-batches on all ranks."""

    def __init__(self) -> None:
        """Begin with none."""
        self._sum = 0.0
        self._num_tokens = 0

    def add(self, mean: torch.Tensor, num_tokens: int) -> None:
        """Add a micro-batch's mean over its tokens."""
        if num_tokens:
            self._sum += mean.item() * num_tokens
            self._num_tokens += num_tokens

    def over_all_ranks(self) -> float:
        """Return the mean; a collective.

        Raises:
            ConfigError: There was no token to take a mean over.
        """
        total, num_tokens = sum_over_processes([self._sum, float(self._num_tokens)])
        if not num_tokens:
            raise ConfigError(
                "the evaluation has no token with a label other than −100, so it has no loss; evaluate on "
                "samples that have some"
            )
        return total / num_tokens
