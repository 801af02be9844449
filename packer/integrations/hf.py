"""Hugging Face's Trainer on a plan: its batches, its learning-rate factor, its loss, its position.

``PlanTrainer`` is the Trainer; ``PlanTrainerMixin`` goes in front of any subclass of it::

    class PlanSFTTrainer(PlanTrainerMixin, trl.SFTTrainer): ...

    trainer = PlanTrainer(plan="plan", model=model, args=args, train_dataset=dataset)
    trainer.train()

What the Trainer takes for its data loader is an iterator over the plan's steps: it has no length to be
multiplied, is no ``DataLoader`` to be sharded again, and drops nothing. The whole plan is one epoch of the
Trainer's; at the end of each epoch of the plan it logs, evaluates and saves where its strategies say
``epoch``.

Tested with transformers 4.56 and 5.24, accelerate 1.10 and 1.15, DeepSpeed 0.19.8, TRL 1.16; Ulysses needs
accelerate 1.12.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)

from packer.errors import MissingExtraError
from packer.integrations.accelerate import num_averaged, place_of, rank_and_world
from packer.integrations.hf_limits import (
    attention_of,
    choose_max_steps,
    forward_parameters,
    require_attention,
    require_known_loss,
    require_trainable,
)
from packer.integrations.hf_position import read_position, write_position
from packer.integrations.labels import IGNORE_INDEX, shifted_labels
from packer.plan import Plan, load_plan
from packer.runtime import Batch, PlanLoader, PlanLR, Step, StepInfo, count_loss_tokens

if TYPE_CHECKING:
    # Whether transformers is installed or not, and whatever types it declares: the same here.
    _Mixed = Any
    Trainer = Any
    TrainerCallback = Any
    get_last_checkpoint: Any
else:
    _Mixed = object
    try:
        from transformers import Trainer, TrainerCallback
        from transformers.trainer_utils import get_last_checkpoint
    except ImportError as error:
        raise MissingExtraError(
            f"the Trainer needs transformers: pip install 'microbatch-packer[hf]' ({error})"
        ) from error

_MADE_HERE = frozenset({"labels", "shift_labels", "cu_seqlens", "max_seqlen"})


class PlanTrainerMixin(_Mixed):
    """Put in front of ``Trainer``, or of a subclass of it, to play a plan.

    ``max_steps`` comes from the plan where ``args`` name none. ``lr_scheduler_type`` may be any: the schedule
    keeps the base rate, and the factor is applied while the optimizer steps. A step's loss is the sum over
    its tokens divided by their number on all ranks, under data and sequence parallelism alike.
    ``train_dataset`` is the data set that was analyzed; ``data_collator`` and the batch sizes in ``args``
    serve evaluation only.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | os.PathLike[str],
        loader_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the Trainer, and hold it against the plan.

        Args:
            *args: Of the Trainer.
            plan: A plan, or its directory.
            loader_options: Further arguments of ``PlanLoader``: ``pad_values``, ``token_fields`` …
            **kwargs: Of the Trainer.

        Raises:
            ConfigError: The arguments ask for what the plan does not hold, or for what could not be right.
            PlanError: The plan does not fit this number of processes.
        """
        require_known_loss(type(self).__mro__[type(self).__mro__.index(PlanTrainerMixin) + 1 :])
        super().__init__(*args, **kwargs)
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self._place = place_of(self.accelerator, tp_size=self.get_tp_size())
        require_trainable(self, self.plan, self._place)
        require_attention(self.model, self.plan, self._place["sp_size"])
        self.args: Any = copy.copy(self.args)  # another plan may be played with the user's
        self.args.max_steps = choose_max_steps(self.args, self.plan)
        # The loader goes on where the plan stood: nothing is to be skipped.
        self.args.ignore_data_skip = True
        # What compute_loss returns is divided already; the Trainer is not to divide it again. Older ones have
        # no such flag, and divide where the model takes no loss arguments.
        self._divides_again = (
            not hasattr(self, "loss_is_scaled_for_ga") and not self.model_accepts_loss_kwargs
        )
        self.loss_is_scaled_for_ga = True
        self._loader_options = dict(loader_options or {})
        self._position: dict[str, Any] | None = None
        self._loader: PlanLoader | None = None
        self._step: Step | None = None
        self._counts_loss_tokens = _counts_loss_tokens(self.plan, self.train_dataset)
        self._leave_slices_alone()
        self._playing = _PlanCallback(self)
        # Before all others, which then see the plan's epochs and the rates that the optimizer is given.
        self.callback_handler.callbacks.insert(0, self._playing)

    def _leave_slices_alone(self) -> None:
        """Keep accelerate from gathering and cutting rows that are cut already."""
        adapt = getattr(self.accelerator, "deepspeed_ulysses_dl_adapter", None)
        self.accelerator.deepspeed_ulysses_dl_adapter = lambda dataloader, model: (
            dataloader if adapt is None or isinstance(dataloader, _PlannedSteps) else adapt(dataloader, model)
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the plan's beginning or from the very step at which a checkpoint was written.

        Raises:
            StateError: The checkpoint was written with another plan, or without one.
        """
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        self._position = None if checkpoint is None else read_position(Path(checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the plan's steps, from its beginning or from where the checkpoint stands."""
        options: dict[str, Any] = {
            "device": self.args.device,
            "num_workers": self.args.dataloader_num_workers,
            "persistent_workers": self.args.dataloader_persistent_workers,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            **self._place,
            **self._loader_options,
        }
        self._loader = PlanLoader(self.plan, self.train_dataset, **options)
        if self._position is not None:
            self._loader.load_state_dict(self._position)
        return _PlannedSteps(self._loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: torch.device, *_: Any
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """Take one step of the plan: its micro-batches, and the tokens that its loss is a mean over."""
        step = next(epoch_iterator)
        num_loss_tokens = count_loss_tokens(step) if self._counts_loss_tokens else step.num_loss_tokens
        self._step = step
        inputs = [self._model_inputs(batch) for batch in step]
        return inputs, torch.tensor(max(num_loss_tokens, 1), device=device)

    def _model_inputs(self, batch: Batch) -> dict[str, Any]:
        """Pick what the model takes, labels shifted once for the whole row."""
        taken = forward_parameters(self.model)
        inputs = {name: batch[name] for name in batch if name in taken and name not in _MADE_HERE}
        if "cu_seqlens" in batch and "use_cache" in taken:
            inputs["use_cache"] = False  # with a cache, the samples of a row are not told apart
        inputs["shift_labels"] = shifted_labels(batch)
        if "cu_seqlens" in batch and "flash" in attention_of(self.model):
            edges, longest = batch["cu_seqlens"], batch["max_seqlen"]
            inputs |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        return inputs

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None, *args: Any
    ) -> Any:
        """Do a micro-batch forward and backward; return its share of the step's mean loss, for the log."""
        loss = super().training_step(model, inputs, num_items_in_batch, *args)
        _, world = rank_and_world(self.accelerator)
        # The log is a mean over all processes.
        return loss * (world / self.get_tp_size() / self._num_averaged())

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss whose gradient, averaged over ranks, is that of the step's mean over tokens."""
        if "shift_labels" not in inputs or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels = inputs.pop("shift_labels")
        if self.model_accepts_loss_kwargs and not self.args.label_smoothing_factor:
            outputs = model(
                **inputs, labels=labels, shift_labels=labels, num_items_in_batch=num_items_in_batch
            )
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        else:
            outputs = model(**inputs)
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
            loss_sum = F.cross_entropy(
                logits.float().flatten(0, 1),
                labels.flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="sum",
                label_smoothing=self.args.label_smoothing_factor,
            )
            loss = loss_sum / num_items_in_batch
        loss = loss * self._num_averaged()
        if self._divides_again:
            loss = loss * self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _num_averaged(self) -> int:
        return num_averaged(self.accelerator, tp_size=self.get_tp_size())

    def _get_learning_rate(self) -> Any:
        """Return the rate that the update just made really used, for the log."""
        rate = self._playing.last_rate()
        return super()._get_learning_rate() if rate is None else rate


class PlanTrainer(PlanTrainerMixin, Trainer):
    """The Trainer on a plan."""


class _PlannedSteps:
    """What the Trainer takes for its data loader: the steps of every epoch that the plan holds."""

    def __init__(self, loader: PlanLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Step]:
        while self._loader.epoch < self._loader.plan.num_epochs:
            yield from self._loader


class _PlanCallback(TrainerCallback):
    """Hooks up the rate, and keeps the Trainer's notion of epochs and its checkpoints to the plan."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rate: PlanLR | None = None

    @property
    def current_step(self) -> StepInfo:
        """The step that the Trainer is at: what the rate follows."""
        info: StepInfo = self._trainer._step.info
        return info

    def last_rate(self) -> Any:
        """Return the first group's rate in the last update; None outside of training."""
        return None if self._rate is None else self._rate.get_last_lr()[0]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the rate of the optimizer that really steps follow the plan."""
        optimizer = kwargs["optimizer"]
        if self._rate is None or self._rate.optimizer is not optimizer:
            self._rate = PlanLR(optimizer, self._trainer.plan, self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count epochs as the plan does, and do at their ends what the strategies ask for."""
        step = self.current_step
        num_steps = self._trainer.plan.epoch(step.epoch).num_steps
        state.epoch = step.epoch + (step.index + 1) / num_steps
        # At the very end the Trainer's own epoch ends too, and does all this.
        if step.index + 1 == num_steps and state.global_step < state.max_steps:
            control.should_log |= _is_epoch(args.logging_strategy)
            control.should_evaluate |= _is_epoch(args.eval_strategy)
            control.should_save |= _is_epoch(args.save_strategy)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down where the plan stands."""
        if args.should_save:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_position(checkpoint, self._trainer._loader.state_dict())


def _is_epoch(strategy: Any) -> bool:
    return str(getattr(strategy, "value", strategy)) == "epoch"


def _counts_loss_tokens(plan: Plan, dataset: Any) -> bool:
    """Whether only the labels can tell the number of loss tokens: the same answer on every rank."""
    definition = plan.header.get("loss_tokens")
    return definition is None or (definition == "seqlen - 1" and "labels" in dataset[0])
