"""What a Trainer evaluates on: a plan's micro-batches, or a data set in its own order, each sample once.

Ranks always make the same number of micro-batches, since a model may need all of them for each. Where the
samples do not come out even, some are fillers: their labels are −100, and none of their rows is kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from packer.errors import ConfigError
from packer.integrations.hf_inputs import SHIFTED, forward_parameters, label_ids, model_inputs, takes_pairs
from packer.integrations.labels import IGNORE_INDEX, labels_are_shifted, shifted_labels
from packer.plan import Plan
from packer.runtime import Batch, PlanLoader
from packer.wording import counted

LABELS = "labels"
"""Labels as metrics take them, not shifted, among the inputs: taken out before the model sees them."""

_UNWANTED_DROPS = ("remainder", "min_samples")
"""Reasons for which a plan leaves out samples that nobody asked it to leave out."""


class EvaluationBatch(dict[str, Any]):
    """A model's inputs, with ``labels`` and ``shift_labels`` beside them."""

    is_filler: bool = False
    segments: Sequence[tuple[int, int]] | None = None
    """Where the samples of a packed row begin and end; None where each has a row of its own."""


class PlannedEvaluation:
    """The micro-batches that this process has of a plan for evaluation, as often as it is asked for them."""

    def __init__(self, loader: PlanLoader, model: Any) -> None:
        """Play what ``loader`` plays, as inputs of ``model``."""
        self._loader = loader
        self._model = model
        self._are_shifted = labels_are_shifted(loader.plan)
        self.num_samples: int = loader.plan.header["epochs"][0]["num_samples"]

    def __len__(self) -> int:
        """Return the number of this process's micro-batches."""
        return self._loader.plan.epoch(0).num_steps * self._loader.grad_accum

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """Play the plan's one epoch."""
        self._loader.set_epoch(0)
        for batch in self._loader.microbatches():
            yield self._inputs(batch)

    def _inputs(self, batch: Batch) -> EvaluationBatch:
        inputs = EvaluationBatch(model_inputs(self._model, batch, are_shifted=self._are_shifted))
        inputs[LABELS] = label_ids(self._model, batch)
        assert batch.info is not None  # the loader's own
        inputs.is_filler = batch.info.is_filler
        if "cu_seqlens" in batch:
            starts = batch["cu_seqlens"].tolist()
            lengths = batch.info.seqlens.tolist()
            inputs.segments = [
                (start, start + length) for start, length in zip(starts, lengths, strict=False)
            ]
        return inputs


class PlainEvaluation:
    """A data set in its own order, in batches that are dealt to the processes in turn."""

    def __init__(
        self,
        dataset: Any,
        collate: "PaddingCollator",
        model: Any,
        *,
        batch_size: int,
        rank: int,
        num_ranks: int,
        loader_options: Mapping[str, Any],
    ) -> None:
        """Take this process's share.

        Args:
            dataset: A map-style data set.
            collate: Makes a batch.
            model: What takes it.
            batch_size: Samples of a batch.
            rank: This process's place among those that share the evaluation.
            num_ranks: Their number.
            loader_options: Further arguments of torch's ``DataLoader``.
        """
        self.num_samples = len(dataset)
        ids = range(self.num_samples)
        batches = [list(ids[first : first + batch_size]) for first in ids[::batch_size]]
        self._batches = batches[rank::num_ranks]
        self._num_own = len(self._batches)
        if self._num_own < -(-len(batches) // num_ranks):
            self._batches.append([0])
        self._loader = DataLoader(
            dataset, batch_sampler=self._batches, collate_fn=collate, **dict(loader_options)
        )
        self._taken = set(forward_parameters(model)) | {LABELS, SHIFTED}

    def __len__(self) -> int:
        """Return the number of this process's batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """Read the data set once."""
        for index, batch in enumerate(self._loader):
            inputs = EvaluationBatch({name: value for name, value in batch.items() if name in self._taken})
            inputs[SHIFTED] = shifted_labels(inputs)
            if index >= self._num_own:
                inputs.is_filler = True
                inputs[SHIFTED].fill_(IGNORE_INDEX)
            yield inputs


class PaddingCollator:
    """Samples of ``input_ids``, and ``labels`` where they have some, as rows padded on the right.

    Makes ``input_ids``, ``attention_mask`` and ``labels``, int64 ``(B, S)``. Labels are those of the samples,
    else their ids; padding has −100.
    """

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch of samples."""
        ids = [_as_row(sample["input_ids"]) for sample in samples]
        labels = [_as_row(sample.get(LABELS, sample["input_ids"])) for sample in samples]
        return {
            "input_ids": _padded(ids, 0),
            "attention_mask": _padded([torch.ones_like(row) for row in ids], 0),
            LABELS: _padded(labels, IGNORE_INDEX),
        }


def rows_of(tensor: torch.Tensor, inputs: EvaluationBatch) -> torch.Tensor:
    """Return a tensor ``(1, T, …)`` of a packed row as one row a sample, padded with −100."""
    if inputs.segments is None:
        return tensor
    rows = [tensor[0, first:last] for first, last in inputs.segments]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX)


