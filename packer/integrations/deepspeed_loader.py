"""A plan's micro-batches as DeepSpeed hands them out: of any samples, collated by the user."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, SequentialSampler
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from packer.errors import StateError
from packer.metrics import Metrics
from packer.plan import Plan
from packer.runtime import PlanLoader, PlannedShape, StepInfo
from packer.runtime.topology import row_of
from packer.samples import SEQLEN

_SAMPLE = "sample"
_BATCH = "batch"
_CHOSEN = "dataset_filter_ids"


class Chosen(Dataset[Any]):
    """The samples of a data set that a list of ids names, in its order, as often as it names them."""

    def __init__(self, dataset: Any, ids: NDArray[np.int64]) -> None:
        """Item i is sample ``ids[i]``."""
        self._dataset = dataset
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._ids[index])]

    def digest(self) -> str:
        """Return what tells this list from others."""
        return hashlib.sha256(self._ids.astype("<i8").tobytes()).hexdigest()


class AnySamples:
    """A data set whose samples may be anything, as the mappings that the loader asks for.

    Nobody can tell the length of such a sample, so each has the planned one; they are not checked.
    """

    def __init__(self, dataset: Any, lengths: Metrics | NDArray[Any]) -> None:
        """Wrap a data set; lengths of metrics travel to worker processes as a path."""
        self._dataset = dataset
        self._lengths = lengths
        self._seqlens: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        if self._seqlens is None:
            own = self._lengths
            self._seqlens = own.metric(SEQLEN) if isinstance(own, Metrics) else own
        return {"input_ids": range(int(self._seqlens[sample_id])), _SAMPLE: self._dataset[sample_id]}

    def __getstate__(self) -> dict[str, Any]:
        """Leave a mapped file to be mapped again."""
        return self.__dict__ | {"_seqlens": None}


class CollateAny:
    """The user's two callbacks as the loader's ``collate``."""

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None, pad_sample: Callable[[Any, int], Any] | None
    ) -> None:
        """Take what pads each sample to the step's length, and what makes a batch of a list."""
        self._collate = collate
        self._pad_sample = pad_sample

    def __call__(self, samples: Sequence[Any], shape: PlannedShape) -> dict[str, Any]:
        """Wrap the batch, which may be anything, in a mapping."""
        return {_BATCH: self.collate([sample[_SAMPLE] for sample in samples], shape.padded_seqlen)}

    def collate(self, samples: list[Any], padded_seqlen: int) -> Any:
        """Return the batch that the training loop sees."""
        if self._pad_sample is not None:
            samples = [self._pad_sample(sample, padded_seqlen) for sample in samples]
        return samples if self._collate is None else self._collate(samples)


