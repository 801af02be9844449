"""What a Trainer must be like to play a plan, and why; all else is refused before the first step."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

from packer.errors import ConfigError, PlanError
from packer.integrations.amount import num_planned_steps, option_for_more
from packer.integrations.hf_inputs import (
    attention_of,
    forward_parameters,
    inner_model,
    plans_pairs,
    takes_pairs,
)
from packer.plan import Plan
from packer.runtime.topology import grad_accum_for
from packer.wording import counted

_LOGGER = logging.getLogger(__name__)

_DEFAULT_EPOCHS = 3.0
"""``num_train_epochs`` of arguments that name none."""

_PREFERENCE_TRAINERS = ("DPO", "KTO", "ORPO", "CPO", "Reward", "BCO")
"""What the names of TRL's trainers begin with whose loss compares answers."""


def choose_max_steps(args: Any, plan: Plan) -> int:
    """Return the number of updates: ``args.max_steps`` where it is set, else all that the plan holds.

    Raises:
        ConfigError: More steps, or another number of epochs, than the plan holds.
    """
    planned, more = num_planned_steps(plan), option_for_more(plan)
    if args.max_steps > planned:
        raise ConfigError(
            f"max_steps={args.max_steps}, and the plan holds {counted(planned, 'step')} in "
            f"{counted(plan.num_epochs, 'epoch')}; plan more with {more}, or lower max_steps"
        )
    if args.max_steps > 0:
        return int(args.max_steps)
    if args.num_train_epochs == _DEFAULT_EPOCHS != plan.num_epochs:
        log = _LOGGER.warning if getattr(args, "process_index", 0) == 0 else _LOGGER.debug
        log(
            "num_train_epochs=3, which is what arguments say that name none, and the plan holds %s: that is "
            "what is trained; set num_train_epochs=%d to say so, or plan more with %s",
            counted(plan.num_epochs, "epoch"),
            plan.num_epochs,
            more,
        )
    elif args.num_train_epochs != plan.num_epochs:
        raise ConfigError(
            f"num_train_epochs={args.num_train_epochs:g}, and the plan holds "
            f"{counted(plan.num_epochs, 'epoch')}, which is what is trained; plan with "
            f"{more}, or set num_train_epochs={plan.num_epochs} or "
            "max_steps"
        )
    return planned


def require_known_loss(classes: Sequence[type], known: Collection[str]) -> None:
    """Refuse a trainer whose own ``compute_loss`` the mixin's would silently replace.

    Args:
        classes: What comes after the mixin in the order in which methods are looked up.
        known: Classes whose loss is next-token prediction, which the mixin computes over the plan's steps.

    Raises:
        ConfigError: One of them has a loss of its own.
    """
    owner = next((kind for kind in classes if "compute_loss" in vars(kind)), None)
    if owner is None or owner.__name__ in known:
        return
    if owner.__name__ == "SFTTrainer":
        cure = "take packer.integrations.trl: PlanSFTTrainer, or PlanSFTMixin in front of a subclass of it"
    elif owner.__name__.startswith(_PREFERENCE_TRAINERS):
        cure = (
            "a loss over two answers needs both of them in one micro-batch: plan the pairs with a budget for "
            "each (--max-tokens chosen=N,rejected=N), and play the plan with PlanLoader in a loop of your own"
        )
    else:
        cure = "use it with Trainer, or override compute_loss in the class that has the mixin"
    raise ConfigError(
        f"{owner.__name__}.compute_loss would not be called: the mixin computes next-token loss over the "
        f"plan's steps; {cure}"
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


def require_model(model: Any, plan: Plan, sp_size: int) -> None:
    """Refuse a model that cannot take the plan's micro-batches, or would mix up the samples in them.

    Raises:
        ConfigError: Names the model, or its attention.
        PlanError: Rows that DeepSpeed's Ulysses attention cannot take.
    """
    name = type(inner_model(model)).__name__
    if takes_pairs(model) and not plans_pairs(plan):
        raise ConfigError(
            f"{name} has an encoder and a decoder, and this plan's samples are single sequences; analyze "
            "source and target (--tokens-column source=… --tokens-column target=…) and plan with a budget "
            "for each (--max-tokens source=N,target=N)"
        )
    if plans_pairs(plan) and (not takes_pairs(model) or len(plan.config["max_tokens"]) != 2):
        raise ConfigError(
            f"{name} cannot play this plan of {', '.join(plan.config['max_tokens'])}: pairs are for models "
            "with an encoder and a decoder, source first; plan one sequence a sample, or play the plan with "
            "PlanLoader in a loop of your own"
        )
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            kind = getattr(adapter.peft_type, "value", adapter.peft_type)
            raise ConfigError(
                f"a {kind} adapter puts tokens of its own in front of every row, for which the "
                "plan has no room; take one that changes weights, such as LoRA"
            )
    _require_attention(model, plan, sp_size)


def _require_attention(model: Any, plan: Plan, sp_size: int) -> None:
    """Refuse attention that mixes up the samples of a packed row, or lacks the mask that it needs."""
    attention = attention_of(model)
    packed = plan.layout == "packed"
    if packed and "position_ids" not in forward_parameters(model):
        raise ConfigError(
            f"{type(inner_model(model)).__name__} takes no position_ids, by which the samples of a packed "
            "row are told apart; plan with --layout padded"
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


def require_evaluable(args: Any, *, is_packed: bool) -> None:
    """Refuse arguments for metrics that this evaluation could not serve.

    Raises:
        ConfigError: Names the argument, the reason and the cure.
    """
    if args.batch_eval_metrics:
        raise ConfigError(
            "batch_eval_metrics=True: compute_metrics is told of the last batch by a loader of accelerate's "
            "alone; leave it out, and let preprocess_logits_for_metrics keep what is gathered small"
        )
    if is_packed and "inputs" in args.include_for_metrics:
        raise ConfigError(
            "include_for_metrics=['inputs'] gathers the rows of a packed eval_plan, which hold several "
            "samples, beside predictions of one row a sample; plan the evaluation with --layout padded"
        )
