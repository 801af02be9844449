"""Hugging Face's Trainer on a plan: its batches, its learning-rate factor, its loss, its position.

``PlanTrainer`` is the Trainer; ``PlanTrainerMixin`` goes in front of any subclass of it that has no loss of
its own, and ``packer.integrations.trl`` has TRL's SFTTrainer::

    trainer = PlanTrainer(plan="plan", model=model, args=args, train_dataset=dataset)
    trainer.train()

What the Trainer takes for its data loader is an iterator over the plan's steps: it has no length to be
multiplied, is no ``DataLoader`` to be sharded again, and drops nothing. The whole plan is one epoch of the
Trainer's; at the end of each epoch of the plan it logs, evaluates and saves where its strategies say
``epoch``.

The loss is computed here, from the logits: a model is never handed labels, so what it would make of them,
shifting them once more or taking a mean of its own, cannot matter.

Tested with transformers 4.56 and 5.24, accelerate 1.10 and 1.15, DeepSpeed 0.19.8, PEFT 0.21; Ulysses needs
accelerate 1.12.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from packer.errors import ConfigError, MissingExtraError
from packer.integrations.accelerate import num_averaged, place_of, rank_and_world
from packer.integrations.hf_eval_batches import PaddingCollator
from packer.integrations.hf_evaluation import PlanEvaluationMixin, as_plan
from packer.integrations.hf_inputs import SHIFTED, model_inputs, plans_pairs
from packer.integrations.hf_limits import (
    choose_max_steps,
    require_known_loss,
    require_model,
    require_trainable,
)
from packer.integrations.hf_loss import auxiliary_loss, logits_of, loss_sum
from packer.integrations.hf_position import read_position, write_position
from packer.integrations.labels import labels_are_shifted
from packer.plan import Plan
from packer.runtime import PlanLoader, PlanLR, Step, StepInfo, count_loss_tokens
from packer.runtime.batches.sources import dataset_of

if TYPE_CHECKING:
    # Whether transformers is installed or not, and whatever types it declares: the same here.
    Trainer = Any
    TrainerCallback = Any
    get_last_checkpoint: Any
else:
    try:
        from transformers import Trainer, TrainerCallback
        from transformers.trainer_utils import get_last_checkpoint
    except ImportError as error:
        raise MissingExtraError(
            f"the Trainer needs transformers: pip install 'microbatch-packer[hf]' ({error})"
        ) from error


class PlanTrainerMixin(PlanEvaluationMixin):
    """Put in front of ``Trainer``, or of a subclass of it, to play a plan.

    ``max_steps`` comes from the plan where ``args`` name none. ``lr_scheduler_type`` may be any: the schedule
    keeps the base rate, and the factor is applied while the optimizer steps. A step's loss is the sum over
    its tokens divided by their number on all ranks, under data and sequence parallelism alike.
    ``train_dataset`` is the data set that was analyzed; ``per_device_train_batch_size`` is not used.

    An evaluation plays ``eval_plan``, or reads ``eval_dataset`` in its own order, in batches of
    ``per_device_eval_batch_size``. Either way each sample comes once, and the loss is the mean over all
    tokens on all ranks. ``compute_metrics`` gets one row a sample, logits and labels padded with −100.
    """

    known_losses: ClassVar[tuple[str, ...]] = ("Trainer",)
    """Classes whose ``compute_loss`` is next-token prediction: what the mixin computes in its place."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        plan: Plan | str | os.PathLike[str],
        train_dataset: Any = None,
        eval_dataset: Any = None,
        eval_plan: Any = None,
        data_collator: Any = None,
        loader_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the Trainer, and hold it against the plan.

        Args:
            model: Of the Trainer.
            args: Of the Trainer.
            plan: A plan, or its directory.
            train_dataset: The data set that was analyzed; of a plan of several sources one by each name.
            eval_dataset: A data set to evaluate on, or a dictionary of several by their names.
            eval_plan: The plan, or its directory, in which ``eval_dataset`` is evaluated; of a dictionary the
                plans of those sets that have one.
            data_collator: Makes batches of an ``eval_dataset`` without a plan, which then is evaluated as the
                stock Trainer does; default: ``PaddingCollator``.
            loader_options: Further arguments of ``PlanLoader``: ``pad_values``, ``token_fields`` …
            **kwargs: Of the Trainer.

        Raises:
            ConfigError: The arguments ask for what the plan does not hold, or for what could not be right.
            PlanError: The plan does not fit this number of processes.
            SourceChangedError: A data set has another number of samples than its plan was made for.
        """
        require_known_loss(
            type(self).__mro__[type(self).__mro__.index(PlanTrainerMixin) + 1 :], self.known_losses
        )
        if train_dataset is None:
            raise ConfigError("a plan names samples by their numbers; give train_dataset, which holds them")
        self.plan = as_plan(plan)
        if isinstance(train_dataset, Mapping):
            train_dataset = dataset_of(self.plan, train_dataset)
        super().__init__(
            model=model,
            args=args,
            train_dataset=self._shown(train_dataset, "train_dataset"),
            eval_dataset=_each(eval_dataset, self._shown),
            data_collator=PaddingCollator() if data_collator is None else data_collator,
            **kwargs,
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.args: Any = copy.copy(self.args)  # another plan may be played with the user's
        self._asked_max_steps = self._chosen_max_steps = self.args.max_steps
        self._adapted: Any = None
        self._hold_against_plan()
        # What compute_loss returns is divided already; the Trainer is not to divide it again. Older ones have
        # no such flag, and divide where the model takes no loss arguments.
        self._divides_again = (
            not hasattr(self, "loss_is_scaled_for_ga") and not self.model_accepts_loss_kwargs
        )
        self.loss_is_scaled_for_ga = True
        self._loader_options = dict(loader_options or {})
        self._position: dict[str, Any] | None = None
        self._loader = self._open(self.plan, train_dataset, self._place)
        self._step: Step | None = None
        self._counts_loss_tokens = _counts_loss_tokens(self.plan, train_dataset)
        self._open_evaluations(eval_plan)
        self._playing = _PlanCallback(self)
        # Before all others, which then see the plan's epochs and the rates that the optimizer is given.
        self.callback_handler.callbacks.insert(0, self._playing)

    def _shown(self, dataset: Any, what: str) -> Any:
        """What the Trainer's own construction is to see of a data set."""
        return dataset

    def _hold_against_plan(self) -> None:
        """Refuse what does not go with the plan: at construction, and where a search sets arguments anew."""
        self._place = place_of(self.accelerator, tp_size=self.get_tp_size())
        require_trainable(self, self.plan, self._place)
        require_model(self.model, self.plan, self._place["sp_size"])
        if self.args.max_steps != self._chosen_max_steps:
            self._asked_max_steps = self.args.max_steps
        self.args.max_steps = self._asked_max_steps
        self.args.max_steps = self._chosen_max_steps = choose_max_steps(self.args, self.plan)
        if self._asked_max_steps <= 0:
            self.args.num_train_epochs = self.plan.num_epochs
        # The loader goes on where the plan stood: nothing is to be skipped.
        self.args.ignore_data_skip = True
        self._leave_slices_alone()

    def _open(self, plan: Plan, dataset: Any, place: Mapping[str, int]) -> PlanLoader:
        options: dict[str, Any] = {
            "device": self.args.device,
            "num_workers": self.args.dataloader_num_workers,
            "persistent_workers": self.args.dataloader_persistent_workers,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            **place,
            **self._loader_options,
        }
        return PlanLoader(plan, dataset, **options)

    def _leave_slices_alone(self) -> None:
        """Keep accelerate from gathering and cutting rows that are cut already."""
        if self._adapted is self.accelerator:
            return
        self._adapted = self.accelerator
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
        if self.model_wrapped is self.model:
            # An evaluation before the training leaves a mark by which accelerate takes the model for wrapped,
            # and DDP is left out: nobody would average gradients.
            self.model.__dict__.pop("_is_accelerate_prepared", None)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the plan's steps, from its beginning or from where the checkpoint stands."""
        self._hold_against_plan()
        self._loader = self._open(self.plan, self.train_dataset, self._place)
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
        are_shifted = labels_are_shifted(self.plan)
        inputs = [model_inputs(self.model, batch, are_shifted=are_shifted) for batch in step]
        # A step whose labels are all −100 has the loss 0, and the gradient.
        return inputs, torch.tensor(max(num_loss_tokens, 1), device=device)

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
        """Return the loss whose gradient, averaged over ranks, is that of the step's mean over tokens.

        While the model evaluates: the mean over the tokens of this micro-batch.

        Raises:
            ConfigError: The model returns no logits, or not one row of them a token.
        """
        if SHIFTED not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels = inputs.pop(SHIFTED)
        outputs = model(**inputs)
        logits = logits_of(outputs, labels, self.model)
        smoothing = self.args.label_smoothing_factor
        loss = loss_sum(logits, labels, label_smoothing=smoothing) / num_items_in_batch
        if model.training:
            _, num_ranks, _ = self._evaluation_place()
            num_slices = num_ranks * self.args.gradient_accumulation_steps
            loss = (loss + auxiliary_loss(outputs, self.model) / num_slices) * self._num_averaged()
            if self._divides_again:
                loss = loss * self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with speeds by what was played instead of by the batch sizes in the arguments."""
        if "train_runtime" in logs:
            logs["train_samples_per_second"] = _rate(self._playing.num_samples, logs["train_runtime"])
            logs["train_steps_per_second"] = _rate(self._playing.num_steps, logs["train_runtime"])
        if self._evaluation_speed is not None:
            prefix, num_steps = self._evaluation_speed
            if f"{prefix}_runtime" in logs:
                logs[f"{prefix}_steps_per_second"] = _rate(num_steps, logs[f"{prefix}_runtime"])
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write down where the plan stands, and then the rest: a checkpoint that is whole has both."""
        if self.args.should_save:
            checkpoint = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            write_position(checkpoint, self._loader.state_dict())
        super()._save_checkpoint(model, trial)

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
        self.num_samples = 0
        """Samples that this run has trained on."""
        self.num_steps = 0
        """Updates that this run has made."""

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
        self.num_samples = self.num_steps = 0
        optimizer = kwargs["optimizer"]
        if self._rate is None or self._rate.optimizer is not optimizer:
            self._rate = PlanLR(optimizer, self._trainer.plan, self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count epochs as the plan does, and do at their ends what the strategies ask for."""
        step = self.current_step
        self.num_samples += step.num_samples
        self.num_steps += 1
        num_steps = self._trainer.plan.epoch(step.epoch).num_steps
        state.epoch = step.epoch + (step.index + 1) / num_steps
        # At the very end the Trainer's own epoch ends too, and does all this.
        if step.index + 1 == num_steps and state.global_step < state.max_steps:
            control.should_log |= _is_epoch(args.logging_strategy)
            control.should_evaluate |= _is_epoch(args.eval_strategy)
            control.should_save |= _is_epoch(args.save_strategy)


def _is_epoch(strategy: Any) -> bool:
    return str(getattr(strategy, "value", strategy)) == "epoch"


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds else float("inf")


def _each(datasets: Any, shown: Any) -> Any:
    """Apply a function of a data set and its name to the only one, or to those of a dictionary."""
    if isinstance(datasets, dict):
        return {name: shown(dataset, f"eval_dataset[{name!r}]") for name, dataset in datasets.items()}
    return None if datasets is None else shown(datasets, "eval_dataset")


def _counts_loss_tokens(plan: Plan, dataset: Any) -> bool:
    """Whether only the labels can tell the number of loss tokens: the same answer on every rank."""
    if plans_pairs(plan):
        return True
    definition = plan.header.get("loss_tokens")
    return definition is None or (definition == "seqlen - 1" and "labels" in dataset[0])
