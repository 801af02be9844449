"""The multiplier under DeepSpeed: measured for every stage of ZeRO, and right for a step's gradient."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packer.runtime import measure_loss_multiplier
from tests.ranks import run_ranks
from tests.runtime.rate_and_loss.test_loss import SEQLENS, Model
from tests.runtime.replays import tokens_of

pytestmark = pytest.mark.frameworks

STAGES = (0, 1, 2, 3)


def loss_of(model: Any, sample_id: int) -> torch.Tensor:
    ids = torch.from_numpy(tokens_of(sample_id, SEQLENS[sample_id])).long()[None]
    return model(ids, ids)


def errors_of_stages(device: torch.device) -> dict[int, tuple[float, float]]:
    """On one rank: D of each stage, and how far the gradient of two ranks' samples is from that of both."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    alone = Model()
    num_loss_tokens = SEQLENS[0] + SEQLENS[1] - 2
    (sum(loss_of(alone, sample_id) for sample_id in range(2)) / num_loss_tokens).backward()
    expected = [parameter.grad for parameter in alone.parameters()]
    outcomes = {}
    for stage in STAGES:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        }
        model = Model()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        multiplier = measure_loss_multiplier(
            engine,
            lambda engine=engine: loss_of(engine, dist.get_rank()),
            backward=engine.backward,
            read_gradient=safe_get_full_grad,
        )
        engine.optimizer.zero_grad()
        engine.backward(loss_of(engine, dist.get_rank()) * multiplier / num_loss_tokens)
        gradients = [safe_get_full_grad(parameter) for parameter in engine.module.parameters()]
        error = max(float((g - e).abs().max()) for g, e in zip(gradients, expected, strict=True))
        outcomes[stage] = (multiplier, error)
    return outcomes


def test_every_stage_of_zero_is_measured() -> None:
    for outcomes in run_ranks(errors_of_stages, 2):
        assert {stage: multiplier for stage, (multiplier, _) in outcomes.items()} == dict.fromkeys(
            STAGES, 2.0
        )
        assert max(error for _, error in outcomes.values()) < 1e-6
