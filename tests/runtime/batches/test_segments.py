"""Edges of packed rows in tensors of one shape: what is added is no token, and no attention sees it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packer
from packer.errors import ConfigError, PlanError
from packer.plan import Plan
from packer.runtime import PlanLoader
from packer.runtime.masks import block_diagonal_mask
from tests.attentions import varlen
from tests.runtime.replays import Tokens


def make_plan(lengths: list[int], **options: Any) -> Plan:
    config = packer.PlanConfig(**{"max_tokens": 64, "layout": "packed", "epochs": 2} | options)
    return packer.make_plan(lengths, config)


def batches(plan: Plan, lengths: list[int], **options: Any) -> list[Any]:
    loader = PlanLoader(plan, Tokens(lengths), **options)
    return [batch for _ in range(plan.num_epochs) for batch in loader.microbatches()]


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.sampled_from([{}, {"fixed_seqlen": 64}]))
def test_every_batch_has_edges_of_one_length_that_say_the_same(
    lengths: list[int], options: dict[str, Any]
) -> None:
    plan = make_plan(lengths, **options)
    usual, padded = batches(plan, lengths), batches(plan, lengths, pad_cu_seqlens=True)
    most = max(len(batch["cu_seqlens"]) for batch in usual)
    longest = max(batch["max_seqlen"] for batch in usual)
    for before, after in zip(usual, padded, strict=True):
        edges = after["cu_seqlens"]
        assert edges.dtype == torch.int32
        assert len(edges) == most
        assert after["max_seqlen"] == longest
        known = len(before["cu_seqlens"])
        assert edges[:known].tolist() == before["cu_seqlens"].tolist()
        assert set(edges[known:].tolist()) <= {before.padded_seqlen}
        assert torch.equal(before["position_ids"], after["position_ids"])
        assert torch.equal(block_diagonal_mask(before), block_diagonal_mask(after))


def test_attention_over_padded_edges_is_the_same() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 40).tolist()
    plan = make_plan(lengths, fixed_seqlen=64)
    usual, padded = batches(plan, lengths), batches(plan, lengths, pad_cu_seqlens=True)
    assert len({len(batch["cu_seqlens"]) for batch in usual}) > 1
    torch.manual_seed(0)
    for before, after in zip(usual, padded, strict=True):
        query, key, value = torch.randn(3, 64, 2, 8, dtype=torch.float64)
        outcomes = [
            varlen(
                query,
                key,
                value,
                batch["cu_seqlens"],
                batch["cu_seqlens"],
                batch["max_seqlen"],
                batch["max_seqlen"],
                window_size=(-1, 0),
            )
            for batch in (before, after)
        ]
        assert torch.equal(*outcomes)


def test_more_segments_may_be_asked_for_and_fewer_not() -> None:
    lengths = [20, 20, 20, 40, 40]
    plan = make_plan(lengths)
    needed = max(len(batch["cu_seqlens"]) for batch in batches(plan, lengths)) - 1
    assert all(len(batch["cu_seqlens"]) == 10 for batch in batches(plan, lengths, pad_cu_seqlens=9))
    with pytest.raises(PlanError, match=f"a row of the plan has {needed}; give True or {needed}"):
        batches(plan, lengths, pad_cu_seqlens=needed - 1)


def test_slices_of_a_row_have_the_edges_of_all_others() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 40).tolist()
    plan = make_plan(lengths, sp_size=2, pad_segments_to=4)
    whole = batches(plan, lengths, pad_cu_seqlens=True)
    sliced = batches(plan, lengths, pad_cu_seqlens=True, dp_rank=0, dp_size=1, sp_rank=1, sp_size=2)
    for row, part in zip(whole, sliced, strict=True):
        assert torch.equal(row["cu_seqlens"], part["cu_seqlens"])
        assert row["max_seqlen"] == part["max_seqlen"]


def test_padded_plans_have_no_edges_to_pad() -> None:
    plan = packer.make_plan([3, 4], packer.PlanConfig(max_tokens=8))
    with pytest.raises(ConfigError, match="about packed rows"):
        PlanLoader(plan, Tokens([3, 4]), pad_cu_seqlens=True)
