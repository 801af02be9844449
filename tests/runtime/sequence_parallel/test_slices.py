"""Slices read token by token equal slices of the whole row, built in the stated order of operations."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import LengthMismatchError
from packer.runtime.batches.fields import Fields
from packer.runtime.sequence_parallel.shard import RowLayout, rank_spans
from packer.runtime.sequence_parallel.slices import read_shard
from tests import naive

SHARDS = ["contiguous", "zigzag", "zigzag-samples", "zigzag-samples-torch"]


def read(dataset, sample_ids, layout, spans, *, pad_values=None, token_fields=None, **options):
    """The tensors of a slice, of fields that are settled by it."""
    fields = Fields(pad_values=pad_values, token_fields=token_fields)
    return read_shard(dataset, sample_ids, layout, spans, fields, **options).tensors


class Whole:
    """A map-style data set of whole samples."""

    def __init__(self, samples):
        self.samples = samples

    def __getitem__(self, sample_id):
        return self.samples[sample_id]


class Sliced(Whole):
    """A data set that reads slices, and counts the tokens that it read."""

    def __init__(self, samples):
        super().__init__(samples)
        self.tokens_read = 0

    def read_slice(self, sample_id, start, stop):
        fields = {
            name: values[start:stop] for name, values in self.samples[sample_id].items() if name != "name"
        }
        self.tokens_read += len(fields["input_ids"])
        return fields


def sample(number, length, labels=True):
    """A sample whose values say where they come from."""
    ids = 1000 * (number + 1) + np.arange(length)
    fields = {"input_ids": ids.astype(np.int32), "weights": np.stack([ids, -ids], axis=1).astype(np.float32)}
    if labels:
        fields["labels"] = np.where(ids % 3 == 0, -100, ids)
    return fields


@st.composite
def microbatches(draw):
    """(samples, seqlens, starts, layout, sp_size, shard, ragged) of any kind that can be sliced."""
    shard = draw(st.sampled_from(SHARDS))
    size = draw(st.integers(1, 5))
    ragged = shard == "contiguous" and draw(st.booleans())
    multiple = 1 if ragged else size if shard == "contiguous" else 2 * size
    seqlens = np.array(draw(st.lists(st.integers(1, 15), min_size=1, max_size=5)), np.int32)
    labels = draw(st.booleans())
    starts = None
    if draw(st.booleans()):
        starts = np.array([draw(st.integers(0, 4)) for _ in seqlens], np.int32)
    after = [draw(st.integers(0, 2)) if starts is not None else 0 for _ in seqlens]
    begins = np.zeros_like(seqlens) if starts is None else starts
    samples = [
        sample(n, int(b + s + a), labels)
        for n, (b, s, a) in enumerate(zip(begins, seqlens, after, strict=True))
    ]
    extra = draw(st.integers(0, 12)) * multiple
    if draw(st.booleans()):
        layout = RowLayout.padded(seqlens, math.ceil(seqlens.max() / multiple) * multiple + extra)
    else:
        segments = multiple if shard != "contiguous" else 1
        used = int((-(-seqlens // segments) * segments).sum())
        layout = RowLayout.packed(seqlens, math.ceil(used / multiple) * multiple + extra, segments)
    return samples, starts, layout, size, shard, ragged


@pytest.mark.parametrize("kind", [Whole, Sliced])
@pytest.mark.parametrize("is_filler", [False, True])
@given(microbatches())
def test_slices_are_those_of_the_whole_row(kind, is_filler, microbatch):
    samples, starts, layout, size, shard, ragged = microbatch
    begins = np.zeros_like(layout.seqlens) if starts is None else starts
    used = [
        {name: values[begin : begin + seqlen].tolist() for name, values in fields.items()}
        for fields, begin, seqlen in zip(samples, begins.tolist(), layout.seqlens.tolist(), strict=True)
    ]
    segments = list(pairwise(layout.bounds.tolist()))
    rows = [
        naive.row([used[n] for n in np.flatnonzero(layout.rows == row)], segments, is_filler)
        for row in range(layout.num_rows)
    ]
    seen = []
    fields = Fields()  # settled before, so that no sample is read for that alone
    fields.hold(samples, np.arange(len(samples)), [len(whole["input_ids"]) for whole in samples])
    for rank in range(size):
        spans = rank_spans(layout, rank, size, shard, ragged=ragged)
        dataset = kind(samples)
        batch, _ = read_shard(
            dataset, np.arange(len(samples)), layout, spans, fields, starts=starts, is_filler=is_filler
        )
        held = [position for first, last in spans.tolist() for position in range(first, last)]
        seen += held
        assert batch.keys() == {"input_ids", "weights", "position_ids", "shift_labels"}
        for name in batch:
            assert batch[name].tolist() == [[row[name][position] for position in held] for row in rows]
        assert batch["input_ids"].dtype == batch["shift_labels"].dtype == torch.int64
        assert batch["weights"].dtype == torch.float32
        if kind is Sliced:
            tokens = sum(row["is_token"][position] for row in rows for position in held)
            assert tokens <= dataset.tokens_read <= tokens + len(spans) * len(samples)
    assert sorted(seen) == list(range(layout.row_length))


def only_rank(layout, **options):
    return rank_spans(layout, 0, 1, **options)


def test_a_slice_of_padding_has_every_field():
    layout = RowLayout.packed(np.array([3]), 16)
    dataset = Sliced([sample(0, 3)])
    fields = Fields(pad_values={"input_ids": 9})
    batch = read_shard(dataset, np.array([0]), layout, rank_spans(layout, 3, 4), fields).tensors
    assert batch["input_ids"].tolist() == [[9, 9, 9, 9]]
    assert batch["position_ids"].tolist() == [[9, 10, 11, 12]]
    assert batch["shift_labels"].tolist() == [[-100] * 4]
    assert batch["weights"].shape == (1, 4, 2)
    assert batch["weights"].dtype == torch.float32
    assert dataset.tokens_read == 3  # which fields there are is told by a sample of the row, once
    read_shard(dataset, np.array([0]), layout, rank_spans(layout, 3, 4), fields)
    assert dataset.tokens_read == 3


def test_fields_that_are_tensors_stay_tensors_of_their_dtype():
    layout = RowLayout.padded(np.array([2, 3]), 4)
    samples = [{"input_ids": torch.arange(n), "x": torch.ones(n, 2, dtype=torch.bfloat16)} for n in (2, 3)]
    batch = read(Whole(samples), np.arange(2), layout, rank_spans(layout, 1, 2), pad_values={"x": -1})
    assert batch["x"].dtype == torch.bfloat16
    assert batch["x"][..., 0].tolist() == [[-1, -1], [1, -1]]


def test_fields_of_a_sample_as_a_whole_have_no_slice():
    layout = RowLayout.padded(np.array([2]), 2)
    fields = {"input_ids": [5, 6], "name": "ab", "score": 1.5, "both": [1, 2], "three": [1, 2, 3]}
    batch = read(Whole([fields]), np.array([0]), layout, only_rank(layout))
    assert batch.keys() == {"input_ids", "position_ids", "shift_labels", "both"}
    batch = read(Whole([fields]), np.array([0]), layout, only_rank(layout), token_fields=())
    assert batch.keys() == {"input_ids", "position_ids", "shift_labels"}


def test_a_data_set_that_slices_may_bring_along_what_belongs_to_a_sample_as_a_whole():
    class Named(Sliced):
        def read_slice(self, sample_id, start, stop):
            return super().read_slice(sample_id, start, stop) | {"name": f"sample {sample_id}", "score": 0.5}

    layout = RowLayout.packed(np.array([5]), 8)
    for rank in range(4):
        batch = read(Named([sample(0, 5)]), np.array([0]), layout, rank_spans(layout, rank, 4))
        assert batch.keys() == {"input_ids", "weights", "position_ids", "shift_labels"}


def test_labels_that_are_shifted_already_are_not_shifted_again():
    layout = RowLayout.packed(np.array([3, 2]), 6)
    samples = [{"input_ids": np.arange(n), "labels": 10 + np.arange(n)} for n in (3, 2)]
    parts = [
        read(Sliced(samples), np.arange(2), layout, rank_spans(layout, r, 2), labels_are_shifted=True)
        for r in range(2)
    ]
    assert torch.cat([part["shift_labels"][0] for part in parts]).tolist() == [10, 11, 12, 10, 11, -100]


def test_samples_are_read_at_once_where_that_is_offered():
    class Many(Whole):
        def __getitems__(self, sample_ids):
            self.asked = sample_ids
            return [self.samples[sample_id] for sample_id in sample_ids]

    layout = RowLayout.packed(np.array([4, 4, 4, 4]), 16)
    dataset = Many([sample(n, 4) for n in range(4)])
    read(dataset, np.array([3, 1, 0, 2]), layout, rank_spans(layout, 1, 2))
    assert dataset.asked == [0, 2]


@pytest.mark.parametrize("kind", [Whole, Sliced])
@pytest.mark.parametrize("length", [5, 7])
def test_a_sample_of_another_length_is_refused(kind, length):
    layout = RowLayout.packed(np.array([6]), 6)
    dataset = kind([sample(0, 6), sample(1, length)])
    with pytest.raises(
        LengthMismatchError, match=f"sample 1 has {length} tokens and the plan was made for 6;"
    ):
        read(dataset, np.array([1]), layout, rank_spans(layout, 1, 2))


@pytest.mark.parametrize("kind", [Whole, Sliced])
def test_a_cut_sample_may_go_on_but_not_end_early(kind):
    layout = RowLayout.packed(np.array([6]), 6)
    last = rank_spans(layout, 1, 2)
    read(kind([sample(0, 9)]), np.array([0]), layout, last, starts=np.array([2]))
    with pytest.raises(LengthMismatchError, match="has 7 tokens and the plan was made for 6 from token 2 on"):
        read(kind([sample(0, 7)]), np.array([0]), layout, last, starts=np.array([2]))
