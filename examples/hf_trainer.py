r"""Hugging Face's Trainer on a plan, on any number of processes.

    packer analyze examples/data/instructions.jsonl.gz --out metrics \
        --text-column text --tokenizer examples/data/tokenizer.json
    packer plan metrics --out plan --max-tokens 4096 --dp-size 2 --grad-accum 2 --lr-scaling sqrt
    torchrun --nproc-per-node 2 examples/hf_trainer.py --metrics metrics --plan plan

With Ulysses, two ranks share every row. SDPA takes rows of one sample each, FlashAttention packed ones:

    packer plan metrics --out plan-sp --max-tokens 4096 --grad-accum 8 --sp-size 2 --max-samples 1
    accelerate launch --config_file examples/hf_ulysses.yaml \
        examples/hf_trainer.py --metrics metrics --plan plan-sp
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import packer
from packer.integrations.hf import PlanTrainer

DATA = Path(__file__).parent / "data"


def main() -> None:
    """Train a small decoder on the whole plan, or on its first steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, default=DATA / "instructions.jsonl.gz")
    parser.add_argument("--metrics", type=Path, default=Path("metrics"))
    parser.add_argument("--plan", type=Path, default=Path("plan"))
    parser.add_argument("--out", type=Path, default=Path("hf-output"), help="checkpoints")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--steps", type=int, default=-1, help="default: all that are planned")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    arguments = parser.parse_args()

    plan = packer.load_plan(arguments.plan)
    ranks_per_row = int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dp_size = world // ranks_per_row
    on_gpu = torch.cuda.is_available()
    with_deepspeed = "ACCELERATE_USE_DEEPSPEED" in os.environ
    if with_deepspeed and not on_gpu:  # or DeepSpeed compiles a kernel for a minute
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    trainer = PlanTrainer(
        plan=plan,
        train_dataset=packer.open_dataset(arguments.source, metrics=arguments.metrics),
        model=small_decoder(arguments.attention),
        args=TrainingArguments(
            output_dir=str(arguments.out),
            # A step of the plan, shared among as many ranks as there are.
            gradient_accumulation_steps=plan.dp_size * plan.grad_accum // dp_size,
            per_device_train_batch_size=1,  # the plan decides; Ulysses wants to hear of one row
            max_steps=arguments.steps,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            logging_steps=1,
            save_strategy="steps",
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            # Without a GPU: gloo; DeepSpeed finds its CPU device by itself.
            use_cpu=not on_gpu and not with_deepspeed,
            ddp_backend="gloo" if world > 1 and not on_gpu else None,
        ),
    )
    trainer.train(resume_from_checkpoint=arguments.resume)


def small_decoder(attention: str) -> LlamaForCausalLM:
    """Make a decoder that a CPU can train."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
