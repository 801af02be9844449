"""DeepSpeed's dynamic batching, ours and theirs, as a user's script drives it; one function a test."""

import contextlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as theirs
from torch import nn

from packer.errors import PackerError
from packer.integrations import deepspeed as ours
from tests.integrations.processes import report

NAME = "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"


class Sequences(torch.utils.data.Dataset):
    """Sequences of vectors with their lengths as labels, and the three callbacks that DeepSpeed asks for."""

    def __init__(self, count: int, seed: int = 0) -> None:
        lengths = random.Random(seed)
        self.sequences = [torch.ones(lengths.randrange(3, 15), 5) * (i + 1) for i in range(count)]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.sequences[index], len(self.sequences[index])

    def collate(self, samples):
        sequences, lengths = zip(*samples, strict=True)
        padded = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        return padded / len(self), torch.tensor(lengths, dtype=torch.float32)

    def pad(self, sample, length: int):
        sequence, label = sample
        return F.pad(sequence, (0, 0, 0, length - len(sequence))), label

    def lengths(self, batch):
        return (batch[0][:, :, 0] != 0).sum(dim=1)

    def ids(self, batch) -> list[int]:
        """Return which samples a batch holds."""
        return [round(float(row[0, 0]) * len(self)) - 1 for row in batch[0]]


def layers() -> list[Any]:
    return [nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5), lambda x: x.sum(dim=(-1, -2))]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        *inner, self.total = layers()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return self.total(self.inner(x.to(self.inner[0].weight.dtype)))


def loss_of(outputs, labels):
    return F.mse_loss(outputs.float(), labels.float().to(outputs.device))


def make_engine(config: dict[str, Any], *, stages: int = 0, **dynamic: Any):
    torch.manual_seed(0)
    model = PipelineModule(layers=layers(), num_stages=stages, loss_fn=loss_of) if stages else Model()
    batching = {"enabled": True, "max_tokens": 24, "lr_scaling_method": "linear"} | dynamic
    sampling = {
        "num_workers": batching.pop("num_workers", 0),
        "pin_memory": batching.pop("pin_memory", False),
        "dynamic_batching": batching,
    }
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "data_efficiency": {"enabled": True, "seed": 7, "data_sampling": sampling},
    } | config
    engine, *_ = deepspeed.initialize(config=settings, model=model)
    return engine


def prepare(engine, data: Sequences, module=ours, **options: Any):
    """Call the function, theirs or ours, and let the engine have the scheduler."""
    loader, scheduler, io = getattr(module, NAME)(
        dataset=data,
        engine=engine,
        dataloader_collate_fn=data.collate,
        sample_padding_fn=data.pad,
        batch_seqlens_fn=data.lengths,
        **options,
    )
    engine.lr_scheduler = scheduler
    return loader, scheduler, io


class Record(list):
    """What the optimizer that really updates the parameters is given: step of the engine, rate."""

    def __init__(self, engine) -> None:
        super().__init__()
        self.engine = engine
        engine.basic_optimizer.register_step_pre_hook(self.note)

    def note(self, optimizer, args, kwargs) -> None:
        entry = [self.engine.global_steps, optimizer.param_groups[0]["lr"]]
        if entry not in self:  # ZeRO updates its groups one after the other
            self.append(entry)


