"""Tensors of a micro-batch: both layouts against what the words of the contract say, value by value."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import ConfigError, LengthMismatchError
from packer.plan import Plan, plan_in_memory
from packer.runtime import Batch, PlanLoader
from packer.runtime.batches.collate import Collator, PlannedShape
from packer.runtime.batches.fields import Fields
from tests import plans
from tests.runtime.replays import Tokens, lengths, make_plan, tokens_of


def one_microbatch(
    pieces: list[tuple[int, ...]],
    seqlens: list[int],
    *,
    layout: str = "padded",
    padded_seqlen: int | None = None,
    cut: bool = False,
    is_filler: bool = False,
    **options: Any,
) -> Plan:
    rows = [plans.Row(pieces=[(0, seqlens[0], 0)[: 2 + cut]])] if is_filler else []
    rows.append(plans.Row(pieces=pieces, padded_seqlen=padded_seqlen, is_filler=is_filler))
    epoch = plans.epoch(rows, grad_accum=len(rows), layout=layout, cut=cut)
    facts = plans.facts(seqlens, grad_accum=len(rows), layout=layout, **options)
    return plan_in_memory(facts, [epoch], dropped=plans.drops())


def last_batch(plan: Plan, dataset: Any, **arguments: Any) -> Batch:
    return list(PlanLoader(plan, dataset, **arguments).microbatches())[-1]


def test_padded_layout() -> None:
    plan = one_microbatch([(1, 2), (0, 3)], [3, 2], padded_seqlen=4)
    batch = last_batch(plan, Tokens([3, 2]), pad_values={"input_ids": 9})
    a, b = tokens_of(1, 2).tolist(), tokens_of(0, 3).tolist()
    assert batch["input_ids"].tolist() == [[*a, 9, 9], [*b, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert batch["labels"].tolist() == [[-100, a[1], -100, -100], [-100, *b[1:], -100]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert (batch.shape, batch.padded_seqlen, batch.num_tokens, batch.num_loss_tokens) == ((2, 4), 4, 5, 3)
    assert batch.seqlens.tolist() == [2, 3]


def test_packed_layout_pads_with_a_sample_of_its_own() -> None:
    plan = one_microbatch([(1, 2), (0, 3)], [3, 2], padded_seqlen=8, layout="packed")
    batch = last_batch(plan, Tokens([3, 2]))
    a, b = tokens_of(1, 2).tolist(), tokens_of(0, 3).tolist()
    assert batch["input_ids"].tolist() == [[*a, *b, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, a[1], -100, *b[1:], -100, -100, -100]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 5, 8]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == 3
    assert (batch.shape, batch.num_loss_tokens) == ((1, 8), 3)


def test_packed_segments_are_padded_on_their_own() -> None:
    plan = one_microbatch([(1, 2), (0, 5)], [5, 2], padded_seqlen=16, layout="packed", pad_segments_to=4)
    batch = last_batch(plan, Tokens([5, 2]))
    a, b = tokens_of(1, 2).tolist(), tokens_of(0, 5).tolist()
    assert batch["input_ids"].tolist() == [[*a, 0, 0, *b, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, a[1], -100, -100, -100, *b[1:], *[-100] * 7]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 12, 16]
    assert batch["position_ids"].tolist() == [[*range(4), *range(8), *range(4)]]
    assert batch["max_seqlen"] == 8


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 5),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_packed_rows_equal_the_padded_ones_end_to_end(
    seqlens: list[int], slack: int, multiple: int, with_labels: bool
) -> None:
    samples = [{"input_ids": tokens_of(i, n)} for i, n in enumerate(seqlens)]
    if with_labels:
        samples = [s | {"labels": np.where(s["input_ids"] % 3 == 0, -100, s["input_ids"])} for s in samples]
    segments = [-(-n // multiple) * multiple for n in seqlens]
    lens = np.array(seqlens, np.int32)
    fields = Fields(pad_values={"input_ids": 5})
    fields.hold(samples, np.arange(len(samples)), seqlens)
    packed, packed_count, *_ = Collator()(
        samples, PlannedShape("packed", lens, sum(segments) + slack, multiple, False), fields
    )
    padded, padded_count, *_ = Collator()(
        samples, PlannedShape("padded", lens, max(segments), 1, False), fields
    )
    assert packed_count == padded_count == int((packed["labels"] != -100).sum())
    assert packed_count == int((padded["labels"][:, 1:] != -100).sum())
    start = 0
    for row, (seqlen, segment) in enumerate(zip(seqlens, segments, strict=True)):
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(packed[name][0, start : start + segment], padded[name][row, :segment]), name
        assert padded["attention_mask"][row].tolist() == [1] * seqlen + [0] * (max(segments) - seqlen)
        start += segment
    assert (packed["input_ids"][0, start:] == 5).all()
    edges = np.concatenate([[0], np.cumsum(segments), [start + slack] if slack else []])
    assert packed["cu_seqlens"].tolist() == edges.tolist()
    assert packed["max_seqlen"] == max(np.diff(edges))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_fillers_have_no_labels_and_count_for_nothing(layout: str) -> None:
    plan = one_microbatch([(1, 2), (0, 3)], [3, 2], layout=layout, is_filler=True)
    batch = last_batch(plan, Tokens([3, 2]))
    assert batch.is_filler
    assert (batch["labels"] == -100).all()
    assert batch.num_loss_tokens == 0
    assert batch["input_ids"].count_nonzero() == 5


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_token_aligned_fields_keep_dtype_and_trailing_shape_and_others_become_lists(layout: str) -> None:
    def codebooks(sample_id: int, seqlen: int) -> Any:
        return np.full((seqlen, 4), sample_id, np.uint8)

    def embeddings(sample_id: int, seqlen: int) -> Any:
        return torch.full((seqlen, 2, 3), sample_id, dtype=torch.bfloat16)

    dataset = Tokens(
        [3, 2],
        codebooks=codebooks,
        embeddings=embeddings,
        weights=lambda i, n: [0.5] * n,
        text=lambda i, n: "x" * n,
        name=lambda i, n: i,
        image=lambda i, n: np.zeros((7, 7)),
    )
    plan = one_microbatch([(1, 2), (0, 3)], [3, 2], padded_seqlen=6, layout=layout)
    batch = last_batch(plan, dataset, pad_values={"embeddings": -1.5, "codebooks": 255})
    size = (2, 6) if layout == "padded" else (1, 6)
    assert (batch["codebooks"].dtype, batch["codebooks"].shape) == (torch.uint8, (*size, 4))
    assert (batch["embeddings"].dtype, batch["embeddings"].shape) == (torch.bfloat16, (*size, 2, 3))
    assert (batch["weights"].dtype, batch["weights"].shape) == (torch.float64, size)
    if layout == "padded":
        assert batch["codebooks"][..., 0].tolist() == [[1, 1, 255, 255, 255, 255], [0, 0, 0, 255, 255, 255]]
    else:
        assert batch["embeddings"][0, :, 0, 0].tolist() == [1, 1, 0, 0, 0, -1.5]
    assert batch["text"] == ["xx", "xxx"]
    assert batch["name"] == [1, 0]
    assert [image.shape for image in batch["image"]] == [(7, 7)] * 2


def test_fields_named_token_aligned_are_the_only_ones() -> None:
    dataset = Tokens([3, 2], kinds=lambda i, n: np.arange(n), scores=lambda i, n: np.arange(n))
    plan = one_microbatch([(1, 2), (0, 3)], [3, 2])
    batch = last_batch(plan, dataset, token_fields=["kinds"])
    assert batch["kinds"].shape == (2, 3)
    assert isinstance(batch["scores"], list)


class Slices(Tokens):
    """A data set that reads parts of samples, and only those."""

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        raise AssertionError("a whole sample was read")

    def read_slice(self, sample_id: int, start: int, stop: int) -> dict[str, Any]:
        whole = Tokens.__getitem__(self, sample_id)
        return {name: value[start:stop] for name, value in whole.items()}


@pytest.mark.parametrize("source", [Tokens, Slices])
def test_cut_samples_arrive_cut(source: type[Tokens]) -> None:
    plan = one_microbatch([(0, 3, 2), (1, 2, 0)], [7, 4], cut=True)
    batch = last_batch(plan, source([7, 4], kinds=lambda i, n: np.arange(n)))
    assert batch["kinds"].tolist() == [[2, 3, 4], [0, 1, 0]]
    assert batch["input_ids"][0].tolist() == tokens_of(0, 7)[2:5].tolist()
    assert batch["labels"][0, 0] == -100  # a piece's first token is not predicted
    assert batch.starts.tolist() == [2, 0]
    with pytest.raises(LengthMismatchError, match=r"sample 0 has 4 tokens.* 3 from token 2 on"):
        last_batch(plan, source([4, 4]))


def test_labels_analyzed_without_a_shift_count_from_the_first() -> None:
    facts = plans.facts([3, 2])
    source = replace(facts.sources[0], definition={"labels_column": "labels", "shift": False})
    facts = replace(facts, sources=[source], loss_tokens="labels")
    epoch = replace(plans.epoch([plans.Row(pieces=[(0, 3), (1, 2)])]), step_num_loss_tokens=np.array([5]))
    plan = plan_in_memory(facts, [epoch], dropped=plans.drops())
    batch = last_batch(plan, Tokens([3, 2], labels=lambda i, n: np.arange(1, n + 1)))
    assert batch["labels"].tolist() == [[1, 2, 3], [1, 2, -100]]
    assert batch.num_loss_tokens == 5


def test_a_users_function_pads_the_samples() -> None:
    def pad_left_field(sample: Any, length: int) -> dict[str, Any]:
        missing = length - len(sample["input_ids"])
        return {"input_ids": np.pad(sample["input_ids"], (0, missing), constant_values=77)}

    plan = one_microbatch([(1, 2), (0, 3)], [3, 2], padded_seqlen=4)
    batch = last_batch(plan, Tokens([3, 2]), sample_padding_fn=pad_left_field)
    assert batch["input_ids"][:, 3].tolist() == [77, 77]
    assert batch["labels"][:, 3].tolist() == [-100, -100]
    packed = one_microbatch([(1, 2)], [3, 2], layout="packed")
    with pytest.raises(ConfigError, match="sample_padding_fn"):
        PlanLoader(packed, Tokens([3, 2]), sample_padding_fn=pad_left_field)


def test_a_users_collate_gets_samples_and_the_planned_shape() -> None:
    seen = []

    def collate(samples: Any, shape: PlannedShape) -> dict[str, torch.Tensor]:
        seen.append(shape)
        ids = torch.zeros(shape.size, dtype=torch.int32)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample["input_ids"])] = torch.as_tensor(sample["input_ids"])
        return {"input_ids": ids, "labels": ids.clone()}

    plan = one_microbatch([(1, 2), (0, 3)], [3, 2], padded_seqlen=4, is_filler=True)
    batch = last_batch(plan, Tokens([3, 2]), collate=collate)
    assert seen[-1].size == (2, 4)
    assert seen[-1].is_filler
    assert batch["input_ids"].dtype == torch.int32
    assert (batch["labels"] == -100).all()
    assert batch.num_loss_tokens == 0
    assert batch.num_tokens == 5


@pytest.mark.parametrize("pp_rank", [0, 1, 2])
def test_only_the_outer_pipeline_stages_read_samples(pp_rank: int) -> None:
    seqlens = lengths(16)
    plan = make_plan(seqlens, steps=4)
    dataset = Tokens(seqlens)
    batches = list(PlanLoader(plan, dataset, pp_rank=pp_rank, pp_size=3).microbatches())
    shapes = [(2, plan.epoch(0).microbatch(row).padded_seqlen) for row in range(4)]
    assert [batch.shape for batch in batches] == shapes
    assert bool(dataset.read) == (pp_rank != 1)
    assert [dict(batch) == {} for batch in batches] == [pp_rank == 1] * 4


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", [list, torch.from_numpy, np.uint16])
def test_tokens_may_be_lists_tensors_and_arrays_of_any_integers(layout: str, kind: Any) -> None:
    samples = {0: tokens_of(0, 3), 1: tokens_of(1, 2)}
    dataset = [{"input_ids": kind(ids), "labels": kind(ids), "mask": kind(ids)} for ids in samples.values()]
    plan = one_microbatch([(1, 2), (0, 3)], [3, 2], padded_seqlen=6, layout=layout)
    batch = last_batch(plan, dataset)
    plain = last_batch(plan, Tokens([3, 2]))
    assert all(torch.equal(batch[name], plain[name]) for name in ("input_ids", "labels", "position_ids"))
    assert torch.equal(batch["mask"].long(), plain["input_ids"])
