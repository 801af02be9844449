"""What a loader worker does: find a micro-batch in the plan, read its samples, make its tensors."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packer.errors import ConfigError, PackerError, SourceError
from packer.plan import Epoch, MicroBatch, Plan
from packer.plan.sources import with_rows
from packer.runtime.batches.batch import Batch, BatchInfo, LabelsFrom
from packer.runtime.batches.collate import (
    Collated,
    Collator,
    PlannedShape,
    collate_alike,
    pad_on_the_right,
)
from packer.runtime.batches.fields import IGNORE_INDEX, INPUT_IDS, LABELS, Fields
from packer.runtime.batches.pairs import (
    collate_members,
    collate_packed_members,
    counted_member,
    packed_members,
)
from packer.runtime.batches.pieces import read_pieces, read_samples
from packer.runtime.batches.rows import MicroBatchDataset, read_row, reads_microbatches
from packer.runtime.batches.segments import Segments
from packer.runtime.batches.sources import sources_of_samples
from packer.runtime.loader.order import LargestFirst, open_epoch, planned_row
from packer.runtime.loader.progress import Place, Read
from packer.runtime.loader.randomness import Randomness
from packer.runtime.sequence_parallel.shard import RowLayout, Shard, rank_spans
from packer.runtime.sequence_parallel.slices import read_shard
from packer.runtime.topology import Coordinates, row_of

UserCollate = Callable[[Sequence[Any], PlannedShape], Mapping[str, Any]]

_FROM_SEQLENS = "seqlen - 1"
"""How a plan says that it took every token but a sample's first for a loss token."""


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """How a row is cut among the ranks of a sequence-parallel group."""

    shard: Shard = "contiguous"
    ragged: bool = False


