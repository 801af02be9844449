"""How good is a calibrated budget? Held against brute force, and trained at, on one GPU.

For decoders of 374M and 953M parameters, padded and packed, with and without activation checkpointing, on the
lengths of a real request trace:

- calibrate: the largest budget that fits, the recommended one, tokens a second over budgets, seconds taken;
- brute force: budgets above that one, half a percent at a time, until memory does not do: ``found`` is the
  calibrated budget as a share of the largest that went through;
- rehearse, and train at the calibrated budget: the peak that was told beside the run's own, its first
  micro-batches being the plan's extremes.

Each figure is a line of JSON, printed when it is known; when the time is up, what is missing is left out.
``--gigabytes`` lets the process have so much of the GPU's memory, which makes micro-batches smaller, and
everything faster.

    python benchmarks/calibrate_gpu.py --minutes 9 --gigabytes 40      (one GPU)
    python benchmarks/calibrate_gpu.py --tiny                          (CPU, a minute)
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_decoder
import numpy as np
import pyarrow.parquet as pq
import torch
from gpu_decoder import Decoder, Shape
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packer
from packer.budget import HostDevice, find_extremes
from packer.runtime.batches.batch import Batch

LENGTHS = Path(__file__).parent / "data" / "azure_llm_2023_lengths.parquet"
STRIDE = 0.005
"""Of brute force."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    model: str
    shape: Shape
    layout: str
    recompute: bool

    @property
    def name(self) -> str:
        return f"{self.model} {self.layout}{' recomputed' if self.recompute else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    shapes: dict[str, Shape]
    step_tokens: int
    length_divisor: int
    max_samples: int | None
    dtype: torch.dtype
    gigabytes: float | None


FULL = Sizes(
    shapes={
        "374M": Shape(),
        "953M": Shape(hidden_size=2048, num_layers=16, num_heads=16, intermediate_size=5632),
    },
    step_tokens=262_144,
    length_divisor=1,
    max_samples=None,
    dtype=torch.bfloat16,
    gigabytes=None,
)
TINY = Sizes(
    shapes={
        "tiny": Shape(vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48),
    },
    step_tokens=8192,
    length_divisor=64,
    max_samples=2000,
    dtype=torch.float32,
    gigabytes=0.01,
)


