"""Lightning on a plan: a data module that hands out its micro-batches, and a callback that scales the rate.

    data = PlanDataModule(plan, dataset)
    trainer = Trainer(accumulate_grad_batches=2, max_epochs=plan.num_epochs, callbacks=[PlanCallback(data)])
    trainer.fit(model, datamodule=data)

and in the module::

    def training_step(self, batch, batch_idx):
        return loss_sum(self.model, batch) * self.trainer.datamodule.loss_weight()

What Lightning gets for its data loader is no ``DataLoader``, so it puts no sampler of its own in; its
length is that of the epoch, so nothing is read ahead. Lightning keeps its place in its own checkpoints.

Tested with pytorch-lightning 2.5.5 and 2.6.6, on one device and on DDP.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from packer.errors import ConfigError, MissingExtraError, StateError
from packer.integrations.amount import num_planned_steps, option_for_more
from packer.plan import Plan
from packer.runtime import Batch, PlanLoader, PlanLR
from packer.runtime.topology import grad_accum_for
from packer.wording import counted

if TYPE_CHECKING:
    # Whether Lightning is installed or not, and whatever types it declares: the same here.
    LightningDataModule = Any
    Callback = Any
else:
    try:
        from pytorch_lightning import Callback, LightningDataModule
    except ImportError:
        try:
            from lightning.pytorch import Callback, LightningDataModule
        except ImportError as error:
            raise MissingExtraError(
                "the data module needs Lightning: pip install 'microbatch-packer[lightning]'"
            ) from error


class PlanDataModule(LightningDataModule):
    """This process's micro-batches of a plan, epoch by epoch."""

    def __init__(self, plan: Plan, dataset: Any, **loader_options: Any) -> None:
        """Keep a plan for training.

        Args:
            plan: What to play; its epochs are Lightning's.
            dataset: The data set that was analyzed.
            **loader_options: Further arguments of ``PlanLoader``: ``num_workers``, ``pad_values`` …
        """
        super().__init__()
        self.plan = plan
        self._dataset = dataset
        self._loader_options = loader_options
        self._batches: _EpochBatches | None = None

    @property
    def loader(self) -> PlanLoader:
        """The loader that plays the plan."""
        if self._batches is None:
            raise ConfigError("the loader is made when Lightning starts to fit; read it from within a hook")
        return self._batches.loader

    def setup(self, stage: str) -> None:
        """Hold the Trainer against the plan, and take this process's place in it.

        Raises:
            ConfigError: The Trainer would cut an epoch or a step short, or play more than is planned.
            PlanError: The plan does not fit this number of processes.
        """
        if stage != "fit":
            return
        _require_trainable(self.trainer, self.plan)
        options: dict[str, Any] = {
            "dp_rank": self.trainer.global_rank,
            "dp_size": self.trainer.world_size,
        } | self._loader_options
        self._batches = _EpochBatches(PlanLoader(self.plan, self._dataset, **options), self.trainer)
        # Lightning asks for an epoch's length but once, unless it is to ask for a new loader every epoch.
        if len({epoch["num_steps"] for epoch in self.plan.header["epochs"]}) > 1:
            self.trainer.reload_dataloaders_every_n_epochs = 1

    def train_dataloader(self) -> Any:
        """Return the micro-batches of the Trainer's current epoch."""
        return self._batches

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Move a batch, which keeps what it knows of the plan."""
        if isinstance(batch, Batch):
            return batch.to(device, non_blocking=True)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def loss_weight(self, num_loss_tokens: int | None = None) -> float:
        """Return what a micro-batch's summed loss is multiplied by, for the mean over the step's tokens.

        It makes up for what Lightning divides by: the ranks and the accumulation.

        Args:
            num_loss_tokens: Tokens of the whole step, where the plan does not know them.

        Raises:
            PlanError: The plan does not know the step's loss tokens.
        """
        step = self.loader.current_step
        count = step.num_loss_tokens if num_loss_tokens is None else num_loss_tokens
        return float(self.trainer.world_size * self.trainer.accumulate_grad_batches) / max(count, 1)


class PlanCallback(Callback):
    """Multiplies rates by the step's factor while the optimizers step; schedules keep the base."""

    def __init__(self, data: PlanDataModule) -> None:
        """Follow the loader of a data module."""
        self._data = data
        self._rates: list[PlanLR] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook up the optimizers that Lightning has set up."""
        followed = [rate.optimizer for rate in self._rates]
        self._rates += [
            PlanLR(optimizer, self._data.plan, self._data.loader)
            for optimizer in trainer.optimizers
            if not any(optimizer is other for other in followed)
        ]

    def last_rates(self) -> list[Any]:
        """Return each parameter group's rate as the last update really used it."""
        return [rate for schedule in self._rates for rate in schedule.get_last_lr()]


