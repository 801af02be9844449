"""Run a function on several ranks of one process group, and collect what each returns."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# The server imports torch once; each rank is then a fork of it that has never run a thread.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
)

TIMEOUT_S = 240

FSDP2_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
"""Whether this torch can run FSDP2 without a GPU: 2.6 cannot."""

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]
"""For ``parametrize("backend", BACKENDS)``: CPU processes, and one GPU a process."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Call ``function(device, *arguments)`` on each rank; return what the ranks returned, in their order.

    The function lives at the top of a module. The first rank to fail ends the others, which wait for it.
    """
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        children, pipes = [], []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            child = _CONTEXT.Process(
                target=_run_rank,
                args=(theirs, function, rank, world_size, Path(folder) / "store", backend, arguments),
                daemon=True,
            )
            child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
        try:
            return _collect(pipes)
        finally:
            for child in children:
                child.join(5 if child.exitcode is None else None)
                child.kill()
                child.join()
                child.close()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=TIMEOUT_S)
        assert ready, f"ranks {sorted(set(range(len(pipes))) - set(results))} did not return in {TIMEOUT_S} s"
        for pipe in ready:
            rank = pipes.index(pipe)
            ok, value = pipe.recv()
            assert ok, f"rank {rank}: {value}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: Path,
    backend: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            result = function(device, *arguments)
            dist.barrier()  # a rank that left early would break the connections that a slower one still makes
            pipe.send((True, result))
        finally:
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