class Recomputed(nn.Module):
    """A layer whose activations are made again for the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(self.layer, *inputs, use_reentrant=False)


class Lengths:
    """Samples of the planned lengths, with ids that mean nothing."""

    def __init__(self, seqlens: np.ndarray, vocab_size: int) -> None:
        self._seqlens = seqlens
        self._ids = np.random.default_rng(0).integers(0, vocab_size, 2 * int(seqlens.max()))

    def __len__(self) -> int:
        return len(self._seqlens)

    def __getitem__(self, sample_id: int) -> dict[str, np.ndarray]:
        return {"input_ids": self._ids[: self._seqlens[sample_id]]}


class Bench:
    """One setting: its model, and what is measured with it."""

    def __init__(self, setting: Setting, sizes: Sizes, arguments: argparse.Namespace) -> None:
        self.setting = setting
        self.arguments = arguments
        seqlens = pq.read_table(LENGTHS)["length"].to_numpy().astype(np.int64)
        self.seqlens = np.maximum(seqlens // sizes.length_divisor, 2)[: sizes.max_samples]
        self.on_gpu = not arguments.tiny
        self.device = "cuda" if self.on_gpu else "cpu"
        # where there is no GPU, a device of so many bytes is pretended
        self.memory: Any = "cuda" if self.on_gpu else HostDevice(int((sizes.gigabytes or 0) * 1e9))
        self.config = packer.PlanConfig(
            max_tokens=-(-int(self.seqlens.max()) // 8) * 8,
            layout=setting.layout,
            pad_multiple=8,
            step_tokens=sizes.step_tokens,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = Decoder(setting.shape, int(self.seqlens.max()) + 8).to(sizes.dtype)
        if setting.recompute:
            self.model.layers = nn.ModuleList(map(Recomputed, self.model.layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.on_gpu or None)
        self.training = {"model": self.model, "optimizer": self.optimizer, "device": self.memory}

    def loss(self, batch: Batch) -> Tensor:
        return self.model(batch) / batch.num_tokens

    def calibrate(self) -> packer.budget.Calibration:
        return packer.calibrate(
            self.loss, self.seqlens, self.config, max_seconds=self.arguments.max_seconds, **self.training
        )

    def plan(self, budget: int) -> packer.Plan:
        return packer.make_plan(
            self.seqlens,
            packer.PlanConfig(
                max_tokens=budget, layout=self.setting.layout, pad_multiple=8, grad_accum=2, remainder="keep"
            ),
        )

    def largest_by_force(self, budget: int, until: float) -> tuple[int, bool]:
        """Return the largest budget that went through, and whether the next one did not."""
        went = budget
        while time.perf_counter() < until:
            tried = max(int(went * (1 + STRIDE)), went + 8)
            if not self.goes_through(tried):
                return went, True
            went = tried
        return went, False

    def goes_through(self, budget: int) -> bool:
        plan = self.plan(budget)
        try:
            self.train(plan, 3)
        except torch.OutOfMemoryError:
            fits = False
        else:
            fits = True
        self.optimizer.zero_grad()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        return fits

    def train(self, plan: packer.Plan, num_microbatches: int, until: float = float("inf")) -> int:
        """Train on the plan's extremes, then in its order; two micro-batches an update. Return how many."""
        loader = packer.PlanLoader(
            plan, Lengths(self.seqlens, self.setting.shape.vocab_size), device=self.device
        )
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return self._train(plan, loader, num_microbatches, until)
        self.memory.note(self.model.parameters())
        with self.memory.capped(None):
            self.memory.reset_peak()
            return self._train(plan, loader, num_microbatches, until)

    def _train(self, plan: packer.Plan, loader: packer.PlanLoader, most: int, until: float) -> int:
        count = 0
        for batch in self._batches(plan, loader):
            self.loss(batch).backward()
            count += 1
            if count % 2 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if count == most or time.perf_counter() > until:
                break
        if self.on_gpu:
            torch.cuda.synchronize()
        return count

    def _batches(self, plan: packer.Plan, loader: packer.PlanLoader) -> Iterator[Batch]:
        for extreme in reversed(find_extremes(plan)):
            yield loader.read_row(extreme.epoch, extreme.row)
        while True:
            yield from loader.microbatches()
            loader.set_epoch(0)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.on_gpu else self.memory.peak().allocated


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after that")
    parser.add_argument("--gigabytes", type=float, help="of the GPU's memory; default: all of it")
    parser.add_argument("--max-seconds", type=float, default=150.0, help="of a calibration")
    parser.add_argument("--microbatches", type=int, default=60, help="to train at the budget found")
    parser.add_argument("--only", default="", help="settings whose name has this in it: '374M packed'")
    parser.add_argument("--out", type=Path, help="the same lines in a file")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else FULL
    gpu_decoder.FUSE = not arguments.tiny
    end = time.perf_counter() + 60 * arguments.minutes
    if arguments.gigabytes and not arguments.tiny:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(arguments.gigabytes * 1e9 / total)
    for recompute in (False, True):
        for model, shape in sizes.shapes.items():
            for layout in ("packed", "padded"):
                setting = Setting(model=model, shape=shape, layout=layout, recompute=recompute)
                if arguments.only in setting.name and time.perf_counter() < end:
                    measure(setting, sizes, arguments, end)


def measure(setting: Setting, sizes: Sizes, arguments: argparse.Namespace, end: float) -> None:
    def tell(what: str, **figures: Any) -> None:
        line = json.dumps({"setting": setting.name, "what": what, **figures})
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(line + "\n")

    bench = Bench(setting, sizes, arguments)
    found = bench.calibrate()
    print(found, flush=True)
    best = max(one.tokens_per_second for one in found.speeds)
    chosen = next(one for one in found.speeds if one.max_tokens == found.recommended.max_tokens)
    budget = found.largest
    assert isinstance(budget, int)
    tell(
        "calibrate",
        seconds=found.seconds,
        largest=budget,
        is_sure=found.is_largest_sure,
        recommended=found.recommended.max_tokens,
        grad_accum=chosen.grad_accum,
        of_best_speed=chosen.tokens_per_second / best,
        design_effect=chosen.design_effect,
        speeds=[[one.max_tokens, one.tokens_per_second, one.design_effect] for one in found.speeds],
        trials=[[one.budget, one.fits, one.peak and one.peak.allocated] for one in found.trials],
    )
    if time.perf_counter() > end:
        return
    plan = bench.plan(budget)
    rehearsal = packer.rehearse(plan, bench.loss, **bench.training)
    tell("rehearse", fits=rehearsal.fits, peak=rehearsal.peak.allocated, reserved=rehearsal.peak.reserved)
    try:
        count = bench.train(plan, arguments.microbatches, end)
        out_of_memory = False
    except torch.OutOfMemoryError:
        count, out_of_memory = 0, True
    tell(
        "train",
        microbatches=count,
        out_of_memory=out_of_memory,
        peak=bench.peak,
        told_by_actual=rehearsal.peak.allocated / bench.peak,
    )
    bench.optimizer.zero_grad()
    largest, is_end = bench.largest_by_force(budget, end)
    tell("brute force", largest=largest, is_end=is_end, found=budget / largest)
    del bench
    gc.collect()
    if not arguments.tiny:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
