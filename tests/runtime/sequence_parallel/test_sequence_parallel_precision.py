"""Shared rows lose no more than the arithmetic does: float32 with plain matrices, bfloat16 with kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.decoder import Decoder, DecoderConfig
from packer.plan import Plan
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader
from packer.runtime.sequence_parallel.ulysses import UlyssesAttention
from tests.ranks import BACKENDS, run_ranks
from tests.runtime.replays import VOCABULARY, Tokens

CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=512,
    recompute=True,
)
SEQLENS = [300, 17, 120, 64, 255, 1, 90, 33, 200, 140]


def plan_of(layout: str) -> Plan:
    config = PlanConfig(max_tokens=640, layout=layout, sp_size=2, remainder="keep", pad_multiple=8)
    return make_plan(SEQLENS, config)


def step_of(
    attention: UlyssesAttention, loader: PlanLoader, dtype: torch.dtype
) -> tuple[float, list[torch.Tensor]]:
    """Loss a token of a step, and its gradients summed over ranks where rows are shared."""
    torch.manual_seed(3)
    model = Decoder(CONFIG, attention).to(loader.device, dtype)
    step = next(iter(loader))
    total = 0.0
    for batch in step:
        loss = model(batch) / step.num_loss_tokens
        loss.backward()
        total += loss.detach()
    gradients = [parameter.grad.float() for parameter in model.parameters()]
    if attention.sp_size > 1:
        for tensor in [total, *gradients]:
            dist.all_reduce(tensor)
    return total.item(), gradients


def deviations(
    device: torch.device, layout: str, dtype: torch.dtype, attention: Callable[[], Any]
) -> tuple[float, float]:
    """On one rank: relative deviation of the loss, and of the gradients, of shared rows from whole ones."""
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("dp", "sp"))
    plan, function = plan_of(layout), attention()
    with sdpa_kernel(SDPBackend.MATH):
        # Both ranks have the same rows whole, as those of a tensor-parallel group do.
        whole = PlanLoader(plan, Tokens(SEQLENS), tp_size=2, device=device)
        expected, exact = step_of(UlyssesAttention(function), whole, dtype)
        shared = PlanLoader(plan, Tokens(SEQLENS), mesh=mesh, device=device)
        loss, gradients = step_of(UlyssesAttention(function, mesh["sp"]), shared, dtype)
    assert expected > 1.0
    worst = max(float((g - e).norm() / e.norm()) for g, e in zip(gradients, exact, strict=True))
    return abs(loss - expected) / expected, worst


def plain_matrices() -> Any:
    return functional.scaled_dot_product_attention


def varlen_kernel() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(backend: str) -> None:
    for loss, gradient in run_ranks(deviations, 2, "padded", torch.float32, plain_matrices, backend=backend):
        assert loss < 1e-5
        assert gradient < 1e-5


@pytest.mark.gpu
def test_bfloat16_with_torchs_varlen_kernel() -> None:
    for loss, gradient in run_ranks(deviations, 2, "packed", torch.bfloat16, varlen_kernel, backend="nccl"):
        assert loss < 1e-2
        assert gradient < 5e-2
