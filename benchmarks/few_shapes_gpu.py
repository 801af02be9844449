"""What do small micro-batches cost, and what do CUDA graphs give back? One GPU, a decoder of 374M parameters.

Steps of 32,768 tokens on the lengths of a real request trace cut at 4,096, by one micro-batch of 32k, or
eight of 4k, packed and padded:

- eager: kernels launched one after the other;
- graphs: forward and backward captured once for each shape (``examples/few_shapes.py``). Packed rows have
  one shape: ``fixed_seqlen``, and ``pad_cu_seqlens`` for edges of one length. Padded ones have some:
  ``num_shapes``, and rows without a token where a micro-batch has fewer samples than others of its length;
- compiled: ``torch.compile(mode="reduce-overhead")``, which captures by itself.

Real tokens a second, as a line of JSON each; ``of_best`` beside the fastest so far.

    python benchmarks/few_shapes_gpu.py --minutes 4       (one GPU)
    python benchmarks/few_shapes_gpu.py --tiny            (CPU, some seconds: nothing is captured)
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gpu_decoder
import numpy as np
import pyarrow.parquet as pq
import torch
from gpu_decoder import Decoder, Shape
from torch import Tensor

import packer
from packer.runtime.batches.batch import Batch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from few_shapes import Graphs

LENGTHS = Path(__file__).parent / "data" / "azure_llm_2023_lengths.parquet"


class Samples:
    """Samples of the planned lengths, with ids that mean nothing."""

    def __init__(self, seqlens: np.ndarray, vocab_size: int) -> None:
        self._seqlens = seqlens
        self._ids = np.random.default_rng(0).integers(0, vocab_size, 2 * int(seqlens.max()))

    def __len__(self) -> int:
        return len(self._seqlens)

    def __getitem__(self, sample_id: int) -> dict[str, np.ndarray]:
        return {"input_ids": self._ids[: self._seqlens[sample_id]]}


class Bench:
    def __init__(self, *, tiny: bool) -> None:
        self.device = "cpu" if tiny else "cuda"
        self.step_tokens = 1024 if tiny else 32_768
        longest = self.step_tokens // 8
        lengths = pq.read_table(LENGTHS)["length"].to_numpy().astype(np.int64)
        self.seqlens = np.clip(lengths // (32 if tiny else 1), 2, longest)[: 2000 if tiny else None]
        self.shape = (
            Shape(vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48)
            if tiny
            else Shape()
        )
        self.tiny = tiny

    def plan(self, num_microbatches: int, layout: str, **options: Any) -> packer.Plan:
        config = packer.PlanConfig(
            max_tokens=self.step_tokens // num_microbatches,
            layout=layout,
            grad_accum=num_microbatches,
            **options,
        )
        return packer.make_plan(self.seqlens, config)

    def model(self) -> tuple[Decoder, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Decoder(self.shape, self.step_tokens).to(torch.float32 if self.tiny else torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not self.tiny or None)

    def run(self, plan: packer.Plan, kind: str, seconds: float) -> dict[str, Any]:
        """Train on a plan's steps for a time; the first third is to warm up."""
        is_packed = plan.layout == "packed"
        is_full = kind != "eager" and not is_packed
        loader = packer.PlanLoader(
            plan,
            Samples(self.seqlens, self.shape.vocab_size),
            device=self.device,
            pad_cu_seqlens=is_packed and kind != "eager",
            num_workers=0 if self.tiny else 4,
        )
        model, optimizer = self.model()
        compute = self.way(kind, model)
        tokens = shapes = 0
        seen = set()
        start = begin = time.perf_counter()
        is_warm = False
        for step in self.steps(loader):
            for batch in step:
                full = full_rows(batch, plan) if is_full else batch
                seen.add(tuple(full["input_ids"].shape))
                compute(full, step.num_loss_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            tokens += step.num_tokens
            now = time.perf_counter()
            # shapes that come seldom are captured late
            if not is_warm and now - begin > seconds / 3 and len(seen) == shapes:
                self.wait()
                is_warm, tokens, start = True, 0, time.perf_counter()
            shapes = len(seen)
            if is_warm and now - begin > seconds:
                break
        self.wait()
        elapsed = time.perf_counter() - start
        loader.close()
        peak = 0 if self.tiny else torch.cuda.max_memory_allocated()
        return {"tokens_per_second": tokens / elapsed, "shapes": shapes, "peak": peak}

    def way(self, kind: str, model: Decoder) -> Callable[[Mapping[str, Any], int], Any]:
        if kind == "graphs":
            return Graphs(model, list(model.parameters()), most=64)
        for parameter in model.parameters():  # gradients that stay, as the graphs' do
            parameter.grad = torch.zeros_like(parameter)
        loss_sum: Any = model
        if kind == "compiled":
            loss_sum = torch.compile(model, mode="reduce-overhead", dynamic=False)

        def compute(batch: Mapping[str, Any], num_loss_tokens: int) -> Tensor:
            if kind == "compiled":
                torch.compiler.cudagraph_mark_step_begin()
            loss = loss_sum(dict(batch))
            (loss / num_loss_tokens).backward()
            return loss

        return compute

    def steps(self, loader: packer.PlanLoader) -> Iterator[packer.Step]:
        while True:
            yield from loader
            loader.set_epoch(0)

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()


def full_rows(batch: Batch, plan: packer.Plan) -> dict[str, Tensor]:
    """Add rows without a token, to as many as the budget has room for: then S alone says the shape."""
    tensors = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    missing = plan.config["max_tokens"] // batch.padded_seqlen - len(batch["input_ids"])
    if missing <= 0:
        return tensors
    fill = {"labels": -100}
    return {
        name: torch.cat([rows, rows.new_full((missing, rows.shape[1]), fill.get(name, 0))])
        for name, rows in tensors.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="begin nothing after that")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a variant")
    parser.add_argument("--num-shapes", type=int, default=32, help="of the padded plan")
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    end = time.perf_counter() + 60 * arguments.minutes
    bench = Bench(tiny=arguments.tiny)
    small = bench.step_tokens // 8
    few = {
        "packed": {"fixed_seqlen": small},
        "padded": {"num_shapes": arguments.num_shapes, "pad_multiple": 1 if arguments.tiny else 64},
    }
    variants = [
        ("1 × 32k packed, eager", "eager", lambda: bench.plan(1, "packed")),
        ("1 × 32k padded, eager", "eager", lambda: bench.plan(1, "padded")),
        ("8 × 4k packed, eager", "eager", lambda: bench.plan(8, "packed")),
        ("8 × 4k packed, graphs", "graphs", lambda: bench.plan(8, "packed", **few["packed"])),
        ("8 × 4k padded, eager", "eager", lambda: bench.plan(8, "padded")),
        ("8 × 4k padded, graphs", "graphs", lambda: bench.plan(8, "padded", **few["padded"])),
        ("8 × 4k packed, compiled", "compiled", lambda: bench.plan(8, "packed", **few["packed"])),
        ("8 × 4k padded, compiled", "compiled", lambda: bench.plan(8, "padded", **few["padded"])),
    ]
    best = 0.0
    for name, kind, make in variants:
        if arguments.only not in name or time.perf_counter() > end or (arguments.tiny and kind == "compiled"):
            continue
        # compiled as a whole, the pointwise functions are a part of it
        gpu_decoder.FUSE = kind != "compiled" and not arguments.tiny
        try:
            found = bench.run(make(), kind, arguments.seconds)
        except Exception as error:  # one way that a version of torch cannot go is a line of the table
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        best = max(best, found.get("tokens_per_second", 0.0))
        of_best = found.get("tokens_per_second", 0.0) / best if best else 0.0
        print(json.dumps({"variant": name, **found, "of_best": of_best}), flush=True)
        gc.collect()
        if not arguments.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