class MicroBatchReader:
    """Makes this rank's micro-batches.

    It pickles small: the plan travels as its path and is mapped in each process.
    """

    def __init__(
        self,
        plan: Plan,
        dataset: Any,
        coordinates: Coordinates,
        collator: Collator,
        *,
        slicing: Slicing,
        fields: Fields,
        randomness: Randomness,
        length_fields: Mapping[str, str] | None = None,
        user_collate: UserCollate | None = None,
        segments: Segments | None = None,
        largest_first: bool = False,
    ) -> None:
        self._plan = plan
        self._dataset = dataset
        self._coordinates = coordinates
        self._collator = collator
        self._slicing = slicing
        self._randomness = randomness
        self._user_collate = user_collate
        self._segments = segments
        self._largest_first = largest_first
        self._layout = plan.layout
        budgets = plan.config["max_tokens"]
        members = tuple(budgets) if isinstance(budgets, Mapping) else ()
        self._fields = fields
        self._fields_of = {
            metric: fields.anew((length_fields or {}).get(metric, INPUT_IDS)) for metric in members
        }
        self._counted_member = counted_member(plan)
        self._packed_members = packed_members(plan)
        self._counts_every_token = not members and plan.header.get("loss_tokens") == _FROM_SEQLENS
        self._step_size = plan.dp_size * plan.grad_accum
        self._pad_segments_to = (
            int(plan.config.get("pad_segments_to") or 1) if self._layout == "packed" else 1
        )
        self._epoch_number: int | None = None
        self._epoch: Epoch | LargestFirst | None = None

    def read(self, place: Place, *, in_worker: bool = False) -> Read:
        """Make one micro-batch; what keeps it from being made stands in its place."""
        try:
            batch = self.make(place, self.row_of(place), in_worker=in_worker)
            return Read(place, batch, self._signature if self._fields_of else self._fields.signature)
        except PackerError as error:
            return Read(place, self._with_rows(error))
        except Exception as error:
            wrong = SourceError(
                f"micro-batch {place.accum} of step {place.step} could not be made: {type(error).__name__}: "
                f"{error}; the trace says where, in the data set or in a function given to PlanLoader"
            )
            wrong.__cause__ = error
            return Read(place, wrong)

    def _with_rows(self, error: PackerError) -> PackerError:
        """Return an error that says which source's row a sample is."""
        told = with_rows(str(error), self._plan.sources)
        if told == str(error):
            return error
        located = type(error)(told)
        located.__cause__ = error.__cause__
        return located

    @property
    def _signature(self) -> tuple[Any, ...]:
        return tuple(fields.signature for fields in self._fields_of.values())

    def row_of(self, place: Place) -> int:
        """Return the row of this rank's micro-batch at a place."""
        own = self._coordinates
        return row_of(place.step, place.accum, own.dp_rank, own.dp_size, self._step_size)

    def make(self, place: Place, row: int, *, in_worker: bool = False) -> Batch:
        """Make the micro-batch of a row, whichever rank's it is, as if it were this rank's at the place."""
        own = self._coordinates
        if self._epoch is None or place.epoch != self._epoch_number:
            self._epoch = open_epoch(self._plan, place.epoch, largest_first=self._largest_first)
            self._epoch_number = place.epoch
        planned = self._epoch.microbatch(row)
        row = planned_row(self._epoch, row)
        dataset = self._dataset
        if own.reads_samples and reads_microbatches(dataset):
            if dataset.rows_ahead:
                self._prefetch(dataset, place)
            copies = self._user_collate is not None or self._collator.pad_sample is not None
            dataset = read_row(dataset, place.epoch, row, planned, copies=copies)
        shape = PlannedShape(
            self._layout,
            planned.seqlens,
            planned.padded_seqlen,
            self._pad_segments_to,
            planned.is_filler,
            planned.padded_seqlens,
        )
        if not own.reads_samples:
            collated = Collated({}, 0, None)
        elif not self._randomness.is_due(in_worker=in_worker):
            collated = self._collate(dataset, planned, shape, place.accum)
        else:
            draws = self._randomness.is_used
            make = functools.partial(self._collate, dataset, planned, shape, place.accum)
            collated = self._randomness.make(place.epoch, row, make, in_worker=in_worker)
            if own.sp_size > 1 and self._randomness.is_used and not draws:
                # What was drawn for one slice was not drawn for the others: now every rank reads all of it.
                collated = self._randomness.make(place.epoch, row, make, in_worker=in_worker)
        info = BatchInfo(  # by their places: names would cost more than anything else here
            place.accum,
            planned.sample_ids,
            planned.seqlens,
            planned.starts,
            planned.num_samples,
            planned.num_tokens,
            collated.num_loss_tokens,
            self._planned_loss_tokens(planned, collated),
            collated.labels_from,
            planned.padded_seqlen,
            shape.size,
            planned.is_filler,
            planned.is_repeat,
            sources_of_samples(self._plan.sources, planned.sample_ids),
        )
        tensors = collated.tensors
        if self._segments is not None and "cu_seqlens" in tensors:
            tensors = self._segments.pad(tensors)
        return Batch(tensors, info)

    def _planned_loss_tokens(self, planned: MicroBatch, collated: Collated) -> int | None:
        """Return the labels that the plan counted, None where it cannot know them."""
        if planned.is_filler:
            return 0
        if self._counts_every_token:
            return collated.num_predictable
        # A slice has some of the row's; and a plan of pairs counts the sources, the loss is over the targets.
        is_part = self._coordinates.sp_size > 1 or bool(planned.padded_seqlens)
        return None if is_part else planned.num_loss_tokens

    def _prefetch(self, dataset: MicroBatchDataset, place: Place) -> None:
        """Name the micro-batches that this process reads next: every one, or every W-th of W workers'."""
        assert self._epoch is not None
        own = self._coordinates
        worker = torch.utils.data.get_worker_info()
        stride = 1 if worker is None else worker.num_workers
        grad_accum = self._step_size // own.dp_size
        first = place.step * grad_accum + place.accum
        last = self._epoch.num_steps * grad_accum
        rows = [
            row_of(at // grad_accum, at % grad_accum, own.dp_rank, own.dp_size, self._step_size)
            for at in range(first, min(first + stride * (1 + dataset.rows_ahead), last), stride)
        ]
        dataset.prefetch(place.epoch, [planned_row(self._epoch, row) for row in rows])

    def _collate(self, dataset: Any, planned: MicroBatch, shape: PlannedShape, accum: int) -> Collated:
        if self._coordinates.sp_size > 1:
            return self._slice(dataset, planned, shape)
        if self._user_collate is not None:
            return self._collate_as_told(dataset, planned, shape)
        if planned.padded_seqlens:
            samples = read_samples(dataset, planned.sample_ids.tolist())
            return collate_members(
                samples,
                planned,
                self._collator,
                self._fields_of,
                accum=accum,
                counted=self._counted_member,
                sources=sources_of_samples(self._plan.sources, planned.sample_ids),
            )
        if self._packed_members:
            samples = read_samples(dataset, planned.sample_ids.tolist())
            return collate_packed_members(
                samples, planned, self._collator, self._fields, self._packed_members
            )
        samples = read_pieces(dataset, planned, self._fields)
        return collate_alike(self._collator, samples, planned.sample_ids, shape, self._fields)

    def _slice(self, dataset: Any, planned: MicroBatch, shape: PlannedShape) -> Collated:
        own = self._coordinates
        if self._layout == "packed":
            rows = RowLayout.packed(planned.seqlens, planned.padded_seqlen, self._pad_segments_to)
        else:
            rows = RowLayout.padded(planned.seqlens, planned.padded_seqlen)
        spans = rank_spans(rows, own.sp_rank, own.sp_size, self._slicing.shard, ragged=self._slicing.ragged)
        tensors, num_predictable = read_shard(
            dataset,
            planned.sample_ids,
            rows,
            spans,
            self._fields,
            starts=planned.starts,
            is_filler=planned.is_filler,
            labels_are_shifted=self._collator.first_label_counts,
            reads_whole_row=self._randomness.is_used,
        )
        num_loss_tokens = int(torch.count_nonzero(tensors["shift_labels"] != IGNORE_INDEX))
        more = {}
        if self._layout == "packed":
            more = {"cu_seqlens": torch.from_numpy(rows.cu_seqlens), "max_seqlen": rows.max_segment}
        labels_from: LabelsFrom = "dataset" if self._fields.has_labels else "input_ids"
        return Collated(tensors | more, num_loss_tokens, labels_from, num_predictable)

    def _collate_as_told(self, dataset: Any, planned: MicroBatch, shape: PlannedShape) -> Collated:
        assert self._user_collate is not None
        if planned.padded_seqlens or self._packed_members:
            samples = read_samples(dataset, planned.sample_ids.tolist())
        else:
            samples = read_pieces(dataset, planned, self._fields)
        if self._collator.pad_sample is not None:
            samples = [
                pad_on_the_right(
                    self._collator.pad_sample, sample, shape.padded_seqlen, self._fields.length_field
                )
                for sample in samples
            ]
        if planned.is_filler:
            samples = [_without_labels(sample) for sample in samples]
        collated = self._user_collate(samples, shape)
        if not isinstance(collated, Mapping):
            raise ConfigError(
                f"collate returned a {type(collated).__name__}; let it return a mapping of names to tensors"
            )
        tensors = dict(collated)
        num_loss_tokens = None
        for name in ("labels", "shift_labels"):
            if name not in tensors:
                continue
            labels = tensors[name]
            labels = labels if isinstance(labels, torch.Tensor) else torch.as_tensor(np.asarray(labels))
            if planned.is_filler:
                labels = torch.full_like(labels, IGNORE_INDEX)
                tensors[name] = labels if isinstance(tensors[name], torch.Tensor) else labels.numpy()
            # The first label of a row is not predicted, unless labels were shifted already.
            is_shifted = name == "shift_labels" or self._collator.first_label_counts
            num_loss_tokens = int(torch.count_nonzero(labels[..., 0 if is_shifted else 1 :] != IGNORE_INDEX))
        if num_loss_tokens is not None:
            labels_from: LabelsFrom = "dataset" if self._fields.has_labels else "input_ids"
            return Collated(tensors, num_loss_tokens, labels_from, planned.num_tokens - planned.num_samples)
        if planned.is_filler:
            raise ConfigError(
                f"a micro-batch is a filler, whose labels must all be {IGNORE_INDEX}, and collate returned "
                f"neither labels nor shift_labels but {', '.join(map(str, tensors))}; let it name them "
                "so, or plan with --remainder drop or fill"
            )
        return Collated(tensors, 0, None)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epoch": None, "_epoch_number": None}


def _without_labels(sample: Any) -> Any:
    """Return a sample whose labels, where it has some, are all −100."""
    if not (isinstance(sample, Mapping) and LABELS in sample):
        return sample
    labels = sample[LABELS]
    if isinstance(labels, torch.Tensor):
        return {**sample, LABELS: torch.full(labels.shape, IGNORE_INDEX)}
    return {**sample, LABELS: np.full(np.shape(labels), IGNORE_INDEX)}
