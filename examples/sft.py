r"""Fine-tuning on chats with Hugging Face's Trainer: packed rows, evaluation, loss on the assistant alone.

    python examples/sft.py prepare            # once: measure the chats, plan training and evaluation
    python examples/sft.py train
    python examples/sft.py train --resume     # from the last checkpoint, in the middle of an epoch, too

On your own chats, with a model that is on this machine, on two GPUs:

    python examples/sft.py prepare --chats chats.jsonl --column messages --tokenizer path/of/model --dp-size 2
    torchrun --nproc-per-node 2 examples/sft.py train --chats chats.jsonl --tokenizer path/of/model \
        --model path/of/model
"""

import argparse
from pathlib import Path

import packer
from packer.report import summarize, summary_lines

DATA = Path(__file__).parent / "data"
EVALUATE_EVERY = 10
"""One chat in so many is held out."""


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=["prepare", "train"])
    parser.add_argument("--chats", type=Path, default=DATA / "chats.jsonl.gz")
    parser.add_argument("--column", default="conversations", help="the chats; their tools stand in `tools`")
    parser.add_argument("--tokenizer", type=Path, default=DATA, help="folder of a chat model's tokenizer")
    parser.add_argument("--model", type=Path, help="default: a small one that a CPU can train")
    parser.add_argument("--out", type=Path, default=Path("sft"), help="metrics, plans, checkpoints")
    parser.add_argument("--max-tokens", type=int, default=2560, help="of a packed row")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dp-size", type=int, default=1, help="processes")
    parser.add_argument("--grad-accum", type=int, default=2, help="rows of a process in an update")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=-1, help="default: all that are planned")
    parser.add_argument("--every", type=int, default=10, help="steps from one evaluation to the next")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    (prepare if arguments.stage == "prepare" else train)(arguments)


def prepare(arguments: argparse.Namespace) -> None:
    """Measure every chat once, and decide what training and evaluation will read."""
    result = packer.analyze(
        arguments.chats,
        out=arguments.out / "metrics",
        messages_column=arguments.column,
        tokenizer=arguments.tokenizer,
        overwrite=True,
    )
    print(f"loss on {result.num_loss_tokens:,} of {result.main.total:,} tokens ({result.trained_part})")
    metrics = packer.open_metrics(arguments.out / "metrics")
    held_out = range(0, metrics.num_samples, EVALUATE_EVERY)
    shape = {"max_tokens": arguments.max_tokens, "layout": "packed", "dp_size": arguments.dp_size}
    training = packer.PlanConfig(
        **shape,
        grad_accum=arguments.grad_accum,
        epochs=arguments.epochs,
        too_long="drop",
        sample_ids=[row for row in range(metrics.num_samples) if row not in held_out],
    )
    plan = packer.make_plan(metrics, training, out=arguments.out / "plan", overwrite=True)
    # Chats that are too long are dropped: the lines say how many.
    print(plan, *summary_lines(summarize(plan)), sep="\n")
    # Every chat that is held out comes once, so nothing is dropped to fill a step.
    evaluation = packer.PlanConfig(**shape, remainder="keep", too_long="drop", sample_ids=held_out)
    print(packer.make_plan(metrics, evaluation, out=arguments.out / "eval-plan", overwrite=True))


def train(arguments: argparse.Namespace) -> None:
    """Play the plan: the same chats in the same rows, also after a crash."""
    import torch
    from transformers import TrainingArguments

    from packer.integrations.hf import PlanTrainer

    # Each process opens the files; which chat is in which row was decided before.
    dataset = packer.open_dataset(
        arguments.chats, metrics=arguments.out / "metrics", tokenizer=str(arguments.tokenizer)
    )
    print(dataset)
    on_gpu = torch.cuda.is_available()
    trainer = PlanTrainer(
        plan=arguments.out / "plan",
        train_dataset=dataset,
        eval_dataset=dataset,
        eval_plan=arguments.out / "eval-plan",
        model=load_model(arguments.model),
        args=TrainingArguments(
            output_dir=str(arguments.out / "checkpoints"),
            gradient_accumulation_steps=arguments.grad_accum,
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            eval_strategy="steps",
            eval_steps=arguments.every,
            save_strategy="steps",
            save_steps=arguments.every,
            save_total_limit=2,
            load_best_model_at_end=True,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            bf16=on_gpu,
            use_cpu=not on_gpu,
        ),
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    print(f"loss on the chats held out: {trainer.evaluate()['eval_loss']:.4f}")
    trainer.save_model(str(arguments.out / "model"))


def load_model(folder: Path | None):
    """Return a model whose attention keeps the chats of a packed row apart."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