class _EpochBatches:
    """The micro-batches of the Trainer's current epoch: sized, stateful, and no ``DataLoader``."""

    def __init__(self, loader: PlanLoader, trainer: Any) -> None:
        self.loader = loader
        self._flat = loader.microbatches()
        self._trainer = trainer
        self._resumed = False

    def __len__(self) -> int:
        return self.loader.plan.epoch(self._epoch).num_steps * self.loader.grad_accum

    def __iter__(self) -> Iterator[Batch]:
        # Lightning may ask for an iterator and drop it: only one that is read from plays the epoch.
        if not self._resumed:
            self.loader.set_epoch(self._epoch)
        return self._play()

    def _play(self) -> Iterator[Batch]:
        self._resumed = False
        yield from self._flat

    @property
    def _epoch(self) -> int:
        return min(int(self._trainer.current_epoch), self.loader.plan.num_epochs - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return where the plan stands, for Lightning's checkpoint."""
        return self._flat.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where Lightning's checkpoint was written.

        Raises:
            StateError: It was written with another plan, or within a step, whose gradients are gone.
        """
        if state.get("microbatch"):
            raise StateError(
                f"the checkpoint was written after micro-batch {state['microbatch']} of a step, whose "
                "gradients it does not hold; resume from one that ModelCheckpoint wrote between two "
                "updates"
            )
        self._flat.load_state_dict(state)
        self._resumed = True


_UNKNOWN_STRATEGIES = ("DeepSpeedStrategy", "ModelParallelStrategy")


def _require_trainable(trainer: Any, plan: Plan) -> None:
    """Refuse what would leave planned batches out, play more than there are, or weigh them anew."""
    strategy = type(trainer.strategy).__name__
    if strategy in _UNKNOWN_STRATEGIES:
        raise ConfigError(
            f"{strategy} divides gradients, or shares batches, in a way that loss_weight() does not make "
            "up for; "
            "take strategy='ddp' or 'fsdp', or DeepSpeed itself with packer.integrations.deepspeed"
        )
    grad_accum = grad_accum_for(trainer.world_size, plan.dp_size, plan.grad_accum)
    if trainer.accumulate_grad_batches != grad_accum:
        raise ConfigError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}, and on "
            f"{counted(trainer.world_size, 'process')} a step of the plan has "
            f"{counted(grad_accum, 'micro-batch')} a rank; set "
            f"Trainer(accumulate_grad_batches={grad_accum}), or plan again with --dp-size "
            f"{trainer.world_size} --grad-accum {trainer.accumulate_grad_batches}"
        )
    if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
        raise ConfigError(
            "limit_train_batches and overfit_batches would cut the planned epoch short; leave them out, "
            "and plan fewer samples (--sample-ids), or stop with max_steps"
        )
    planned = num_planned_steps(plan)
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if not 0 < steps <= planned and not (epochs is not None and 0 <= epochs <= plan.num_epochs):
        raise ConfigError(
            f"max_epochs={epochs} and max_steps={steps}, and the plan holds {counted(planned, 'step')} in "
            f"{counted(plan.num_epochs, 'epoch')}; set "
            f"Trainer(max_epochs={plan.num_epochs}), or plan more with {option_for_more(plan)}"
        )
