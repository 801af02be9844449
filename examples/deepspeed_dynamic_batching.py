"""DeepSpeed's dynamic batching with one import changed.

    deepspeed --num_gpus 2 examples/deepspeed_dynamic_batching.py
    torchrun --nproc-per-node 2 examples/deepspeed_dynamic_batching.py               without a GPU
    torchrun --nproc-per-node 2 examples/deepspeed_dynamic_batching.py --stages 2    two pipeline stages

The data set brings three callbacks, as in DeepSpeed's own example. The first run measures it and plans;
later ones find both in ``--metrics``.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812
from deepspeed.pipe import PipelineModule
from tokenizers import Tokenizer
from torch import nn

from packer.integrations.deepspeed import (  # instead of deepspeed.runtime.data_pipeline.data_sampling…
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
)

DATA = Path(__file__).parent / "data"


class Instructions(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Token ids, and the id that follows each: −100 at the end."""

    def __init__(self, source: Path, tokenizer: Path) -> None:
        encoder = Tokenizer.from_file(str(tokenizer))
        with gzip.open(source, "rt") as lines:
            self.ids = [torch.tensor(encoder.encode(json.loads(line)["text"]).ids) for line in lines]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.ids[index]
        return ids, F.pad(ids[1:], (0, 1), value=-100)

    def collate(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make a batch, as long as its longest sample."""
        ids, labels = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad(list(ids), batch_first=True), pad(list(labels), batch_first=True, padding_value=-100)

    def pad(
        self, sample: tuple[torch.Tensor, torch.Tensor], length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad one sample, so that the micro-batches of a step have one shape."""
        ids, labels = sample
        missing = length - len(ids)
        return F.pad(ids, (0, missing)), F.pad(labels, (0, missing), value=-100)

    def seqlens(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Measure the samples of a batch: all their labels, and the one that is −100."""
        return (batch[1] != -100).sum(dim=1) + 1


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a micro-batch: 0, and no NaN, where it has nothing to predict."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss / (labels != -100).sum().clamp(min=1)


def main() -> None:
    """Train two epochs, as DeepSpeed's example does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, default=DATA / "instructions.jsonl.gz")
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizer.json")
    parser.add_argument("--metrics", type=Path, default=Path("deepspeed-metrics"))
    parser.add_argument("--stages", type=int, default=0, help="pipeline stages")
    parser.add_argument("--steps", type=int, help="of each epoch; default: all")
    parser.add_argument("--local_rank", type=int, help="set by DeepSpeed's launcher")
    arguments = parser.parse_args()

    if not torch.cuda.is_available():  # or DeepSpeed compiles a kernel for a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False)
    data = Instructions(arguments.source, arguments.tokenizer)
    torch.manual_seed(0)
    layers = [nn.Embedding(4096, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4096)]
    model = nn.Sequential(*layers)
    if arguments.stages:
        model = PipelineModule(layers=layers, num_stages=arguments.stages, loss_fn=loss_of)
    engine, *_ = deepspeed.initialize(model=model, config=configuration(arguments.metrics))

    dataloader, lr_scheduler, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        dataset=data,
        engine=engine,
        dataloader_collate_fn=data.collate,
        sample_padding_fn=data.pad,
        batch_seqlens_fn=data.seqlens,
    )
    engine.lr_scheduler = lr_scheduler

    num_steps = len(dataloader) // engine.gradient_accumulation_steps()
    for epoch in range(2):
        batches = iter(dataloader)
        lr_scheduler.step(0)
        for step in range(min(num_steps, arguments.steps or num_steps)):
            if arguments.stages:
                engine.reset_activation_shape()
                loss = engine.train_batch(data_iter=batches)
            else:
                for _ in range(engine.gradient_accumulation_steps()):
                    ids, labels = (tensor.to(engine.device) for tensor in next(batches))
                    loss = loss_of(engine(ids), labels)
                    engine.backward(loss)
                    engine.step()
            if engine.global_rank == 0:
                rate = lr_scheduler.get_last_lr()[0]
                print(f"epoch {epoch} step {step}: loss {loss.item():.6f} at rate {rate:.3g}")
    torch.distributed.destroy_process_group()


def configuration(metrics: Path) -> dict[str, Any]:
    """Return a DeepSpeed configuration with dynamic batching."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": not torch.cuda.is_available()}},
        "steps_per_print": None,
        "data_efficiency": {
            "enabled": True,
            "seed": 1,
            "data_sampling": {
                "num_workers": 0,
                "dynamic_batching": {
                    "enabled": True,
                    "metrics_path": str(metrics),
                    "max_tokens": 2048,
                    "lr_scaling_method": "sqrt",
                    "sequence_picking_order": "random",
                },
            },
        },
    }


if __name__ == "__main__":
    main()
