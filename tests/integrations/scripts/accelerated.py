"""A loop of one's own under accelerate: one step's gradient, and the rates of a few steps."""

import json
import os
import sys
from typing import Any

if sys.argv[1] == "deepspeed":
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}

import torch
import torch.nn.functional as F  # noqa: N812
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

from packer.errors import PackerError
from packer.integrations.accelerate import AcceleratedPlan, place_of
from packer.integrations.labels import shifted_labels
from tests.integrations import tiny
from tests.integrations.processes import report


def make_accelerator(backend: str, stage: int) -> Accelerator:
    if backend == "ddp":
        return Accelerator(cpu=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def train(backend: str, stage: int, layout: str, steps: int) -> dict[str, Any]:
    data = tiny.Tokens(90)
    plan = tiny.plan(data, layout=layout)
    _, gradient = tiny.step_gradient(data, tiny.step_samples(plan))
    gradient *= plan.epoch(0).step(0).lr_scale
    accelerator = make_accelerator(backend, stage)
    model = tiny.decoder()
    before = tiny.weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    training = AcceleratedPlan(accelerator, plan, data, model=wrapped, optimizer=optimizer)
    rates, error = [], None
    for step in training.loader:
        if step.index == steps:
            break
        for batch in training.microbatches(step):
            names = ("input_ids", "position_ids", "attention_mask")
            inputs = {name: batch[name] for name in names if name in batch}
            logits = wrapped(**inputs, use_cache=False).logits
            labels = shifted_labels(batch)
            training.backward(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), step)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(training.rate.get_last_lr()[0])
        if error is None:
            change = before - _whole_weights(model)
            error = float((change - gradient).abs().max() / gradient.abs().max())
    expected = [plan.epoch(0).step(step).lr_scale for step in range(steps)]
    accelerator.free_memory()
    return {"error": error, "rates": rates, "expected": expected}


def _whole_weights(model) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return tiny.weights(model)


def refused_context_parallelism() -> str:
    class Axes:
        cp_size, sp_size, tp_size = 2, 1, 1

    class Two:
        parallelism_config = Axes

    try:
        place_of(Two())
    except PackerError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    backend = sys.argv[1]
    if backend == "deepspeed":
        import deepspeed

        # Or the first start compiles a kernel for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    result: dict[str, Any] = {"refused": refused_context_parallelism()}
    for layout in ("padded", "packed"):
        result[layout] = train(backend, int(sys.argv[2]), layout, 3)
        if backend == "deepspeed":
            break  # one engine an accelerator
    report(json.loads(json.dumps(result)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
