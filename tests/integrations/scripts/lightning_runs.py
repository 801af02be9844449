"""Lightning on a plan; one function a test."""

import json
import sys
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from pytorch_lightning.callbacks import ModelCheckpoint

from packer.errors import PackerError
from packer.integrations.lightning import PlanCallback, PlanDataModule
from tests.integrations import tiny
from tests.integrations.processes import report


class Decoder(pl.LightningModule):
    """Sums its loss; the data module says what the sum is multiplied by."""

    def __init__(self, rate: float = 1.0, adam: bool = False) -> None:
        super().__init__()
        self.decoder = tiny.decoder()
        self.rate = rate
        self.adam = adam
        self.rates: list[float] = []
        self.samples: list[Any] = []

    def training_step(self, batch, batch_idx):
        inputs = {
            name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch
        }
        logits = self.decoder(**inputs, use_cache=False).logits[:, :-1]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        self.samples.append(batch.sample_ids.tolist())
        return loss_sum * self.trainer.datamodule.loss_weight()

    def configure_optimizers(self):
        kind = torch.optim.AdamW if self.adam else torch.optim.SGD
        optimizer = kind(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Record(pl.Callback):
    def on_train_start(self, trainer, module):
        trainer.optimizers[0].register_step_pre_hook(
            lambda optimizer, args, kwargs: module.rates.append(optimizer.param_groups[0]["lr"])
        )


def make_trainer(folder: str, plan, data, *callbacks, **options: Any):
    module = PlanDataModule(plan, data, num_workers=options.pop("num_workers", 0))
    defaults = {
        "accelerator": "cpu",
        "devices": int(sys.argv[2]),
        "strategy": "ddp" if int(sys.argv[2]) > 1 else "auto",
        "accumulate_grad_batches": 4 // int(sys.argv[2]),
        "max_epochs": plan.num_epochs,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "default_root_dir": folder,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
    }
    trainer = pl.Trainer(callbacks=[PlanCallback(module), Record(), *callbacks], **defaults | options)
    return trainer, module


def expected_rates(plan, rate: float) -> list[float]:
    scales = [
        plan.epoch(epoch).step(step).lr_scale
        for epoch in range(plan.num_epochs)
        for step in range(plan.epoch(epoch).num_steps)
    ]
    return [rate * 0.5 ** (step // 2) * scale for step, scale in enumerate(scales)]


def gradient(folder: str) -> dict[str, Any]:
    """One step's gradient, and rates and samples of epochs of different length."""
    data = tiny.Tokens()
    found = {}
    for layout in ("padded", "packed"):
        plan = tiny.plan(data, layout=layout)
        model = Decoder()
        before = tiny.weights(model)
        trainer, module = make_trainer(folder, plan, data, max_steps=1)
        trainer.fit(model, datamodule=module)
        change = before - tiny.weights(model)
        _, expected = tiny.step_gradient(data, tiny.step_samples(plan))
        expected *= plan.epoch(0).step(0).lr_scale
        found[layout] = float((change - expected).abs().max() / expected.abs().max())
    return found


def epochs(folder: str) -> dict[str, Any]:
    """Three epochs of different lengths, with workers: every planned sample, the factor under a schedule."""
    data = tiny.Tokens(90)
    plan = uneven_plan(data)
    model = Decoder(0.1)
    trainer, module = make_trainer(folder, plan, data, num_workers=1)
    trainer.fit(model, datamodule=module)
    return {
        "lengths": [epoch["num_steps"] for epoch in plan.header["epochs"]],
        "samples": model.samples,
        "planned": planned_for(plan, trainer),
        "rates": model.rates,
        "expected": expected_rates(plan, 0.1),
    }


def uneven_plan(data):
    """Return a plan whose epochs differ in their number of steps."""
    for seed in range(100):
        plan = tiny.plan(data, epochs=3, seed=seed, max_tokens=33, packing="next-fit")
        if len({epoch["num_steps"] for epoch in plan.header["epochs"]}) > 1:
            return plan
    raise AssertionError("no plan with uneven epochs found")


def planned_for(plan, trainer) -> list[list[int]]:
    """Read this rank's micro-batches off the plan itself."""
    world, rank = trainer.world_size, trainer.global_rank
    rows = [
        plan.epoch(epoch).microbatch(flat)
        for epoch in range(plan.num_epochs)
        for flat in range(rank, plan.epoch(epoch).num_steps * 4, world)
    ]
    return [row.sample_ids.tolist() for row in rows]


def resume(folder: str) -> dict[str, Any]:
    """Broken off within the second epoch, and taken up again."""
    data = tiny.Tokens(90)
    plan = uneven_plan(data)
    stop = plan.epoch(0).num_steps + 2
    keep = ModelCheckpoint(dirpath=f"{folder}/saves", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = Decoder(0.01, adam=True)
    trainer, module = make_trainer(folder, plan, data, keep)
    trainer.fit(whole, datamodule=module)
    rest = Decoder(0.01, adam=True)
    trainer, module = make_trainer(folder, plan, data)
    trainer.fit(rest, datamodule=module, ckpt_path=f"{folder}/saves/step={stop}.ckpt")
    refused = {}
    other = tiny.plan(data, epochs=3, seed=1000)
    trainer, module = make_trainer(folder, other, data)
    try:
        trainer.fit(Decoder(), datamodule=module, ckpt_path=f"{folder}/saves/step={stop}.ckpt")
    except PackerError as error:
        refused["other plan"] = f"{type(error).__name__}: {error}"
    return {
        "stop": stop,
        "whole": whole.samples,
        "rest": rest.samples,
        "rates": [whole.rates, rest.rates],
        "error": float((tiny.weights(whole) - tiny.weights(rest)).abs().max()),
        "refused": refused,
    }


def refusals(folder: str) -> dict[str, str]:
    """Trainers that would cut something short, or play on."""
    data = tiny.Tokens()
    plan = tiny.plan(data)
    refused = {}
    for reason, options in {
        "accumulate_grad_batches": {"accumulate_grad_batches": 3},
        "limit_train_batches": {"limit_train_batches": 3},
        "max_epochs": {"max_epochs": 2},
    }.items():
        trainer, module = make_trainer(folder, plan, data, **options)
        try:
            trainer.fit(Decoder(), datamodule=module)
        except PackerError as error:
            refused[reason] = f"{type(error).__name__}: {error}"
    return refused


if __name__ == "__main__":
    warnings.filterwarnings("error", category=UserWarning, module="pytorch_lightning.*resum.*")
    result = globals()[sys.argv[1]](sys.argv[3])
    report(json.loads(json.dumps(result)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
