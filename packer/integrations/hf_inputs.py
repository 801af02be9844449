"""A planned micro-batch as the inputs that a transformers model takes, and as the labels of its loss."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from packer.errors import ConfigError
from packer.integrations.labels import shifted_labels
from packer.plan import Plan
from packer.runtime import Batch

SHIFTED = "shift_labels"
"""What each position is to predict, among the inputs: taken out before the model sees them."""

_MADE_HERE = frozenset({"labels", SHIFTED, "cu_seqlens", "max_seqlen"})


def attention_of(model: Any) -> str:
    """Return the name of a model's attention; empty where it has none."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def inner_model(model: Any) -> Any:
    """Return what an adapter is around; a model without one is itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def forward_parameters(model: Any) -> Collection[str]:
    """Return what a model's ``forward`` takes; of an adapter around a model, what that one takes."""
    return inspect.signature(inner_model(model).forward).parameters


def takes_pairs(model: Any) -> bool:
    """Whether a model has an encoder for the one and a decoder for the other sequence of a pair."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def plans_pairs(plan: Plan) -> bool:
    """Whether a plan has a budget for each of several sequences of a sample."""
    return isinstance(plan.config["max_tokens"], Mapping)


def pair_of(batch: Batch) -> tuple[Batch, Batch]:
    """Return source and target of a micro-batch of pairs: they stand in the order of their budgets."""
    source, target = batch.values()
    return source, target


def model_inputs(model: Any, batch: Batch, *, are_shifted: bool = False) -> dict[str, Any]:
    """Pick what a model takes, and put ``shift_labels`` beside it: int64 ``(B, S)``, or ``(1, T)``.

    The model never sees labels: what it would make of them, shifted or not, divided or not, is its own
    affair.

    Args:
        model: The model, or an adapter around it.
        batch: A micro-batch.
        are_shifted: What ``labels_are_shifted`` says of the plan.
    """
    if takes_pairs(model):
        return _pair_inputs(model, batch)
    taken = forward_parameters(model)
    inputs = {name: batch[name] for name in batch if name in taken and name not in _MADE_HERE}
    inputs[SHIFTED] = shifted_labels(batch, are_shifted=are_shifted)
    if "cu_seqlens" not in batch:
        return inputs
    if "use_cache" in taken:
        inputs["use_cache"] = False  # with a cache, the samples of a row are not told apart
    if "flash" in attention_of(model):
        edges, longest = batch["cu_seqlens"], batch["max_seqlen"]
        inputs |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    return inputs


def label_ids(model: Any, batch: Batch) -> torch.Tensor:
    """Return a micro-batch's labels as metrics take them: not shifted, those of a pair its target's."""
    labels: torch.Tensor = (pair_of(batch)[1] if takes_pairs(model) else batch)["labels"]
    return labels


def _pair_inputs(model: Any, batch: Batch) -> dict[str, Any]:
    """Source to the encoder; the target to the decoder, moved to the right by the model's start token."""
    source, target = pair_of(batch)
    inner = inner_model(model)
    if not hasattr(inner, "prepare_decoder_input_ids_from_labels"):
        raise ConfigError(
            f"{type(inner).__name__} has no prepare_decoder_input_ids_from_labels, which says what its "
            "decoder begins with; give it one, or play the plan in a loop of your own with PlanLoader"
        )
    return {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        # Of the ids and not of the labels, whose −100 would become padding in the middle of the target.
        "decoder_input_ids": inner.prepare_decoder_input_ids_from_labels(labels=target["input_ids"]),
        SHIFTED: target["labels"],
    }
