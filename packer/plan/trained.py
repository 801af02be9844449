"""What a plan trained up to a place: the pieces in the order of their steps, and how much they are."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, PlanError
from packer.plan.reader import Plan, load_plan
from packer.plan.rows import MicroBatches
from packer.wording import counted

_PLACE = re.compile(r"(?P<plan>.+)@(?P<epoch>\d+):(?P<step>\d+)", re.DOTALL)


class TrainedPieces(NamedTuple):
    """P pieces that were trained, in order; a repeat is there once more."""

    epoch: int
    step: NDArray[np.int64]
    """(P,)"""
    sample_ids: NDArray[np.integer]
    """(P,)"""
    starts: NDArray[np.int32]
    """(P,) first token of each in its sample."""
    seqlens: NDArray[np.int32]
    """(P,)"""
    is_repeat: NDArray[np.bool_]
    """(P,)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What one epoch of a plan trained before a step; or the whole plan."""

    plan: Plan
    epoch: int | None = None
    """None: every epoch, to its end."""
    step: int | None = None
    """The first step of the epoch that was not trained; None: the epoch was trained to its end."""

    def __post_init__(self) -> None:
        """Refuse a place that the plan does not have."""
        if self.epoch is None and self.step is not None:
            raise ConfigError(f"step {self.step} is of no epoch; give both, as PLAN@EPOCH:STEP")
        if self.epoch is None:
            return
        num_steps = self.plan.epoch(self.epoch).num_steps
        if self.step is not None and not 0 <= self.step <= num_steps:
            raise PlanError(
                f"epoch {self.epoch} of {self.plan} has {counted(num_steps, 'step')}, and no step "
                f"{self.step}; give the step at which the loader's state stands"
            )

    @classmethod
    def at(cls, reference: "str | os.PathLike[str] | Plan | Trained") -> "Trained":
        """Return what ``PLAN``, or ``PLAN@EPOCH:STEP``, names.

        Raises:
            PlanError: there is no such plan, or it has no such place.
        """
        if isinstance(reference, Trained):
            return reference
        if isinstance(reference, Plan):
            return cls(plan=reference)
        place = _PLACE.fullmatch(os.fspath(reference))
        if place is None:
            return cls(plan=load_plan(reference))
        return cls(plan=load_plan(place["plan"]), epoch=int(place["epoch"]), step=int(place["step"]))

    def pieces(self) -> Iterator[TrainedPieces]:
        """Yield the pieces, some ten thousand micro-batches at a time; fillers train nothing."""
        for number in range(self.plan.num_epochs) if self.epoch is None else [self.epoch]:
            for table in self.plan.epoch(number).microbatches():
                found = _trained_of(number, table, self.step)
                if len(found.step):
                    yield found
                if self.step is not None and table.step[-1] >= self.step:
                    break

    def share_of(self, pieces: TrainedPieces) -> float:
        """Return which share of all steps is behind some pieces that ``pieces`` gave."""
        if self.epoch is None:
            done = sum(self.plan.epoch(number).num_steps for number in range(pieces.epoch))
            total = sum(self.plan.epoch(number).num_steps for number in range(self.plan.num_epochs))
        else:
            done, total = 0, self.plan.epoch(self.epoch).num_steps if self.step is None else self.step
        return (done + int(pieces.step[-1]) + 1) / total

    def account(self) -> "Account":
        """Return how much the plan had trained at that place: earlier epochs, and repeats, included."""
        last = self.plan.num_epochs - 1 if self.epoch is None else self.epoch
        epoch = self.plan.epoch(last)
        step = epoch.num_steps if self.step is None else self.step
        row = epoch.step(step if step < epoch.num_steps else step - 1)
        is_end = step == epoch.num_steps
        before = accounts_of(self.plan)
        earlier = sum(self.plan.epoch(number).num_steps for number in range(last))
        return Account(
            plan=self.plan.fingerprint,
            epoch=last,
            step=step,
            num_steps=earlier + step,
            num_samples=row.samples_before
            + is_end * row.num_samples
            - sum(account.num_samples for account in before),
            num_tokens=row.tokens_before
            + is_end * row.num_tokens
            - sum(account.num_tokens for account in before),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """How far a run was in a plan that another one goes on from: an entry of ``trained`` in ``plan.json``."""

    plan: str
    """Its content hash."""
    epoch: int
    step: int
    """The first one of the epoch that was not trained."""
    num_steps: int
    """Of that plan before it, earlier epochs included; and of no other plan, as in the next two."""
    num_samples: int
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the entry."""
        return asdict(self)


def accounts_of(plan: Plan) -> list[Account]:
    """Return what was trained before a plan begins."""
    return [Account(**entry) for entry in plan.header.get("trained", [])]


def joint_accounts(trained: Sequence[Trained]) -> list[Account]:
    """Return what was trained by plans, and by those that they go on from, each plan counted once."""
    found: dict[str, Account] = {}
    for one in trained:
        for account in [*accounts_of(one.plan), one.account()]:
            known = found.get(account.plan)
            if known is None or (known.epoch, known.step) < (account.epoch, account.step):
                found[account.plan] = account
    return list(found.values())


def _trained_of(epoch: int, table: MicroBatches, stop: int | None) -> TrainedPieces:
    """Return the pieces of a table's micro-batches before step ``stop`` that are no fillers."""
    sizes = np.diff(table.offsets)
    is_trained = ~table.is_filler if stop is None else ~table.is_filler & (table.step < stop)
    wanted = np.repeat(is_trained, sizes)
    starts = np.zeros_like(table.seqlens) if table.starts is None else table.starts
    return TrainedPieces(
        epoch,
        np.repeat(table.step, sizes)[wanted],
        table.sample_ids[wanted],
        starts[wanted],
        table.seqlens[wanted],
        np.repeat(table.is_repeat, sizes)[wanted],
    )
