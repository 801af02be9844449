"""What the loader hands out: a mapping of tensors that knows what the plan says of its micro-batch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree
from numpy.typing import NDArray

from packer.errors import PlanError
from packer.plan import StepRow

Value = TypeVar("Value")

LabelsFrom = Literal["dataset", "input_ids"] | None


@dataclass(kw_only=True, slots=True)  # one is made for each step, and freezing doubles what that costs
class StepInfo:
    """One optimizer update, as planned: all ranks, all micro-batches, fillers left out."""

    epoch: int
    index: int
    """The step's number in its epoch, from 0."""
    num_samples: int
    """The batch size."""
    num_tokens: int
    planned_loss_tokens: int | None
    """None where the plan cannot know it."""
    max_seqlen: int
    """The longest sample."""
    lr_scale: float
    """What the learning rate of this update is multiplied by."""
    samples_before: int
    """Samples of all earlier steps, earlier epochs included."""
    tokens_before: int
    """Tokens of all earlier steps, earlier epochs included."""

    @classmethod
    def from_row(cls, epoch: int, index: int, row: StepRow, *, knows_loss_tokens: bool = True) -> "StepInfo":
        """Take over a row of the plan's table of steps."""
        return cls(
            epoch=epoch,
            index=index,
            num_samples=row.num_samples,
            num_tokens=row.num_tokens,
            planned_loss_tokens=row.num_loss_tokens if knows_loss_tokens else None,
            max_seqlen=row.max_seqlen,
            lr_scale=row.lr_scale,
            samples_before=row.samples_before,
            tokens_before=row.tokens_before,
        )

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the step's loss is a sum over; what the sum is divided by.

        Raises:
            PlanError: The plan does not know it.
        """
        if self.planned_loss_tokens is None:
            raise PlanError(
                f"the plan does not know the loss tokens of step {self.index}, because it cuts samples that "
                "have labels, plans pairs of sequences, or counted no labels of features; call "
                "packer.count_loss_tokens(step, group), which counts them on every rank"
            )
        return self.planned_loss_tokens


class BatchInfo(NamedTuple):
    """One rank's micro-batch, as planned."""

    accum: int
    """Its place among this rank's micro-batches of the step, from 0."""
    sample_ids: NDArray[np.integer]
    """(n,)"""
    seqlens: NDArray[np.int32]
    """(n,) real tokens of each sample, after any cut."""
    starts: NDArray[np.int32] | None
    """(n,) offset of each piece in its sample; None where no sample of the plan is cut."""
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    """Labels other than −100 in this rank's tensors."""
    planned_loss_tokens: int | None
    """How many there must be by the plan; None where it says so of the whole step only, or not at all."""
    labels_from: LabelsFrom
    """The labels are the data set's, or the token ids; None: there are none that are known as such."""
    padded_seqlen: int
    """S in the padded layout, T in the packed one."""
    shape: tuple[int, int]
    """``(B, S)``, or ``(1, T)``: of the whole micro-batch, also where a rank holds a slice, or nothing, of
    it."""
    is_filler: bool
    """A masked copy: all labels are −100, and it counts for nothing."""
    is_repeat: bool
    """A repeated micro-batch, which trains and counts."""
    sources: NDArray[np.int64]
    """(n,) which of ``plan.sources`` each sample is of; 0 where the plan has one."""


class Batch(dict[str, Any]):
    """A micro-batch: ``model(**batch)`` takes its tensors, its attributes are the fields of ``BatchInfo``.

    A dict, because frameworks know what to do with one. ``to`` and ``pin_memory`` keep the attributes; a
    framework that rebuilds the mapping loses them.
    """

    info: BatchInfo | None
    """What the plan says of this micro-batch."""
    step: StepInfo | None
    """What it says of the micro-batch's step; set when the batch is delivered."""

    def __init__(
        self, tensors: Mapping[str, Any], info: BatchInfo | None = None, step: StepInfo | None = None
    ) -> None:
        super().__init__(tensors)
        self.info = info
        self.step = step

    def __getattr__(self, name: str) -> Any:
        info = self.__dict__.get("info")
        if info is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(info, name)

    def copy(self) -> "Batch":
        """Return a batch of the same tensors."""
        return Batch(self, self.info, self.step)

    def __or__(self, other: Mapping[str, Any]) -> "Batch":  # type: ignore[override]
        return Batch({**self, **other}, self.info, self.step)

    def __ror__(self, other: Mapping[str, Any]) -> "Batch":  # type: ignore[override]
        return Batch({**other, **self}, self.info, self.step)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on ``device``."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch with its tensors in page-locked memory."""
        return self.map_tensors(torch.Tensor.pin_memory)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with ``function(tensor)`` for every tensor, however deep in lists and mappings."""
        return self.map_values(torch.Tensor, function)

    def map_values(self, kind: type[Value], function: Callable[[Value], Any]) -> "Batch":
        """Return the batch with ``function(value)`` for every value of a kind, also within other values."""
        mapped = {name: _mapped(value, kind, function) for name, value in self.items()}
        return Batch(mapped, self.info, self.step)


def _mapped(value: Any, kind: type[Value], function: Callable[[Value], Any]) -> Any:
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Batch):
        return value.map_values(kind, function)
    if isinstance(value, dict):
        return {name: _mapped(item, kind, function) for name, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, kind, function) for item in value]
    if isinstance(value, tuple):
        items = [_mapped(item, kind, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class _Attributes:
    """What a batch is besides its tensors; two batches of the same names have one structure."""

    def __init__(self, batch: Batch) -> None:
        self.names = tuple(batch)
        self.info = batch.info
        self.step = batch.step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attributes) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


def _flatten(batch: Batch) -> tuple[list[Any], _Attributes]:
    return list(batch.values()), _Attributes(batch)


def _flatten_with_keys(batch: Batch) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Attributes]:
    return [(pytree.MappingKey(name), value) for name, value in batch.items()], _Attributes(batch)


def _unflatten(values: Iterable[Any], attributes: _Attributes) -> Batch:
    return Batch(dict(zip(attributes.names, values, strict=True)), attributes.info, attributes.step)


# What walks over nested values in torch, DDP say, sees the tensors of a batch and gives a batch back.
pytree.register_pytree_node(
    Batch,
    _flatten,
    _unflatten,
    serialized_type_name="packer.Batch",
    flatten_with_keys_fn=_flatten_with_keys,
)
