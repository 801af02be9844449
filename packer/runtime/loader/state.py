"""Where a loader stands, as a checkpoint keeps it."""

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from packer.errors import ConfigError, StateError

Resume = Literal["step", "microbatch"]

VERSION = 3
_ADDED = {"seed": 2, "largest_first": 3}
"""Entry → the version that brought it; older states have its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """The same on every rank, so that a distributed checkpoint may keep one copy of it."""

    version: int
    fingerprint: str
    """The plan's content hash."""
    epoch: int
    step: int
    microbatch: int
    """Micro-batches of the step that this rank, like every other, had been handed."""
    dp_size: int
    grad_accum: int
    seed: int = 0
    """Of the random numbers that are drawn while samples are read."""
    largest_first: bool = False
    """Steps are counted in the order in which the largest of the epoch comes first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "LoaderState":
        """Take a state from a checkpoint; entries that others added to it are left alone.

        Raises:
            StateError: It is not one of ours, is damaged, or of another version.
        """
        if not isinstance(state, Mapping):
            raise StateError(
                f"the loader's state is a {type(state).__name__}; load what PlanLoader.state_dict() gave"
            )
        version: Any = state.get("version")
        known = int(version) if version in range(1, VERSION + 1) else 0
        names = {name for name in cls.__slots__ if _ADDED.get(name, 1) <= known}
        if not known or not names <= set(state):
            raise StateError(
                f"the loader's state has version {version!r} and fields {', '.join(map(str, state))}; this "
                f"packer reads versions 1 to {VERSION}: load what PlanLoader.state_dict() gave"
            )
        try:  # a checkpoint may have made tensors of the numbers
            numbers = {name: operator.index(state[name]) for name in names - {"fingerprint"}}
        except TypeError:
            numbers = {}
        if not numbers or min(numbers.values()) < 0 or numbers["microbatch"] > numbers["grad_accum"]:
            raise StateError(
                f"the loader's state {dict(state)} is no place in a plan; load what PlanLoader.state_dict() "
                "gave"
            )
        largest_first = bool(numbers.pop("largest_first", False))
        numbers["version"] = VERSION
        return cls(**numbers, fingerprint=state["fingerprint"], largest_first=largest_first)

    def place(
        self, resume: Resume, *, fingerprint: str, dp_size: int, grad_accum: int, largest_first: bool = False
    ) -> tuple[int, int, int]:
        """Return the epoch, step and micro-batch at which a run goes on.

        Args:
            resume: ``step`` plays an interrupted step again; ``microbatch`` goes on within it.
            fingerprint: Of the plan that is loaded now.
            dp_size: Of the run that goes on.
            grad_accum: Of the run that goes on.
            largest_first: Of the run that goes on.

        Raises:
            ConfigError: ``resume`` is neither.
            StateError: The state belongs to another plan or another order of its steps, or a step is to be
                continued on another topology.
        """
        if resume not in ("step", "microbatch"):
            raise ConfigError(f"resume={resume!r} is not known; choose 'step' or 'microbatch'")
        if self.fingerprint != fingerprint:
            raise StateError(
                f"the state was saved with plan {self.fingerprint[:12]} and this is plan {fingerprint[:12]}, "
                "whose samples come in another order; load that plan, or start this one without the state"
            )
        if self.largest_first != largest_first and (self.step or self.microbatch):
            raise StateError(
                f"the state counts steps as played with largest_first={self.largest_first}, and this loader "
                f"has largest_first={largest_first}, whose step {self.step} is another one; make the loader "
                f"with largest_first={self.largest_first}, or change it between two epochs"
            )
        if resume == "step" or self.microbatch == 0:
            return self.epoch, self.step, 0
        if (self.dp_size, self.grad_accum) != (dp_size, grad_accum):
            raise StateError(
                f"the state stands within step {self.step}, after micro-batch {self.microbatch} of a run "
                f"with dp_size {self.dp_size} and grad_accum {self.grad_accum}; this run has {dp_size} and "
                f"{grad_accum}: on another topology load it with resume='step', which plays the step again"
            )
        if self.microbatch == grad_accum:
            return self.epoch, self.step + 1, 0
        return self.epoch, self.step, self.microbatch
