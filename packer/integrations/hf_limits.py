"""What a Trainer must be like to play a plan, and why; all else is refused before the first step."""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from packer.errors import ConfigError, PlanError
from packer.plan import Plan
from packer.runtime.topology import grad_accum_for
from packer.wording import counted

_KNOWN_LOSSES = ("Trainer", "SFTTrainer")
"""Their loss is next-token prediction, which the mixin computes over the plan's steps."""

_DEFAULT_EPOCHS = 3.0
"""``num_train_epochs`` of arguments that name none."""


def choose_max_steps(args: Any, plan: Plan) -> int:
    """Return the number of updates: ``args.max_steps`` where it is set, else all that the plan holds.

    Raises:
        ConfigError: More steps, or another number of epochs, than the plan holds.
    """
    planned = sum(epoch["num_steps"] for epoch in plan.header["epochs"])
    if args.max_steps > planned:
        raise ConfigError(
            f"max_steps={args.max_steps}, and the plan holds {counted(planned, 'step')} in "
            f"{counted(plan.num_epochs, 'epoch')}; plan more with --epochs, or lower max_steps"
        )
    if args.max_steps > 0:
        return int(args.max_steps)
    if args.num_train_epochs not in (_DEFAULT_EPOCHS, plan.num_epochs):
        raise ConfigError(
            f"num_train_epochs={args.num_train_epochs:g}, and the plan holds "
            f"{counted(plan.num_epochs, 'epoch')}, which is what is trained; plan with "
            f"--epochs, or set num_train_epochs={plan.num_epochs} or "
            "max_steps"
        )
    return int(planned)


def require_known_loss(classes: Sequence[type]) -> None:
    """Refuse a trainer whose own ``compute_loss`` the mixin's would silently replace.

    Args:
        classes: What comes after the mixin in the order in which methods are looked up.

    Raises:
        ConfigError: One of them has a loss of its own.
    """
    owner = next((kind for kind in classes if "compute_loss" in vars(kind)), None)
    if owner is None or owner.__name__ in _KNOWN_LOSSES:
        return
    raise ConfigError(
        f"{owner.__name__}.compute_loss would not be called: the mixin computes next-token loss over the "
        "plan's "
        "steps; use it with Trainer or SFTTrainer, or override compute_loss in the class that has the mixin"
    )


def require_trainable(trainer: Any, plan: Plan, place: dict[str, int]) -> None:
    """Refuse arguments under which the Trainer would change a planned batch, or its loss.

    Raises:
        ConfigError: Names the argument, the reason and the cure.
        PlanError: The plan does not fit this number of processes.
    """
    args = trainer.args
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True: the plan fixes every batch; leave it out, and plan with a smaller "
            "--max-tokens where memory runs out"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process with {args.n_gpu} GPUs would cut batches with nn.DataParallel; start one process "
            "a GPU, with torchrun or accelerate launch"
        )
    if getattr(args, "loss_type", None) == "dft":
        raise ConfigError(
            "loss_type='dft' weighs tokens by their probability, and a plan's loss is their plain mean; "
            "leave it out"
        )
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "compute_loss_func would be handed labels that are not shifted; override compute_loss "
            "instead: its inputs hold shift_labels, and num_items_in_batch is the step's number of loss "
            "tokens"
        )
    grad_accum = grad_accum_for(place["dp_size"], plan.dp_size, plan.grad_accum)
    if args.gradient_accumulation_steps != grad_accum:
        raise ConfigError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}, and on "
            f"{counted(place['dp_size'], 'data-parallel rank')} a step of the plan has "
            f"{counted(grad_accum, 'micro-batch')} a rank; set "
            f"gradient_accumulation_steps={grad_accum}, or plan again with --dp-size {place['dp_size']} "
            f"--grad-accum {args.gradient_accumulation_steps}"
        )


def attention_of(model: Any) -> str:
    """Return the name of a model's attention; empty where it has none."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def forward_parameters(model: Any) -> Collection[str]:
    """Return what a model's ``forward`` takes; of an adapter around a model, what that one takes."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(inner.forward).parameters


def require_attention(model: Any, plan: Plan, sp_size: int) -> None:
    """Refuse attention that mixes up the samples of a packed row, or lacks the mask that it needs.

    Raises:
        ConfigError: Names the attention.
        PlanError: Rows that DeepSpeed's Ulysses attention cannot take.
    """
    attention = attention_of(model)
    packed = plan.layout == "packed"
    if packed and "position_ids" not in forward_parameters(model):
        raise ConfigError(
            f"{type(model).__name__} takes no position_ids, by which the samples of a packed row are told "
            "apart; plan with --layout padded"
        )
    if sp_size == 1:
        return
    if "eager" in attention:
        raise ConfigError(
            f"attn_implementation={attention!r} needs a mask of the whole row, which no rank of {sp_size} "
            "that share it has; load the model with attn_implementation='flash_attention_2'"
            + ("" if packed else ", or 'sdpa'")
        )
    if packed and "flash" not in attention:
        raise ConfigError(
            f"attn_implementation={attention!r} with packed rows and sp_size={sp_size}: DeepSpeed's "
            "Ulysses attention drops the mask that keeps the samples of a row apart, so they would see "
            "each other; load the model with attn_implementation='flash_attention_2', or plan with "
            "--layout padded --max-samples 1"
        )
    if not packed and plan.config.get("max_samples") != 1:
        raise PlanError(
            f"DeepSpeed's Ulysses attention (sp_size={sp_size}) takes micro-batches of one row, and this "
            "plan's have several; plan with --layout packed, or with --max-samples 1"
        )