def train(engine, data, loader, scheduler, *, epochs: int = 2, limit: int | None = None) -> list[Any]:
    """Train as DeepSpeed's example does; return each micro-batch's samples, shape and rate."""
    seen = []
    num_steps = min(len(loader) // engine.gradient_accumulation_steps(), limit or 10**9)
    for _ in range(epochs):
        batches = iter(loader)
        scheduler.step(0)
        for _ in range(num_steps):
            for _ in range(engine.gradient_accumulation_steps()):
                batch = next(batches)
                loss = loss_of(engine(batch[0]), batch[1])
                engine.backward(loss)
                seen.append([data.ids(batch), list(batch[0].shape[:2]), scheduler.get_lr()[0]])
                engine.step()
    return seen


def zero(folder: str) -> list[Any]:
    """Every ZeRO stage and precision: what was handed out, and what the real optimizer was given."""
    data = Sequences(90)
    results = []
    for stage, precision in [(0, ""), (1, ""), (2, ""), (3, ""), (0, "bf16"), (1, "bf16"), (3, "bf16")]:
        extra = {precision: {"enabled": True}} if precision else {}
        engine = make_engine({"zero_optimization": {"stage": stage}} | extra, metrics_path=folder)
        loader, scheduler, _ = prepare(engine, data)
        updates = Record(engine)
        seen = train(engine, data, loader, scheduler)
        results.append({"case": f"{stage}{precision}", "seen": seen, "updates": updates})
        engine.destroy()
    return results


def overflow(folder: str) -> list[Any]:
    """fp16 with a loss scale that overflows at first (allowed on the CPU for the test's sake)."""
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.is_fp16_supported = lambda self: True
    accelerator.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
    data = Sequences(200)
    results = []
    for stage in (1, 2, 3):
        fp16 = {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}
        engine = make_engine({"zero_optimization": {"stage": stage}, "fp16": fp16}, metrics_path=folder)
        loader, scheduler, _ = prepare(engine, data)
        updates = Record(engine)
        seen = train(engine, data, loader, scheduler, epochs=1)
        results.append({"seen": seen, "updates": updates, "skipped": engine.skipped_steps})
        engine.destroy()
    return results


def batches(folder: str) -> dict[str, Any]:
    """Beside DeepSpeed's own; packs, random order, workers, a loader of DeepSpeed's making."""
    return both(folder) | variants(folder)


def both(folder: str) -> dict[str, Any]:
    """The same batches and rates as DeepSpeed's, where its faults do not decide."""
    data = Sequences(100)
    seen = {}
    for name, module in (("theirs", theirs), ("ours", ours)):
        engine = make_engine({}, metrics_path=folder, max_batch_size=3)
        ids = [*range(94, 1, -1), *range(20, 40)]  # neither ascending nor each once
        given = {"dataset_seqlens": [len(s) for s in data.sequences], "dataset_filter_ids": ids}
        loader, scheduler, _ = prepare(engine, data, module, **given)
        seen[name] = train(engine, data, loader, scheduler)
        engine.destroy()
    return seen


def variants(folder: str) -> dict[str, Any]:
    """Packs collated together, random order, workers, and a loader of DeepSpeed's own making."""
    data = Sequences(90)
    engine = make_engine({"train_micro_batch_size_per_gpu": 2}, metrics_path=folder, max_batch_size=4)
    loader, scheduler, _ = prepare(engine, data)
    packs = train(engine, data, loader, scheduler, epochs=1)
    engine.destroy()
    options = {"sentence_picking_order": "random", "num_workers": 2, "pin_memory": True}
    engine = make_engine({}, metrics_path=folder, **options)
    loader, scheduler, io = prepare(engine, data)
    shuffled = train(engine, data, loader, scheduler, epochs=1)
    again = [data.ids(batch) for batch in engine.deepspeed_io(**io)]
    engine.destroy()
    return {"packs": packs, "random": shuffled, "io": again}


def checkpoint(folder: str) -> list[Any]:
    """A run that goes on from a checkpoint in the middle of an epoch is the run that was never broken off."""
    data = Sequences(120)
    rank = torch.distributed.get_rank()
    results = []
    for stage in (0, 1, 3):
        options = {"metrics_path": f"{folder}/metrics"}
        config = {
            "zero_optimization": {"stage": stage},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}},
        }
        saves = f"{folder}/saves{stage}"
        whole = _train_from(make_engine(config, **options), data, save_at=3, folder=saves)
        rest = _train_from(make_engine(config, **options), data, load=saves)
        other = make_engine(config, **options, sequence_picking_order="seqlen")
        prepare(other, data)
        with contextlib.suppress(PackerError):
            other.load_checkpoint(saves)
            raise AssertionError("a checkpoint of another plan was loaded")
        other.destroy()
        results.append({"whole": whole, "rest": rest, "rank": rank})
    return results


