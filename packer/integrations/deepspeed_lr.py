"""DeepSpeed's scheduler for dynamic batching: the rate of the step being executed, always that one."""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from packer.errors import ConfigError
from packer.integrations.deepspeed_loader import VariableBatchLoader


class VariableBatchSizeLR:
    """A schedule's rates, or an optimizer's constant ones, times the factor of the step being executed.

    As in DeepSpeed, the parameter groups hold the scaled rates. They are set when a step's first micro-batch
    is handed out, and once more before the optimizer updates anything, so that an update that an overflow
    skips takes nobody else's factor with it. The schedule inside sees its own, unscaled rates only. The state
    holds the loader's, so that a checkpoint of the engine keeps both.
    """

    def __init__(self, engine: Any, loader: VariableBatchLoader, *, verbose: bool = False) -> None:
        """Take over the rates of an engine's optimizer.

        Args:
            engine: Has an ``optimizer`` and, maybe, an ``lr_scheduler``.
            loader: Knows the step being executed.
            verbose: Log every rate.

        Raises:
            ConfigError: The engine has no optimizer.
        """
        if not hasattr(engine.optimizer, "param_groups"):
            raise ConfigError(
                "the engine has no optimizer whose rate could be scaled; name one in the DeepSpeed "
                "configuration, or give it to deepspeed.initialize"
            )
        self.optimizer = engine.optimizer
        self.base_lr_scheduler = engine.lr_scheduler
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        """Rates before the factor."""
        self._loader = loader
        self._verbose = verbose
        self._last_lr: list[float] | None = None
        self._base_of: dict[int, float] = {}
        inner = self.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        inner.register_step_pre_hook(self._before_update)
        loader.on_step = self._scale_current
        self._scale_current()

    def step(self, epoch: int | None = None, **kwargs: Any) -> None:
        """Advance the schedule inside, and show the next step's rates.

        Args:
            epoch: 0 at the beginning of an epoch: the rates are those of the loader's next step, the schedule
                stays where it is. Another number is passed on to it.
            **kwargs: Passed on to the schedule, such as ``metrics``.
        """
        if epoch == 0:
            self._scale_current()
            return
        self._set_rates(1.0)
        inner = self.base_lr_scheduler
        if inner is not None and (kwargs or not isinstance(inner, ReduceLROnPlateau)):
            inner.step(**kwargs) if epoch is None else inner.step(epoch, **kwargs)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._set_rates(self._loader.next_step.lr_scale)
        if self._verbose:
            from deepspeed.utils import logger  # the one that its users see

            logger.info(f"base rates {self.base_lrs}, next step's rates {self.get_lr()}")

    def get_lr(self) -> list[float]:
        """Return the rates in the parameter groups: of the step being executed or, after it, the next."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """Return the rates of the last update; before the first one, those that it will have."""
        return self.get_lr() if self._last_lr is None else list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, its rates, and the place in the data."""
        inner = self.base_lr_scheduler
        return {
            "base_lr_scheduler": None if inner is None else inner.state_dict(),
            "base_lrs": list(self.base_lrs),
            "last_lr": self._last_lr,
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken: in the data, in the schedule, and with the step's factor.

        Raises:
            StateError: The state belongs to another plan.
        """
        self._loader.load_state_dict(state_dict["loader"])
        if self.base_lr_scheduler is not None and state_dict["base_lr_scheduler"] is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.base_lrs = list(state_dict["base_lrs"])
        self._last_lr = state_dict["last_lr"]
        self._scale_current()

    def _scale_current(self) -> None:
        self._set_rates(self._loader.current_step.lr_scale)

    def _set_rates(self, scale: float) -> None:
        groups = self.optimizer.param_groups
        self._base_of = {id(group): rate for group, rate in zip(groups, self.base_lrs, strict=True)}
        for group, rate in zip(groups, self.base_lrs, strict=True):
            group["lr"] = rate * scale

    def _before_update(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Set the rates of the groups at hand; ZeRO shows its optimizer one at a time."""
        scale = self._loader.current_step.lr_scale
        for group in optimizer.param_groups:
            group["lr"] = self._base_of[id(group)] * scale
        self._last_lr = [rate * scale for rate in self.base_lrs]
