"""TRL's SFTTrainer on a plan: any data set of ours, its own for nothing but the training arguments.

    trainer = PlanSFTTrainer(
        plan="plan",
        model=model,
        processing_class=tokenizer,
        train_dataset=packer.open_dataset("chats.jsonl", metrics="metrics"),
        args=SFTConfig(max_length=None),
        peft_config=LoraConfig(),
    )

SFTTrainer would tokenize, cut, pack and mask; all of that was decided when the data set was analyzed and the
plan made. Arguments that would decide it otherwise are refused by name. ``PlanSFTMixin`` goes in front of a
subclass of SFTTrainer.

Tested with TRL 1.16 and PEFT 0.21.
"""

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from packer.errors import ConfigError, MissingExtraError
from packer.integrations.hf import PlanTrainerMixin
from packer.integrations.hf_evaluation import as_plan
from packer.plan import Plan

if TYPE_CHECKING:
    # Whether TRL is installed or not, and whatever types it declares: the same here.
    Rows = Any
    SFTConfig = Any
    SFTTrainer = Any
else:
    try:
        from datasets import Dataset as Rows
        from trl import SFTConfig, SFTTrainer
    except ImportError as error:
        raise MissingExtraError(
            f"PlanSFTTrainer needs TRL: pip install 'microbatch-packer[trl]' ({error})"
        ) from error

_DECIDED_BEFORE = {
    "packing": "the plan packs; plan with --layout packed",
    "eval_packing": "a plan packs; give eval_plan, planned with --layout packed",
    "padding_free": "the plan decides on padding; plan with --layout packed",
    "shuffle_dataset": "the plan has its order; plan with --order random",
    "assistant_only_loss": "labels are the data set's; analyze chats with --train-on assistant",
    "completion_only_loss": "labels are the data set's; analyze prompts with --train-on completion",
    "chat_template_path": "chats were rendered when they were measured; analyze with a tokenizer that has it",
}
"""Argument of SFTConfig → why it would come too late, and where that is decided."""


class PlanSFTMixin(PlanTrainerMixin):
    """Put in front of a subclass of ``SFTTrainer`` to play a plan; see ``PlanTrainerMixin``."""

    known_losses: ClassVar[tuple[str, ...]] = ("Trainer", "SFTTrainer")

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        plan: Plan | str | os.PathLike[str],
        formatting_func: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make the Trainer, and hold it against the plan.

        Args:
            model: Of SFTTrainer.
            args: An ``SFTConfig``.
            plan: A plan, or its directory.
            formatting_func: Refused: the samples are token ids.
            **kwargs: Of ``PlanTrainerMixin``, and of SFTTrainer: ``processing_class``, ``peft_config`` …

        Raises:
            ConfigError: The arguments ask for what the plan does not hold, or for what could not be right.
            PlanError: The plan does not fit this number of processes.
            SourceChangedError: A data set has another number of samples than its plan was made for.
        """
        plan = as_plan(plan)
        if formatting_func is not None:
            raise ConfigError(
                "formatting_func would format samples that are token ids; analyze with --text-template, or "
                "let the data set that you analyze format them"
            )
        _require_decided_before(args, plan)
        args = copy.copy(args)
        args.dataset_kwargs = dict(args.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
        super().__init__(model, args, plan=plan, **kwargs)

    def _shown(self, dataset: Any, what: str) -> Any:
        """One row in place of a data set of any kind: SFTTrainer looks at its type and its columns."""
        sample = dataset[0] if hasattr(dataset, "__getitem__") else None
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            raise ConfigError(
                f"{what} has no samples of token ids under input_ids, which a plan is about; give "
                "packer.open_dataset(…), which tokenizes as the data set was measured"
            )
        return Rows.from_list(
            [{name: np.asarray(sample[name]).tolist() for name in ("input_ids", "labels") if name in sample}]
        )


class PlanSFTTrainer(PlanSFTMixin, SFTTrainer):
    """TRL's SFTTrainer on a plan."""


def _require_decided_before(args: Any, plan: Plan) -> None:
    """Refuse arguments that would change samples after they were measured and planned.

    Raises:
        ConfigError: Names the argument, the reason and the cure.
    """
    if not hasattr(args, "dataset_text_field"):
        raise ConfigError(
            f"args is {'missing' if args is None else 'a ' + type(args).__name__}; give an SFTConfig, whose "
            "max_length is None or holds the plan's longest sample"
        )
    for name, reason in _DECIDED_BEFORE.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name}={getattr(args, name)!r} comes too late: {reason}; leave {name} out")
    if args.dataset_text_field != SFTConfig.dataset_text_field:
        raise ConfigError(
            f"dataset_text_field={args.dataset_text_field!r} comes too late: the samples are token ids; "
            f"analyze with --text-column {args.dataset_text_field}, and leave dataset_text_field out"
        )
    if isinstance(args.pad_to_multiple_of, int):
        raise ConfigError(
            f"pad_to_multiple_of={args.pad_to_multiple_of} comes too late: the plan has its shapes; plan "
            f"with --pad-multiple {args.pad_to_multiple_of}, and leave pad_to_multiple_of out"
        )
    longest = _longest(plan)
    if args.max_length is not None and args.max_length < longest:
        default = ", SFTConfig's default," if args.max_length == SFTConfig.max_length else ""
        raise ConfigError(
            f"max_length={args.max_length}{default} is below the {longest:,} tokens of the plan's longest "
            "sample, and the plan's samples are not cut again; set max_length=None, or plan with "
            f"--max-seqlen {args.max_length} --too-long truncate"
        )


def _longest(plan: Plan) -> int:
    """Return the number of tokens of the longest sample, or piece, of any step."""
    parts = (part for epoch in range(plan.num_epochs) for part in plan.epoch(epoch).steps())
    return max(int(part.max_seqlen.max()) for part in parts)
