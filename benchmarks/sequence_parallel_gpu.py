"""What does sequence parallelism buy: which speed, which memory, and how long a row fits?

A decoder of 1.1 billion parameters (bfloat16 compute, float32 state, FSDP2 over both GPUs, AdamW) takes steps
on rows of one long sample each. With sp = 1 each GPU has a row of its own, with sp = 2 they share one; the
sharding of the parameters is the same. Attention is torch's varlen kernel. Activations are kept, unless said
otherwise.

    python -m benchmarks.sequence_parallel_gpu --out sequence_parallel_gpu.json
    python -m benchmarks.sequence_parallel_gpu --out rehearsal.json --rehearse      # tiny, on the CPU

Every configuration runs in processes of its own: what runs out of memory leaves nothing behind.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from examples.decoder import Decoder, DecoderConfig
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader
from packer.runtime.sequence_parallel import UlyssesAttention

RANKS = 2
STRIDE = 4096
"""Row lengths are multiples of it."""
LARGE = DecoderConfig(
    vocab_size=32_768,
    hidden_size=2048,
    num_layers=22,
    num_heads=16,
    num_kv_heads=8,
    intermediate_size=5632,
    rope_theta=1e6,
    loss_chunk=8192,
)
TINY = DecoderConfig(
    vocab_size=32_768, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Steps at one row length after the other, up to the first that does not fit."""

    sp: int
    lengths: tuple[int, ...]
    untimed: int = 1
    timed: int = 2
    recompute: bool = False
    rehearse: bool = False


class LongSamples:
    """Samples of one length, anywhere in a memory-mapped file of random tokens."""

    def __init__(self, path: Path, length: int, count: int) -> None:
        self._tokens = np.load(path, mmap_mode="r")
        self._length, self._count = length, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return self.read_slice(sample_id, 0, self._length)

    def read_slice(self, sample_id: int, start: int, stop: int) -> dict[str, Any]:
        first = sample_id * STRIDE
        return {"input_ids": self._tokens[first + start : first + min(stop, self._length)]}


def loader_of(job: Job, length: int, steps: int, tokens: Path, **options: Any) -> PlanLoader:
    """Each step is one row of one sample for each group of ranks."""
    dp_size = RANKS // job.sp
    config = PlanConfig(
        max_tokens=length, layout="packed", order="sequential", dp_size=dp_size, sp_size=job.sp
    )
    plan = make_plan(np.full(steps * dp_size, length), config)
    return PlanLoader(plan, LongSamples(tokens, length, plan.num_samples), **options)


