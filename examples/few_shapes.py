"""Small micro-batches without their price: one CUDA graph for each of a plan's few shapes.

    python examples/few_shapes.py                 analyzes and plans the shipped data, then trains

A GPU works through a small micro-batch faster than the host can launch its kernels. A plan with few shapes
lets each be captured once and replayed with one launch. ``--layout packed`` has one shape for all: rows of
one length (``fixed_seqlen``), with ``cu_seqlens`` of one length (``pad_cu_seqlens``). ``--layout padded`` has
some (``num_shapes``). Without a GPU the same loop runs, and nothing is captured.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from decoder import Decoder, DecoderConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import packer
from packer.runtime.masks import block_diagonal_mask
from packer.runtime.sequence_parallel import UlyssesAttention

DATA = Path(__file__).parent / "data"


class Graphs:
    """Forward and backward of a micro-batch, captured once for each shape and replayed after that.

    Gradients are summed into ``.grad`` tensors that stay where they are: clear them with
    ``zero_grad(set_to_none=False)``. Everything that varies must be in tensors: so what a loss is divided by
    comes as one, and ``max_seqlen`` must be the same for all batches of a shape.
    """

    WARM_UP = 2
    """Times that a shape is computed before it is captured: kernels are chosen and compiled meanwhile."""

    def __init__(
        self,
        loss_sum: Callable[[Mapping[str, Any]], Tensor],
        parameters: list[torch.nn.Parameter],
        *,
        most: int = 32,
    ) -> None:
        """Capture at most so many shapes; others are computed one kernel after the other."""
        self._loss_sum = loss_sum
        self._most = most
        self._captured: dict[Any, tuple[torch.cuda.CUDAGraph, dict[str, Any], Tensor, Tensor]] = {}
        self._pool: Any = None
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, batch: Mapping[str, Any], num_loss_tokens: int) -> Tensor:
        """Add the gradients of ``loss_sum(batch) / num_loss_tokens``; return the summed loss."""
        shape = tuple(
            (name, tuple(value.shape) if isinstance(value, Tensor) else value)
            for name, value in sorted(batch.items())
        )
        if shape not in self._captured:
            device = batch["input_ids"].device
            if device.type != "cuda" or len(self._captured) == self._most:
                return self._compute(batch, torch.tensor(float(num_loss_tokens), device=device))
            self._captured[shape] = self._capture(batch, device)
        graph, inputs, divisor, loss = self._captured[shape]
        for name, value in batch.items():
            if isinstance(value, Tensor):
                inputs[name].copy_(value)
        divisor.fill_(num_loss_tokens)
        graph.replay()
        return loss

    def _compute(self, batch: Mapping[str, Any], divisor: Tensor) -> Tensor:
        loss = self._loss_sum(batch)
        (loss / divisor).backward()
        return loss.detach()

    def _capture(self, batch: Mapping[str, Any], device: torch.device) -> Any:
        inputs = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()
        }
        # What is added while the shape is tried out is divided away.
        divisor = torch.full((), float("inf"), device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                self._compute(inputs, divisor)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            loss = self._compute(inputs, divisor)
        self._pool = graph.pool()
        return graph, inputs, divisor, loss


class PlainLoss(Decoder):
    """The decoder with all logits at a time: recomputing reads the random state, which no capture can."""

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self._chunk_loss(hidden, labels)


def main() -> None:
    """Plan with few shapes, capture, train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=["padded", "packed"], default="packed")
    parser.add_argument("--max-tokens", type=int, default=2432)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        source = DATA / "instructions.jsonl.gz"
        packer.analyze(source, out=metrics, text_column="text", tokenizer=DATA / "tokenizer.json")
        train(arguments, packer.open_metrics(metrics), packer.open_dataset(source, metrics=metrics))


def train(arguments: argparse.Namespace, metrics: packer.metrics.Metrics, dataset: Any) -> None:
    """Play some steps of a plan with few shapes."""
    is_packed = arguments.layout == "packed"
    few = {"fixed_seqlen": arguments.max_tokens} if is_packed else {"num_shapes": 4, "pad_multiple": 64}
    plan = packer.make_plan(
        metrics,
        packer.PlanConfig(
            max_tokens=arguments.max_tokens, layout=arguments.layout, step_tokens=16_384, **few
        ),
    )
    loader = packer.PlanLoader(plan, dataset, device=arguments.device, pad_cu_seqlens=is_packed)
    torch.manual_seed(0)
    on_gpu = loader.device is not None and loader.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    attention = UlyssesAttention(varlen_attn if is_packed and on_gpu else scaled_dot_product_attention)
    config = DecoderConfig(
        vocab_size=4096, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=256
    )
    model = PlainLoss(config, attention).to(arguments.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_sum(batch: Mapping[str, Any]) -> Tensor:
        if is_packed and not on_gpu:  # torch has no kernel for it there, and takes a mask
            return model(batch, attn_mask=block_diagonal_mask(batch)[:, None])
        return model(batch)

    compute = Graphs(loss_sum, list(model.parameters()))
    for step in loader:
        total = torch.zeros((), device=arguments.device)
        for batch in step:
            total += compute(batch, step.num_loss_tokens)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        print(f"step {step.index}: loss {total.item() / step.num_loss_tokens:.3f}")
        if step.index + 1 == arguments.steps:
            break


if __name__ == "__main__":
    main()