def _train_from(engine, data, *, save_at: int | None = None, folder: str = "", load: str = "") -> Any:
    """Train two epochs; save within the second, or start from what was saved there."""
    loader, scheduler, _ = prepare(engine, data)
    updates = Record(engine)
    if load:
        engine.load_checkpoint(load)
    seen = []
    num_steps = len(loader) // engine.gradient_accumulation_steps()
    for epoch in range(1 if load else 0, 2):
        first = loader.num_steps_played if load else 0
        batches = iter(loader)
        scheduler.step(0)
        for step in range(first, num_steps):
            for _ in range(engine.gradient_accumulation_steps()):
                batch = next(batches)
                engine.backward(loss_of(engine(batch[0]), batch[1]))
                seen.append(data.ids(batch))
                engine.step()
            if epoch == 1 and step + 1 == save_at:
                engine.save_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()]).double()
    result = {"seen": seen, "updates": list(updates), "weights": weights.tolist(), "steps": num_steps}
    engine.destroy()
    return result


def pipeline(folder: str, whose: str, stages: str) -> dict[str, Any]:
    """Stages that exchange tensors of one shape a step."""
    data = Sequences(240)
    engine = make_engine(
        {"gradient_accumulation_steps": 4},
        stages=int(stages),
        metrics_path=folder,
        lr_scaling_method="sqrt",
        sequence_picking_order="seqlen",
    )
    given = {"dataset_seqlens": [len(s) for s in data.sequences]} if whose == "theirs" else {}
    loader, scheduler, _ = prepare(engine, data, ours if whose == "ours" else theirs, **given)
    updates = Record(engine)
    losses, states = [], []
    for _ in range(2):
        batches = iter(loader)
        scheduler.step(0)
        for _ in range(min(len(loader) // engine.gradient_accumulation_steps(), 5)):
            engine.reset_activation_shape()
            losses.append(float(engine.train_batch(data_iter=batches)))
            states.append(scheduler.state_dict()["loader"] if whose == "ours" else None)
    return {"losses": losses, "updates": updates, "states": states}


def metrics(folder: str) -> dict[str, Any]:
    """Who makes metrics and plan: rank 0; with unshared disks one process a node; never twice."""
    data = Sequences(90)
    rank = torch.distributed.get_rank()
    found = {}
    for place in ("shared", "shared", f"unshared{rank}"):
        if place.startswith("unshared"):
            os.environ["LOCAL_RANK"] = "0"  # each on a node of its own
        engine = make_engine({}, metrics_path=f"{folder}/{place}")
        prepare(engine, data)
        engine.destroy()
        files = sorted(Path(folder, place).rglob("*.*"))
        found.setdefault(place, []).append([[str(f), f.stat().st_ino, f.stat().st_mtime_ns] for f in files])
    refusals = {}
    for reason, options, given in [
        ("differ", {"metrics_path": f"{folder}/differ{rank}"}, {"seed": rank}),
        ("missing", {"metrics_path": f"{folder}/missing"}, {"measure": False}),
        ("count", {"metrics_path": f"{folder}/shared"}, {"count": 91}),
        ("disabled", {"enabled": False}, {}),
        ("empty", {"metrics_path": f"{folder}/shared", "max_tokens": 2}, {}),
        ("minimum", {"metrics_path": f"{folder}/shared", "min_batch_size": 30}, {}),
        ("budget", {"metrics_path": f"{folder}/shared", "max_tokens": 0}, {}),
        ("bounds", {"metrics_path": f"{folder}/shared", "min_batch_size": 3, "max_batch_size": 2}, {}),
        ("ids", {"metrics_path": f"{folder}/shared"}, {"ids": [3, 90]}),
    ]:
        engine = make_engine({}, **options)
        own = Sequences(given.get("count", 90), given.get("seed", 0))
        if not given.get("measure", True):
            own.lengths = None
        try:
            prepare(engine, own, **({"dataset_filter_ids": given["ids"]} if "ids" in given else {}))
        except PackerError as error:
            refusals[reason] = f"{type(error).__name__}: {error}"
        engine.destroy()
    return {"found": found, "refusals": refusals}


if __name__ == "__main__":
    # Or the first start compiles a kernel for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    result = globals()[sys.argv[1]](*sys.argv[2:])
    report(json.loads(json.dumps(result)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
