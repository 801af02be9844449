r"""Lightning on a plan.

    packer analyze examples/data/instructions.jsonl.gz --out metrics \
        --text-column text --tokenizer examples/data/tokenizer.json
    packer plan metrics --out plan --max-tokens 4096 --dp-size 2 --grad-accum 2 --lr-scaling sqrt
    python examples/lightning_module.py --metrics metrics --plan plan --devices 2

The data module hands out the plan's micro-batches, the callback scales the rate.
"""

import argparse
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from hf_trainer import DATA, small_decoder

import packer
from packer.integrations.labels import shifted_labels
from packer.integrations.lightning import PlanCallback, PlanDataModule


class Decoder(pl.LightningModule):
    """Returns the summed loss times what makes it a mean over the step's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = small_decoder("sdpa")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Do one micro-batch."""
        inputs = {
            name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch
        }
        logits = self.decoder(**inputs, use_cache=False).logits
        loss_sum = F.cross_entropy(logits.flatten(0, 1), shifted_labels(batch).flatten(), reduction="sum")
        if batch.accum == 0 and self.global_rank == 0:
            tokens = max(batch.num_loss_tokens, 1)
            print(f"step {batch.step.index}: loss {loss_sum.item() / tokens:.6f} over its first micro-batch")
        return loss_sum * self.trainer.datamodule.loss_weight()

    def configure_optimizers(self) -> Any:
        """Return an optimizer and any schedule: both keep the base rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train, with a checkpoint that keeps the place in the plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, default=DATA / "instructions.jsonl.gz")
    parser.add_argument("--metrics", type=Path, default=Path("metrics"))
    parser.add_argument("--plan", type=Path, default=Path("plan"))
    parser.add_argument("--out", type=Path, default=Path("lightning-output"), help="checkpoints")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=-1, help="default: all that are planned")
    parser.add_argument("--resume", type=Path, help="a checkpoint")
    arguments = parser.parse_args()

    plan = packer.load_plan(arguments.plan)
    dataset = packer.open_dataset(arguments.source, metrics=arguments.metrics)
    data = PlanDataModule(plan, dataset)
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
        # A step of the plan, shared among as many ranks as there are.
        accumulate_grad_batches=plan.dp_size * plan.grad_accum // arguments.devices,
        max_epochs=plan.num_epochs,
        max_steps=arguments.steps,
        callbacks=[
            PlanCallback(data),
            pl.callbacks.ModelCheckpoint(dirpath=arguments.out, every_n_train_steps=2),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Decoder(), datamodule=data, ckpt_path=arguments.resume)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
