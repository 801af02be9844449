"""Fully sharded training where several ranks share each row, in plain torch: FSDP2 and Ulysses.

    torchrun --nproc-per-node 2 examples/train_fsdp2_sp.py                   two ranks share each row
    torchrun --nproc-per-node 8 examples/train_fsdp2_sp.py --sp-size 4       two groups of four
    ... again: goes on where the last checkpoint was taken

Ranks of a group read slices of the same rows, and nothing else. Parameters are sharded over all ranks.
"""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from decoder import Decoder, DecoderConfig
from launched import any_batch, finish, plan_once, start
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention

import packer
from packer.runtime import Batch
from packer.runtime.masks import block_diagonal_mask
from packer.runtime.sequence_parallel import UlyssesAttention

DATA = Path(__file__).parent / "data"


def main() -> None:
    """Plan what is not planned, resume what was begun, train, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--source", type=Path, default=DATA / "instructions.jsonl.gz", help="with a column text"
    )
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizer.json")
    parser.add_argument(
        "--out", type=Path, default=Path("train-output-sp"), help="metrics, plan, checkpoints"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=4096, help="of one packed row, which a group shares"
    )
    parser.add_argument("--sp-size", type=int, default=2, help="ranks that share a row")
    parser.add_argument("--steps", type=int, default=20, help="that this run takes")
    arguments = parser.parse_args()

    device = start()
    dp_size = dist.get_world_size() // arguments.sp_size
    # Groups are neighbouring ranks: sp is the last axis.
    mesh = init_device_mesh(device.type, (dp_size, arguments.sp_size), mesh_dim_names=("dp", "sp"))
    config = packer.PlanConfig(
        max_tokens=arguments.max_tokens,
        layout="packed",
        sp_size=arguments.sp_size,
        dp_size=dp_size,
        grad_accum=2,
        lr_scaling="sqrt",
    )
    plan = plan_once(arguments.source, arguments.tokenizer, arguments.out, config)
    dataset = packer.open_dataset(arguments.source, metrics=arguments.out / "metrics")
    loader = packer.PlanLoader(plan, dataset, mesh=mesh, device=device)

    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=4096, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256
    )
    model = Decoder(shape, UlyssesAttention(attention_for(device), mesh["sp"])).to(device)
    everyone = mesh["dp", "sp"]._flatten("everyone")
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The loader's position is saved beside weights and moments, so that rate and data never drift apart.
    state = {"training": TrainingState(model, optimizer), "loader": loader}
    last = max(arguments.out.glob("checkpoint-*/.metadata"), default=None)  # what is written last
    if last is not None:
        dcp.load(state, checkpoint_id=last.parent)

    # Who reduces the gradients divides them too, or not; one backward tells what makes up for it.
    multiplier = packer.measure_loss_multiplier(model, lambda: model(any_batch(device)))
    for step in islice(loader, arguments.steps):
        if not step.num_loss_tokens:  # on every rank: a mean over no token is no number
            continue
        total = torch.zeros((), device=device)
        for batch in step:
            model.set_requires_gradient_sync(batch.accum + 1 == loader.grad_accum)
            loss_sum = model(batch, **mask_for(device, batch))
            (loss_sum * multiplier / step.num_loss_tokens).backward()
            total += loss_sum.detach()
        with packer.scaled_lr(optimizer, step.lr_scale):
            optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)  # for the report alone
        if dist.get_rank() == 0:
            loss = total.item() / step.num_loss_tokens
            print(f"step {step.index}: loss {loss:.6f} over {step.num_samples} samples")
    dcp.save(state, checkpoint_id=arguments.out / f"checkpoint-{loader.current_step.index + 1:06d}")


class TrainingState:
    """Sharded weights and moments as torch's distributed checkpoint wants them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over this rank's shards."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def attention_for(device: torch.device) -> Any:
    """Return what tells the samples of a packed row apart on this device: edges on a GPU, a mask on a CPU."""
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn
    return scaled_dot_product_attention


def mask_for(device: torch.device, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the mask of the whole row where the attention needs one."""
    return {} if device.type == "cuda" else {"attn_mask": block_diagonal_mask(batch)}


if __name__ == "__main__":
    main()
    finish()
