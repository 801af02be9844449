"""A small decoder, a small data set, a plan over it, and a step's gradient worked out by hand."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM

from packer.plan import Plan
from packer.planner import PlanConfig, make_plan

VOCABULARY = 64


class Tokens(torch.utils.data.Dataset):
    """Samples of random ids; with ``prompts``, the labels of their first tokens are −100."""

    def __init__(self, count: int = 60, *, prompts: bool = False) -> None:
        numbers = np.random.default_rng(3)
        self.samples = []
        for length in numbers.integers(3, 13, count):
            sample = {"input_ids": numbers.integers(0, VOCABULARY, length).astype(np.int32)}
            if prompts:
                labels = sample["input_ids"].astype(np.int64)
                labels[: numbers.integers(1, length)] = -100
                sample["labels"] = labels
            self.samples.append(sample)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]

    def seqlens(self) -> list[int]:
        return [len(sample["input_ids"]) for sample in self.samples]

    def loss_tokens(self) -> list[int]:
        return [int((sample["labels"][1:] != -100).sum()) for sample in self.samples]


def plan(data: Tokens, *, loss_tokens: bool = False, **options: Any) -> Plan:
    """Plan two data-parallel ranks with two accumulations each, steps of unequal size."""
    options = {"dp_size": 2, "grad_accum": 2, "max_tokens": 40, "lr_scaling": "linear"} | options
    return make_plan(
        data.seqlens(), PlanConfig(**options), loss_tokens=data.loss_tokens() if loss_tokens else None
    )


def decoder(attention: str = "sdpa") -> LlamaForCausalLM:
    """Make the same decoder every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters end to end, in float64."""
    return torch.cat([parameter.detach().flatten().double().cpu() for parameter in model.parameters()])


def step_gradient(
    data: Tokens, sample_ids: list[int], model: torch.nn.Module | None = None
) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of the mean over these samples' tokens, one by one, in float64."""
    model = copy.deepcopy(model or decoder()).double()
    loss = mean_loss(model, data, sample_ids)
    loss.backward()
    return loss.item(), torch.cat([gradient_of(parameter).flatten() for parameter in model.parameters()])


def mean_loss(model: torch.nn.Module, data: Tokens, sample_ids: Sequence[int]) -> torch.Tensor:
    """Return the mean over all tokens of these samples, each in a batch of its own."""
    total, count = torch.zeros(()), 0
    for index in sample_ids:
        sample = data[index]
        ids = torch.as_tensor(sample["input_ids"], dtype=torch.int64)
        labels = torch.as_tensor(sample.get("labels", sample["input_ids"]), dtype=torch.int64)[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    return total / count


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient: zeros where it has none, because an adapter froze it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def step_samples(plan: Plan, epoch: int = 0, step: int = 0) -> list[int]:
    """Return the samples of a step, fillers left out."""
    rows = plan.dp_size * plan.grad_accum
    found = [plan.epoch(epoch).microbatch(row) for row in range(step * rows, (step + 1) * rows)]
    return [int(i) for row in found if not row.is_filler for i in row.sample_ids]