class RowGatherer:
    """Gathers the rows of all processes, which may differ in number, and leaves out those of fillers."""

    def __init__(self, *, is_copy: bool) -> None:
        """Gather; a process that sees another one's samples is a copy."""
        self._is_copy = is_copy
        self.is_filler = False
        """Whether the rows at hand are a filler's."""

    def __call__(self, tensors: Any) -> Any:
        """Return nested tensors ``(rows, …)`` of all processes."""
        if isinstance(tensors, Mapping):
            return {name: self(tensor) for name, tensor in tensors.items()}
        if isinstance(tensors, tuple | list):
            return type(tensors)(self(tensor) for tensor in tensors)
        return self._gather(tensors[:0] if self.is_filler or self._is_copy else tensors)

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        if not (dist.is_available() and dist.is_initialized()):
            return rows
        counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=rows.device)
        counts[dist.get_rank()] = len(rows)
        dist.all_reduce(counts)
        most = int(counts.max())
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        return torch.cat([own[:count] for own, count in zip(gathered, counts.tolist(), strict=True)])


def pair_up(eval_dataset: Any, eval_plan: Any, load: Callable[[Any], Plan]) -> dict[str | None, Plan]:
    """Return the plan of each evaluation set that has one, under the set's name; None is the only set.

    Raises:
        ConfigError: A plan without its data set.
    """
    if eval_plan is None:
        return {}
    if eval_dataset is None:
        raise ConfigError(
            "eval_plan says in which order to evaluate, and on what is missing; give eval_dataset"
        )
    if isinstance(eval_dataset, dict) != isinstance(eval_plan, Mapping):
        raise ConfigError(
            "eval_dataset and eval_plan name their sets alike: one data set and one plan, or two "
            "dictionaries with the same names"
        )
    if not isinstance(eval_plan, Mapping):
        return {None: load(eval_plan)}
    unknown = sorted(set(eval_plan) - set(eval_dataset))
    if unknown:
        raise ConfigError(
            f"eval_plan[{unknown[0]!r}] has no data set; eval_dataset has "
            + ", ".join(map(repr, eval_dataset))
        )
    return {name: load(plan) for name, plan in eval_plan.items()}


def require_each_sample_once(plan: Plan, what: str) -> None:
    """Refuse a plan that would evaluate some samples never, or twice.

    Raises:
        ConfigError: Names the plan, what it does, and the cure.
    """
    if plan.num_epochs != 1:
        raise ConfigError(
            f"{what} has {plan.num_epochs} epochs, and an evaluation is one; plan it with --epochs 1"
        )
    for source in plan.sources:
        if source.passes != 1:
            raise ConfigError(
                f"{what} passes through {source.label} {source.passes:g} times, and an evaluation counts "
                "each sample once; plan it without --mix, --repeat and totals"
            )
    (epoch,) = plan.header["epochs"]
    dropped = {**plan.header["dropped"], **epoch["dropped"]}
    for reason in _UNWANTED_DROPS:
        if reason in dropped:
            raise ConfigError(
                f"{what} leaves out {counted(dropped[reason]['num_samples'], 'sample')} "
                f"({reason.replace('_', ' ')}), so its loss would be another one; plan the evaluation with "
                "--remainder keep and without --min-samples"
            )
    if epoch["num_repeats"]:
        raise ConfigError(
            f"{what} plays {counted(epoch['num_repeats'], 'micro-batch')} twice (--remainder fill), which "
            "would count twice; plan the evaluation with --remainder keep"
        )


def require_plain(dataset: Any, model: Any, what: str) -> None:
    """Refuse a data set that the padding collator cannot make batches of.

    Raises:
        ConfigError: Names the set, what it lacks, and the cure.
    """
    cure = "give packer.open_dataset(…), eval_plan, or a data_collator of your own"
    if takes_pairs(model):
        raise ConfigError(
            f"{what} is for a model with an encoder and a decoder, whose pairs are not padded here; give "
            "eval_plan, or data_collator=DataCollatorForSeq2Seq(…)"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{what} is a {type(dataset).__name__}, which has no sample by its number; {cure}")
    if not len(dataset):
        raise ConfigError(f"{what} holds no sample to evaluate on; {cure}")
    sample = dataset[0]
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        fields = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ConfigError(f"{what} has samples without input_ids, token ids ({fields}); {cure}")


def _as_row(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.to(torch.int64)
    return torch.from_numpy(np.array(values, np.int64))  # a copy: what a data set maps may be read-only


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