def build(job: Job, mesh: DeviceMesh, device: torch.device) -> tuple[Decoder, torch.optim.Optimizer]:
    if job.rehearse:
        from tests.attentions import varlen as attention
    else:
        from torch.nn.attention.varlen import varlen_attn as attention
    config = replace(TINY if job.rehearse else LARGE, recompute=job.recompute)
    torch.manual_seed(0)
    with device:
        model = Decoder(config, UlyssesAttention(attention, mesh["sp"]))
    everyone = mesh["dp", "sp"]._flatten("everyone")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def run_steps(model: Decoder, optimizer: torch.optim.Optimizer, loader: PlanLoader) -> list[float]:
    """Seconds of each step."""
    seconds = []
    for step in loader:
        synchronize(loader.device)
        began = time.perf_counter()
        for batch in step:
            # FSDP2 averages over both ranks; the loss is a mean over the step's tokens.
            (model(batch) * RANKS / step.num_loss_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(loader.device)
        seconds.append(time.perf_counter() - began)
    return seconds


def work(job: Job, tokens: Path, report: Path) -> None:
    """On one rank: take the job's steps, and report each length once it is through."""
    device = torch.device("cpu")
    if not job.rehearse:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if job.rehearse else "nccl")
    mesh = init_device_mesh(device.type, (RANKS // job.sp, job.sp), mesh_dim_names=("dp", "sp"))
    model, optimizer = build(job, mesh, device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    run_steps(
        model, optimizer, loader_of(job, min(job.lengths[0], STRIDE), 1, tokens, mesh=mesh, device=device)
    )
    for length in job.lengths:
        reset_peak(device)
        loader = loader_of(job, length, job.untimed + job.timed, tokens, mesh=mesh, device=device)
        seconds = float(np.median(run_steps(model, optimizer, loader)[job.untimed :]))
        peak = peak_gib(device)
        result = {
            "sp": job.sp,
            "row_length": length,
            "recompute": job.recompute,
            "parameters": num_parameters,
            "step_s": seconds,
            "tokens_per_s": length * RANKS / job.sp / seconds,
            "tflops_per_gpu": flops(model.config, num_parameters, length) / job.sp / seconds / 1e12,
            "peak_gib": peak,
            "capacity_gib": 0 if job.rehearse else torch.cuda.mem_get_info(device)[1] / 2**30,
        }
        if dist.get_rank() == 0:
            with report.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


def flops(config: DecoderConfig, num_parameters: int, length: int) -> float:
    """Of a step on one row: what the model takes, nothing for recomputation; attention sees half the
    square."""
    matrices = num_parameters - config.vocab_size * config.hidden_size
    return 6.0 * matrices * length + 6.0 * config.num_layers * config.hidden_size * length**2


def synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Largest memory that tensors took, on the rank that took most."""
    peak = torch.zeros((), device=device)
    if device.type == "cuda":
        peak += torch.cuda.max_memory_allocated(device) / 2**30
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak.item()


def launch(job: Job, tokens: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a job on both ranks; return what it reported before it ended, or ran out of memory."""
    report = folder / "report.jsonl"
    report.unlink(missing_ok=True)
    began = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "benchmarks.sequence_parallel_gpu", "--job", json.dumps(asdict(job))]
    done = subprocess.run(
        [*command, "--tokens", str(tokens), "--out", str(report)], capture_output=True, text=True, check=False
    )
    results = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if done.returncode and "out of memory" not in done.stderr.lower():
        raise SystemExit(f"{job} failed:\n{done.stderr[-6000:]}")
    ended = "out of memory" if done.returncode else "done"
    print(f"{job}: {len(results)} lengths in {time.perf_counter() - began:.0f} s, {ended}", flush=True)
    return results


def longest_job(sp: int, measured: list[dict[str, Any]]) -> Job:
    """Extrapolate how long a row fits; try from just below on, until one does not."""
    points = [(m["row_length"], m["peak_gib"]) for m in measured if m["sp"] == sp]
    slope, offset = np.polyfit(*zip(*points, strict=True), 1)
    expected = int((measured[0]["capacity_gib"] - offset) / slope / STRIDE)
    lengths = tuple(STRIDE * n for n in range(expected - 2, expected + 4))
    return Job(sp=sp, lengths=lengths, untimed=0, timed=1)


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| sp | row | activations | s a step | tokens/s | TFLOP/s a GPU | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        kept = "recomputed" if r["recompute"] else "kept"
        lines.append(
            f"| {r['sp']} | {r['row_length']:,} | {kept} | {r['step_s']:.2f} | {r['tokens_per_s']:,.0f} "
            f"| {r['tflops_per_gpu']:.0f} | {r['peak_gib']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start nothing after so long")
    parser.add_argument("--activations", choices=["kept", "recomputed", "both"], default="both")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        work(Job(**options.job), options.tokens, options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Run all jobs that the budget leaves time to start, the most telling first; save after each."""
    began = time.perf_counter()
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, LARGE.vocab_size, 1 << 20, np.int32))
    unit = 64 if options.rehearse else STRIDE
    kept = [Job(sp=1, lengths=(8, 12, 16)), Job(sp=2, lengths=(8, 16, 24))]
    recomputed = [
        Job(sp=1, lengths=(32,), untimed=0, timed=1, recompute=True),
        Job(sp=2, lengths=(32, 64), untimed=0, timed=1, recompute=True),
    ]
    results: dict[str, Any] = {"steps": [], "longest": []}

    def run(jobs: list[Job]) -> None:
        for job in jobs:
            if time.perf_counter() - began < options.budget_s:
                lengths = tuple(unit * length for length in job.lengths)
                job = replace(job, lengths=lengths, rehearse=options.rehearse)
                results["steps"] += launch(job, tokens, folder)
                options.out.write_text(json.dumps(results, indent=1) + "\n")

    if options.activations != "recomputed":
        run(kept)
        for job in [] if options.rehearse else kept:
            results["longest"] += launch(longest_job(job.sp, results["steps"]), tokens, folder)[-1:]
    if options.activations != "kept":
        run(recomputed)
    print(table(results["steps"]), "\nlongest rows:\n", table(results["longest"]), sep="\n")


if __name__ == "__main__":
    main()
