"""What a loader worker does: find a micro-batch in the plan, read its samples, make its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packer.errors import ConfigError, PackerError
from packer.plan import Epoch, MicroBatch, Plan
from packer.runtime.batches.batch import Batch, BatchInfo
from packer.runtime.batches.collate import Collated, Collator, PlannedShape, collate_alike
from packer.runtime.batches.fields import IGNORE_INDEX
from packer.runtime.batches.pairs import collate_members, counted_member
from packer.runtime.batches.pieces import read_pieces, read_samples
from packer.runtime.loader.progress import Place
from packer.runtime.sequence_parallel.shard import RowLayout, Shard, rank_spans
from packer.runtime.sequence_parallel.slices import read_shard
from packer.runtime.topology import Coordinates, row_of

UserCollate = Callable[[Sequence[Any], PlannedShape], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """How a row is cut among the ranks of a sequence-parallel group."""

    shard: Shard = "contiguous"
    ragged: bool = False


class MicroBatchReader:
    """A map-style data set whose items are this rank's micro-batches.

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
        user_collate: UserCollate | None = None,
    ) -> None:
        self._plan = plan
        self._dataset = dataset
        self._coordinates = coordinates
        self._collator = collator
        self._slicing = slicing
        self._user_collate = user_collate
        self._layout = plan.layout
        self._counted_member = counted_member(plan)
        self._step_size = plan.dp_size * plan.grad_accum
        self._pad_segments_to = (
            int(plan.config.get("pad_segments_to") or 1) if self._layout == "packed" else 1
        )
        self._epoch_number: int | None = None
        self._epoch: Epoch | None = None

    def __getitem__(self, place: Place) -> Batch | PackerError:
        """Make one micro-batch; an error of ours is returned, so that it reaches the user as it is."""
        try:
            return self._read(place)
        except PackerError as error:
            return error

    def _read(self, place: Place) -> Batch:
        planned = self._find(place)
        shape = PlannedShape(
            self._layout,
            planned.seqlens,
            planned.padded_seqlen,
            self._pad_segments_to,
            planned.is_filler,
            planned.padded_seqlens,
        )
        if not self._coordinates.reads_samples:
            tensors, num_loss_tokens = Collated({}, 0)
        elif self._coordinates.sp_size > 1:
            tensors, num_loss_tokens = self._slice(planned, shape)
        elif self._user_collate is not None:
            tensors, num_loss_tokens = self._collate_as_told(planned, shape)
        elif planned.padded_seqlens:
            samples = read_samples(self._dataset, planned.sample_ids.tolist())
            tensors, num_loss_tokens = collate_members(
                samples, planned, self._collator, accum=place.accum, counted=self._counted_member
            )
        else:
            samples = read_pieces(self._dataset, planned, self._collator.token_fields)
            tensors, num_loss_tokens = collate_alike(self._collator, samples, planned.sample_ids, shape)
        info = BatchInfo(
            accum=place.accum,
            sample_ids=planned.sample_ids,
            seqlens=planned.seqlens,
            starts=planned.starts,
            num_samples=planned.num_samples,
            num_tokens=planned.num_tokens,
            num_loss_tokens=num_loss_tokens,
            padded_seqlen=planned.padded_seqlen,
            shape=shape.size,
            is_filler=planned.is_filler,
            is_repeat=planned.is_repeat,
        )
        return Batch(tensors, info)

    def _find(self, place: Place) -> MicroBatch:
        if self._epoch is None or place.epoch != self._epoch_number:
            self._epoch, self._epoch_number = self._plan.epoch(place.epoch), place.epoch
        own = self._coordinates
        return self._epoch.microbatch(
            row_of(place.step, place.accum, own.dp_rank, own.dp_size, self._step_size)
        )

    def _slice(self, planned: MicroBatch, shape: PlannedShape) -> Collated:
        own = self._coordinates
        if self._layout == "packed":
            rows = RowLayout.packed(planned.seqlens, planned.padded_seqlen, self._pad_segments_to)
        else:
            rows = RowLayout.padded(planned.seqlens, planned.padded_seqlen)
        spans = rank_spans(rows, own.sp_rank, own.sp_size, self._slicing.shard, ragged=self._slicing.ragged)
        tensors: dict[str, Any] = read_shard(
            self._dataset,
            planned.sample_ids,
            rows,
            spans,
            starts=planned.starts,
            is_filler=planned.is_filler,
            pad_values=self._collator.pad_values,
            token_fields=self._collator.token_fields,
            labels_are_shifted=self._collator.labels_are_shifted,
        )
        num_loss_tokens = int(torch.count_nonzero(tensors["shift_labels"] != IGNORE_INDEX))
        if self._layout == "packed":
            tensors |= {"cu_seqlens": torch.from_numpy(rows.cu_seqlens), "max_seqlen": rows.max_segment}
        return Collated(tensors, num_loss_tokens)

    def _collate_as_told(self, planned: MicroBatch, shape: PlannedShape) -> Collated:
        assert self._user_collate is not None
        if planned.padded_seqlens:
            samples = read_samples(self._dataset, planned.sample_ids.tolist())
        else:
            samples = read_pieces(self._dataset, planned, self._collator.token_fields)
        if self._collator.pad_sample is not None:
            samples = [self._collator.pad_sample(sample, shape.padded_seqlen) for sample in samples]
        collated = self._user_collate(samples, shape)
        if not isinstance(collated, Mapping):
            raise ConfigError(
                f"collate returned a {type(collated).__name__}; let it return a mapping of names to tensors"
            )
        tensors = dict(collated)
        num_loss_tokens = 0
        for name in ("labels", "shift_labels"):
            labels = tensors.get(name)
            if not isinstance(labels, torch.Tensor):
                continue
            if planned.is_filler:
                labels.fill_(IGNORE_INDEX)
            # The first label of a row is not predicted, unless labels were shifted already.
            is_shifted = name == "shift_labels" or self._collator.labels_are_shifted
            num_loss_tokens = int(torch.count_nonzero(labels[..., 0 if is_shifted else 1 :] != IGNORE_INDEX))
        return Collated(tensors, num_loss_tokens)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epoch": None, "_epoch_number": None}