class VariableBatchLoader:
    """This rank's micro-batches of the planned epoch; every iteration plays it again, as DeepSpeed does."""

    def __init__(self, loader: PlanLoader, *, pin_memory: bool = False, chosen: str | None = None) -> None:
        """Hand out what ``loader`` plays, without its wrapping.

        Args:
            loader: Plays this rank's micro-batches.
            pin_memory: Move what is handed out into page-locked memory, as torch's ``DataLoader`` does: where
                there is an accelerator.
            chosen: What tells the samples that were chosen from others; None: all.
        """
        self._loader = loader
        self._flat = loader.microbatches()
        self._pin_memory = pin_memory and torch.accelerator.is_available()
        self._chosen = chosen
        self.on_step: Callable[[], None] = _nothing
        """Called when the first micro-batch of another step is about to be handed out."""

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches in an epoch."""
        return len(self._flat)

    def __iter__(self) -> Iterator[Any]:
        """Play the epoch, or, after ``load_state_dict``, the rest of it."""
        if self._loader.epoch >= self._loader.plan.num_epochs:
            self._loader.set_epoch(0)
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        played: StepInfo | None = None
        for batch in self._flat:
            if batch.step is not played:
                played = batch.step
                self.on_step()
            if self._pin_memory:
                yield pinned(batch[_BATCH])  # type: ignore[no-untyped-call]
            else:
                yield batch[_BATCH]

    @property
    def current_step(self) -> StepInfo:
        """The step being executed: that of the micro-batch handed out last, or the first one to come."""
        return self._loader.current_step

    @property
    def next_step(self) -> StepInfo:
        """The step after the one being executed; at an epoch's end, its first one again."""
        state = self._loader.state_dict()
        plan = self._loader.plan
        epoch, index = state["epoch"] % plan.num_epochs, state["step"]
        return StepInfo.from_row(epoch, index, plan.epoch(epoch).step(index))

    @property
    def num_steps_played(self) -> int:
        """Steps of the epoch that were handed out; where a resumed loop goes on."""
        return int(self.state_dict()["step"])

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: at a step's end, at the next one."""
        return self._loader.state_dict() | {_CHOSEN: self._chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken; a step broken off is played again.

        Raises:
            StateError: The state belongs to another plan, or to other ``dataset_filter_ids``.
        """
        place = dict(state)
        if place.pop(_CHOSEN, None) != self._chosen:
            raise StateError(
                "the state was saved with other dataset_filter_ids, which name other samples; give those, or "
                "start anew without the state"
            )
        self._loader.load_state_dict(place)


class MiddleStageLoader(VariableBatchLoader):
    """What a pipeline stage in the middle has: no data, but the steps that the engine makes."""

    def __init__(self, loader: PlanLoader, engine: Any, *, chosen: str | None = None) -> None:
        """Count the engine's steps instead of micro-batches."""
        super().__init__(loader, chosen=chosen)
        self._engine = engine
        self._first = 0
        self._next_first = 0
        self._engine_start: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begin to count; the engine asks this stage for no data."""
        self._first, self._next_first = self._next_first, 0
        self._engine_start = int(self._engine.global_steps)
        return iter(())

    @property
    def current_step(self) -> StepInfo:
        """The step that the engine is at."""
        return self._step(min(self._index, self._num_steps - 1))

    @property
    def next_step(self) -> StepInfo:
        """The step after it; at an epoch's end, its first one again."""
        return self._step((self._index + 1) % self._num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return what the first and the last stage do."""
        epoch, index = (1, 0) if self._index == self._num_steps else (0, self._index)
        return super().state_dict() | {"epoch": epoch, "step": index, "microbatch": 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from where ``state`` was taken.

        Raises:
            StateError: The state belongs to another plan.
        """
        super().load_state_dict(state)
        self._first = self._next_first = int(self._loader.state_dict()["step"])
        self._engine_start = None

    @property
    def _num_steps(self) -> int:
        return self._loader.plan.epoch(0).num_steps

    @property
    def _index(self) -> int:
        """Steps of the epoch that the engine has made."""
        made = 0 if self._engine_start is None else int(self._engine.global_steps) - self._engine_start
        return self._first + made

    def _step(self, index: int) -> StepInfo:
        return StepInfo.from_row(0, index, self._loader.plan.epoch(0).step(index))


class RankMicrobatches(Dataset[Any]):
    """The planned epoch of one rank as a map-style data set, for loaders that DeepSpeed makes itself."""

    def __init__(self, plan: Plan, dataset: Any, collate: CollateAny, dp_rank: int) -> None:
        """Item i is this rank's i-th micro-batch."""
        self._plan = plan
        self._dataset = dataset
        self._collate = collate
        self._dp_rank = dp_rank

    def __len__(self) -> int:
        return self._plan.epoch(0).num_steps * self._plan.grad_accum

    def __getitem__(self, index: int) -> Any:
        plan = self._plan
        step, accum = divmod(index, plan.grad_accum)
        row = row_of(step, accum, self._dp_rank, plan.dp_size, plan.dp_size * plan.grad_accum)
        planned = plan.epoch(0).microbatch(row)
        samples = [self._dataset[sample_id] for sample_id in planned.sample_ids.tolist()]
        return self._collate.collate(samples, planned.padded_seqlen)

    @staticmethod
    def only(items: list[Any]) -> Any:
        """Return the one micro-batch of a batch of one."""
        (microbatch,) = items
        return microbatch


def io_arguments(microbatches: RankMicrobatches, *, pin_memory: bool, num_workers: int) -> dict[str, Any]:
    """Return arguments for ``engine.deepspeed_io``: sharded already, collated already."""
    return {
        "dataset": microbatches,
        "batch_size": 1,
        "pin_memory": pin_memory and torch.accelerator.is_available(),
        "data_sampler": SequentialSampler(microbatches),
        "collate_fn": RankMicrobatches.only,
        "num_local_io_workers": num_workers,
    }


def _nothing() -> None:
    return
