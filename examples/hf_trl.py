r"""TRL's SFTTrainer on a plan: an adapter is trained, and a planned set that was held out is evaluated.

    packer analyze examples/data/instructions.jsonl.gz --out metrics \
        --text-column text --tokenizer examples/data/tokenizer.json
    seq 0 199 > held-out.txt; seq 200 5010 > train.txt
    packer plan metrics --out plan --sample-ids train.txt --layout packed --max-tokens 4096 --grad-accum 4
    packer plan metrics --out eval-plan --sample-ids held-out.txt --layout packed --max-tokens 4096 \
        --dp-size 2 --remainder keep
    torchrun --nproc-per-node 2 examples/hf_trl.py --metrics metrics --plan plan --eval-plan eval-plan

Put your own model and tokenizer in. Chats are analyzed with ``--messages-column`` and a tokenizer's folder;
nothing changes here.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from hf_trainer import DATA, small_decoder
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig

import packer
from packer.integrations.trl import PlanSFTTrainer


def main() -> None:
    """Train an adapter on the whole plan, or on its first steps, and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, default=DATA / "instructions.jsonl.gz")
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizer.json")
    parser.add_argument("--metrics", type=Path, default=Path("metrics"))
    parser.add_argument("--plan", type=Path, default=Path("plan"))
    parser.add_argument("--eval-plan", type=Path, default=Path("eval-plan"))
    parser.add_argument("--out", type=Path, default=Path("trl-output"), help="checkpoints")
    parser.add_argument("--steps", type=int, default=-1, help="default: all that are planned")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    arguments = parser.parse_args()

    plan = packer.load_plan(arguments.plan)
    dataset = packer.open_dataset(arguments.source, metrics=arguments.metrics)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    trainer = PlanSFTTrainer(
        plan=plan,
        train_dataset=dataset,
        eval_dataset=dataset,  # the plans say which samples of it are meant
        eval_plan=arguments.eval_plan,
        model=small_decoder("sdpa"),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_file=str(arguments.tokenizer), eos_token="<|end|>", pad_token="<|end|>"
        ),
        # This model was never trained, so its embeddings are learnt, too; yours will do with LoRA alone.
        peft_config=LoraConfig(
            r=8, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["embed_tokens"]
        ),
        args=SFTConfig(
            output_dir=str(arguments.out),
            max_length=None,  # the plan's samples are not cut again
            # A step of the plan, shared among as many ranks as there are.
            gradient_accumulation_steps=plan.dp_size * plan.grad_accum // world,
            max_steps=arguments.steps,
            num_train_epochs=plan.num_epochs,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            report_to=[],
            disable_tqdm=True,
            bf16=on_gpu,
            gradient_checkpointing=on_gpu,
            use_cpu=not on_gpu,
            ddp_backend="gloo" if world > 1 and not on_gpu else None,
        ),
    )
    trainer.train(resume_from_checkpoint=arguments.resume)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
