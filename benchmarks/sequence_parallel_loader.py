"""How long does a rank wait for its slice of a row: read from the plan, or gathered by DeepSpeed's adapter?

Both read the same memory-mapped tokens in the training process, on two ranks that share rows of one length,
and end with ``input_ids, position_ids, shift_labels`` in host memory, where the adapter leaves them, or on
the device. ``UlyssesSPDataLoaderAdapter`` wraps a ``DataLoader`` of ready-made whole rows: every rank reads
one of its own, all are gathered on all ranks, and each keeps its slices. Where DeepSpeed is not installed,
ours is timed alone.

    torchrun --nproc-per-node 2 benchmarks/sequence_parallel_loader.py --out sequence_parallel_loader.json
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader

LENGTHS = (4_096, 32_768, 131_072, 524_288)
MICROBATCHES = 64
UNTIMED = 8
STRIDE = 4096


class Rows:
    """Samples of one length, anywhere in a memory-mapped file of random tokens."""

    def __init__(self, path: Path, length: int) -> None:
        self._tokens = np.load(path, mmap_mode="r")
        self._length = length

    def __len__(self) -> int:
        return MICROBATCHES

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return self.read_slice(sample_id, 0, self._length)

    def read_slice(self, sample_id: int, start: int, stop: int) -> dict[str, Any]:
        first = sample_id * STRIDE
        return {"input_ids": self._tokens[first + start : first + min(stop, self._length)]}


class WholeRows(Rows):
    """The same as rows of tensors, as a collator for the adapter makes them."""

    def __getitem__(self, sample_id: int) -> dict[str, torch.Tensor]:
        input_ids = torch.from_numpy(super().__getitem__(sample_id)["input_ids"].astype(np.int64))[None]
        labels = input_ids.clone()
        labels[:, 0] = -100
        position_ids = torch.arange(input_ids.shape[1])[None]
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def own_device(mesh: DeviceMesh) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device("cpu")
    )


def planned(path: Path, length: int, mesh: DeviceMesh, device: torch.device | None) -> Iterator[Any]:
    """This rank's slices, found in the plan."""
    config = PlanConfig(max_tokens=length, layout="packed", order="sequential", sp_size=mesh["sp"].size())
    plan = make_plan(np.full(MICROBATCHES, length), config)
    return iter(PlanLoader(plan, Rows(path, length), mesh=mesh, device=device).microbatches())


def gathered(path: Path, length: int, mesh: DeviceMesh, device: torch.device | None) -> Iterator[Any] | None:
    """This rank's slices, gathered by DeepSpeed."""
    try:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    except ImportError as error:
        print(f"without DeepSpeed: {error}")
        return None
    # Or it compiles its own collectives for the CPU first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    group, rank, size = mesh["sp"].get_group(), mesh["sp"].get_local_rank(), mesh["sp"].size()
    own = DataLoader(WholeRows(path, length), batch_size=None, sampler=range(rank, MICROBATCHES, size))
    adapter = UlyssesSPDataLoaderAdapter(own, rank, group, size, device or own_device(mesh))
    if device is None:
        return iter(adapter)
    return ({name: value.to(device) for name, value in batch.items()} for batch in adapter)


def microseconds(batches: Iterator[Any], size: int, device: torch.device) -> float:
    """Median time of a micro-batch, over as many at a time as the adapter gathers at once."""
    times = []
    for _ in range(MICROBATCHES // size):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(size):
            next(batches)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) / size)
    return 1e6 * statistics.median(times[UNTIMED // size :])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    mesh = init_device_mesh(device.type, (1, dist.get_world_size()), mesh_dim_names=("dp", "sp"))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        tokens = np.random.default_rng(0).integers(0, 50_000, MICROBATCHES * STRIDE + max(LENGTHS), np.int32)
        np.save(path, tokens)
        for length in LENGTHS:
            result: dict[str, Any] = {"row_length": length, "sp": mesh["sp"].size()}
            for where, to in (("host", None), ("device", device)):
                for name, make in (("planned", planned), ("gathered", gathered)):
                    batches = make(path, length, mesh, to)
                    if batches is not None:
                        result[f"{name}_{where}_us"] = microseconds(batches, mesh["sp"].size(), device)
            results.append(result)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        for result in results:
            print(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
