"""``packer.rehearse``: a plan's extreme micro-batches played through a training before the run starts."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packer.budget import ranks
from packer.budget.device import Device, Peak, open_device
from packer.budget.extremes import Extreme, find_extremes
from packer.budget.law import NOTHING, Law
from packer.budget.snapshot import Stateful
from packer.budget.stage import Stage, Training, gigabytes
from packer.budget.synthetic import SyntheticSamples, smallest_vocabulary
from packer.errors import ConfigError, PlanError
from packer.plan import Plan, load_plan
from packer.runtime.batches.batch import Batch
from packer.runtime.loader import PlanLoader

MARGIN = 0.01
"""Share of the device's memory that is to stay free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An extreme micro-batch, and what one rank needs for it."""

    extreme: Extreme
    peak: Peak | None
    """Bytes; None where it was not played, or ran out of memory."""
    seconds: float | None
    """Forward and backward; None as above."""
    fits: bool
    """Within the margin."""
    predicted: int | None = None
    """Bytes that it would take, from what the others took; where it was not played to its end."""

    @property
    def size(self) -> int | None:
        """Bytes that it takes, or would take; None where nobody knows."""
        return self.predicted if self.peak is None else self.peak.allocated


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What a rehearsal found on one rank, and on the others.

    ``print`` it for a person; ``require_fit`` ends a run that would run out of memory.
    """

    rank: int
    device: str
    available: int
    """Bytes that the process may take in all."""
    usable: int
    """The same less the margin."""
    is_expandable: bool
    """``expandable_segments`` are on."""
    played: tuple[Played, ...]
    """The smallest tensor first."""
    update: Peak | None
    """The optimizer's update, with gradients held; None where it ran out of memory."""
    update_seconds: float | None
    cure: str | None
    """What to do where this rank's share does not fit."""
    others: tuple["Rehearsal", ...] = ()
    """Of all ranks, where there are several; this one's among them."""

    @property
    def fits(self) -> bool:
        """Every micro-batch of the plan fits, on every rank."""
        return all(found.fits_here for found in self.others or (self,))

    @property
    def fits_here(self) -> bool:
        """Every micro-batch of the plan fits on this rank."""
        return self.update is not None and all(played.fits for played in self.played)

    @property
    def peak(self) -> Peak:
        """The highest of what was played: what the run's peak will be."""
        peaks = [played.peak for played in self.played if played.peak is not None]
        peaks += [self.update] if self.update is not None else []
        if not peaks:
            return Peak(0, 0)
        return Peak(
            max(peak.allocated for peak in peaks),
            max(peak.reserved for peak in peaks),
            sum(peak.num_retries for peak in peaks),
        )

    def require_fit(self) -> "Rehearsal":
        """Return this rehearsal, if the plan fits.

        Raises:
            PlanError: Names the micro-batch, what it takes, what fits, and the cure.
        """
        for found in self.others or (self,):
            if not found.fits_here:
                where = f"rank {found.rank}: " if self.others else ""
                raise PlanError(f"{where}{found.complaint}")
        return self

    @property
    def complaint(self) -> str | None:
        """What does not fit on this rank, in one sentence, with the cure; None if all does."""
        tight = next((played for played in reversed(self.played) if not played.fits), None)
        if tight is None and self.update is not None:
            return None
        fit = f"{gigabytes(self.usable)} of {gigabytes(self.available)} are to be used"
        if tight is None:
            return f"the optimizer's update ran out of memory, and {fit}; {self.cure}"
        size = tight.size
        takes = f"takes {gigabytes(size)}" if size is not None else "ran out of memory"
        if tight.predicted is not None:
            takes = f"would take about {gigabytes(tight.predicted)}"
        extreme = tight.extreme
        return (
            f"micro-batch {extreme.row} of epoch {extreme.epoch} ({extreme.shape}, "
            f"{', '.join(extreme.names)}) {takes}, and {fit}; {self.cure}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all of it in plain JSON; sizes in bytes."""
        entries = asdict(replace(self, others=()))
        entries |= {"fits": self.fits_here, "complaint": self.complaint, "peak": self.peak._asdict()}
        entries["update"] = None if self.update is None else self.update._asdict()
        for entry, played in zip(entries["played"], self.played, strict=True):
            entry["peak"] = None if played.peak is None else played.peak._asdict()
        entries["others"] = [found.to_json() for found in self.others]
        return entries

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines for a person; on the first of several ranks with a line for each of the others."""
        segments = "expandable segments" if self.is_expandable else "segments that do not grow"
        yield (
            f"rehearsal on {self.device}: {gigabytes(self.usable)} of {gigabytes(self.available)} to be "
            f"used, {segments}"
        )
        yield f"  {'micro-batch':<38}{'shape':>16}{'allocated':>12}{'reserved':>12}{'seconds':>9}"
        for played in self.played:
            yield f"  {', '.join(played.extreme.names):<38}{played.extreme.shape:>16}{_figures(played)}"
        if self.update is not None:
            figures = _sizes(self.update, self.update_seconds)
            yield f"  {'update of the optimizer':<38}{'':>16}{figures}"
        if self.rank == 0:
            for found in self.others:
                verdict = "fits" if found.fits_here else found.complaint
                yield f"  rank {found.rank}: peak {gigabytes(found.peak.allocated)}, {verdict}"
        if self.fits:
            yield f"The plan fits: its peak is {gigabytes(self.peak.allocated)}."
        elif not self.fits_here:
            yield f"The plan does not fit: {self.complaint}"


def _figures(played: Played) -> str:
    if played.peak is not None:
        return _sizes(played.peak, played.seconds) + ("" if played.fits else "  over")
    if played.predicted is not None:
        return f"{'~' + gigabytes(played.predicted):>12}{'':>21}  over"
    return f"{'out of memory':>24}"


def _sizes(peak: Peak, seconds: float | None) -> str:
    return f"{gigabytes(peak.allocated):>12}{gigabytes(peak.reserved):>12}{seconds or 0:>9.3f}"


def rehearse(
    plan: Plan | str | os.PathLike[str],
    train_step: Callable[[Batch], Tensor],
    *,
    model: Any,
    optimizer: Any,
    device: torch.device | str | int | Device | None = None,
    dataset: Any = None,
    loader_options: Mapping[str, Any] | None = None,
    also: Sequence[Stateful] = (),
    backward: Callable[[Tensor], Any] = Tensor.backward,
    update: Callable[[], Any] | None = None,
    margin: float = MARGIN,
) -> Rehearsal:
    """Play a plan's extreme micro-batches through a training step, to know now what the run will take.

    The largest S or T, the most samples, the largest tensor, the most attention and the smallest tensor of
    all epochs are played, and of a plan with few shapes each: forward and backward, while gradients are held
    and the optimizer's state is allocated, and one update. So the highest peak is that of the run. It is
    measured on the model as it is given: wrapped by DDP or FSDP2, with activation checkpointing, compiled.

    Parameters, buffers, gradients, the optimizer's state and random generators are as before when it returns
    or raises; their copies lie in host memory meanwhile.

    On several ranks every rank calls it. Nobody runs out of memory then, which the others would wait for: a
    micro-batch that would not fit, judged by those before it, is not played.

    Args:
        plan: What ``load_plan`` or ``make_plan`` gave, or the plan's directory.
        train_step: From a batch, on the device, to its loss; backward is called here.
        model: What the optimizer updates, as it is trained; or several.
        optimizer: Or several.
        device: Where batches go: ``cuda``, ``cpu``, or a `Device`. Default: the GPU, if there is one.
        dataset: Whose samples are played. Default: random ids of the planned lengths.
        loader_options: Further ones of ``PlanLoader``: ``sp_size``, ``pad_cu_seqlens``, ``collate``.
        also: What else a step changes and has ``state_dict`` and ``load_state_dict``: a gradient scaler.
        backward: What the loop calls, where it is not ``loss.backward()``.
        update: What the loop calls for an update, where it is not ``optimizer.step()``.
        margin: Share of the device's memory that is to stay free.

    Returns:
        What each of them took, and whether the plan fits.

    Raises:
        ConfigError: ``train_step`` returns no loss, or arguments have no meaning.
        PlanError: The plan is damaged, or cannot be played on this topology.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    training = Training.of(train_step, model, optimizer, also=tuple(also), backward=backward, update=update)
    place = open_device(device)
    usable = usable_bytes(place, margin)
    batches = Batches(plan, training, place, dataset, loader_options)
    extremes = find_extremes(plan)
    stage = Stage(training, place)
    with stage.set():
        available = place.available()
        with place.capped(usable if stage.can_fail else None):
            is_ready = stage.attempt(lambda: stage.warm_up(batches.of(extremes[0])) or True)
            constant = stage.constant()
            played = []
            if is_ready:
                played = list(_play(stage, batches, extremes, usable, constant))
            updated = stage.attempt(stage.update) if is_ready else None
    if not is_ready:
        played = [Played(extreme=extreme, peak=None, seconds=None, fits=False) for extreme in extremes[:1]]
    found = Rehearsal(
        rank=ranks.rank(),
        device=place.name,
        available=available,
        usable=usable,
        is_expandable=place.is_expandable,
        played=tuple(played),
        update=None if updated is None else updated[0],
        update_seconds=None if updated is None else updated[1],
        cure=_cure(plan, played, usable, constant),
    )
    return found if stage.can_fail else replace(found, others=tuple(ranks.from_all(found)))


def usable_bytes(device: Device, margin: float) -> int:
    """Return the bytes that may be taken: all but the margin.

    Raises:
        ConfigError: The margin is no share.
    """
    if not 0 <= margin < 1:
        raise ConfigError(f"margin={margin} is no share of the memory from 0 to below 1; 0.01 is 1%")
    return int(device.available() * (1 - margin))


class Batches:
    """Makes the batch of any micro-batch of a plan, of real or synthetic samples, on the device."""

    def __init__(
        self,
        plan: Plan,
        training: Training,
        device: Device,
        dataset: Any,
        loader_options: Mapping[str, Any] | None,
    ) -> None:
        self._plan = plan
        self._synthetic = None
        if dataset is None:
            dataset = self._synthetic = SyntheticSamples(plan, smallest_vocabulary(training.modules))
        options = {"device": device.torch_device, "pin_memory": False, **(loader_options or {})}
        self._loader = PlanLoader(plan, dataset, **options)

    def of(self, extreme: Extreme) -> Batch:
        """Make the batch of a micro-batch."""
        if self._synthetic is not None:
            self._synthetic.stand_for(self._plan.epoch(extreme.epoch).microbatch(extreme.row))
        return self._loader.read_row(extreme.epoch, extreme.row)


def _play(
    stage: Stage,
    batches: Batches,
    extremes: Sequence[Extreme],
    usable: int,
    constant: int,
) -> Iterator[Played]:
    """Play extremes in their order, then the largest that fitted once more: fragments have come to be."""
    measured: list[Played] = []
    for extreme in extremes:
        law = _memory_law(measured, constant)
        expected = None if law is None else int(law.cost(extreme))
        if not stage.can_fail and any(ranks.from_all((expected or 0) > usable)):
            measured.append(Played(extreme=extreme, peak=None, seconds=None, fits=False, predicted=expected))
            continue
        measured.append(_play_one(stage, batches, extreme, usable, expected))
    largest = next((at for at in reversed(range(len(measured))) if measured[at].fits), None)
    if largest is not None and len(measured) > 1:
        extreme = measured[largest].extreme
        again = _play_one(stage, batches, extreme, usable, None)
        measured[largest] = again if not again.fits else _higher(measured[largest], again)
    yield from measured


def _play_one(
    stage: Stage,
    batches: Batches,
    extreme: Extreme,
    usable: int,
    expected: int | None,
) -> Played:
    found = stage.attempt(partial(_twice, stage, batches, extreme))
    if found is None:
        # a prediction that would fit is no news of one that did not
        predicted = expected if expected is not None and expected > usable else None
        return Played(extreme=extreme, peak=None, seconds=None, fits=False, predicted=predicted)
    peak, seconds = found
    # where nothing caps the allocator, what it holds is held against the margin
    return Played(extreme=extreme, peak=peak, seconds=seconds, fits=stage.can_fail or peak.reserved <= usable)


def _twice(stage: Stage, batches: Batches, extreme: Extreme) -> tuple[Peak, float]:
    """Play a micro-batch twice: the first time of a shape chooses kernels, and compiles."""
    batch = batches.of(extreme)
    (first, _), (second, seconds) = stage.play(batch), stage.play(batch)
    return _highest(first, second), seconds


def _higher(before: Played, again: Played) -> Played:
    assert before.peak is not None
    assert again.peak is not None
    return replace(before, peak=_highest(before.peak, again.peak))


def _highest(one: Peak, other: Peak) -> Peak:
    return Peak(
        max(one.allocated, other.allocated),
        max(one.reserved, other.reserved),
        one.num_retries + other.num_retries,
    )


def _memory_law(measured: Sequence[Played], constant: int) -> Law | None:
    """Return how the peak grows from what is there before, by what was played to its end."""
    known = [(played.extreme, played.peak.allocated) for played in measured if played.peak is not None]
    return Law.fit([NOTHING, *(size for size, _ in known)], [constant, *(cost for _, cost in known)])


def _cure(plan: Plan, played: Sequence[Played], usable: int, constant: int) -> str | None:
    """Say what would fit, from how the peak grows."""
    tight = next((one for one in reversed(played) if not one.fits), None)
    if tight is None:
        return None
    general = "packer.calibrate finds the --max-tokens that fits; activation checkpointing raises it"
    law, extreme = _memory_law(played, constant), tight.extreme
    if law is None or law.cost(extreme) <= usable:  # something grows that the others do not tell
        return (
            f"lower --max-tokens, or set --max-attention below {extreme.attention} if attention takes it: "
            f"{general}"
        )
    if law.attention_share(extreme) > 0.5:
        rest = usable - law.constant - law.per_token * extreme.area
        most = int(rest / law.per_square)
        if most > 0:
            return (
                f"its attention takes most of it: plan with --max-attention {most}, or take a fused attention"
            )
    if not law.per_token:
        return f"lower --max-tokens: {general}"
    share = (usable - law.constant) / max(law.cost(extreme) - law.constant, 1.0)
    if share <= 0:
        return f"weights and optimizer leave no room: shard them (FSDP2), or train fewer of them; {general}"
    budget = plan.config["max_tokens"]
    if isinstance(budget, Mapping):
        fitting = ",".join(f"{metric}={int(limit * share)}" for metric, limit in budget.items())
    else:
        fitting = str(int(extreme.area * min(share, 1.0)))
    return f"about {fitting} tokens fit: plan with --max-tokens {fitting}, or let packer.calibrate find it"
