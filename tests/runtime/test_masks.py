"""Masks: attention under each of them equals attention over every sample alone."""

import itertools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from packer.errors import ConfigError
from packer.plan import plan_in_memory
from packer.runtime import Batch, PlanLoader
from packer.runtime.masks import block_diagonal_mask, causal_mask, flex_block_mask
from tests import plans
from tests.runtime.replays import Tokens


def batch_of(seqlens: list[int], padded_seqlen: int, layout: str) -> Batch:
    row = plans.Row(pieces=list(enumerate(seqlens)), padded_seqlen=padded_seqlen)
    plan = plan_in_memory(
        plans.facts(seqlens, layout=layout), [plans.epoch([row], layout=layout)], dropped=plans.drops()
    )
    return next(iter(PlanLoader(plan, Tokens(seqlens)).microbatches()))


def values(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    return query, key, value


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 3))
def test_padded_rows_see_what_their_samples_would_alone(seqlens: list[int], slack: int) -> None:
    length = max(seqlens) + slack
    mask = causal_mask(batch_of(seqlens, length, "padded"))
    assert mask.shape == (len(seqlens), length, length)
    query, key, value = values(len(seqlens), 2, length, 4)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    assert not out.isnan().any()
    for row, seqlen in enumerate(seqlens):
        alone = scaled_dot_product_attention(
            query[row, :, :seqlen], key[row, :, :seqlen], value[row, :, :seqlen], is_causal=True
        )
        torch.testing.assert_close(out[row, :, :seqlen], alone)
        assert not mask[row, :, seqlen:].any()
    out.sum().backward()
    assert not value.grad.isnan().any()  # type: ignore[union-attr]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 3))
def test_packed_samples_do_not_see_each_other(seqlens: list[int], slack: int) -> None:
    batch = batch_of(seqlens, sum(seqlens) + slack, "packed")
    query, key, value = values(1, 2, sum(seqlens) + slack, 4)
    mask = block_diagonal_mask(batch)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    edges = batch["cu_seqlens"].tolist()
    for start, stop in itertools.pairwise(edges):
        part = (slice(None), slice(None), slice(start, stop))
        alone = scaled_dot_product_attention(query[part], key[part], value[part], is_causal=True)
        torch.testing.assert_close(dense[part], alone)


def test_flex_attention_skips_the_blocks_between_samples() -> None:
    seqlens = [128, 100, 28, 128]
    batch = batch_of(seqlens, 512, "packed")
    block_mask = flex_block_mask(batch)
    query, key, value = (tensor.detach().float() for tensor in values(1, 2, 512, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it would be faster compiled
        flexed = flex_attention(query, key, value, block_mask=block_mask)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=block_diagonal_mask(batch)[:, None])
    torch.testing.assert_close(flexed, dense)
    assert block_mask.to_dense()[0, 0].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_a_mask_of_the_other_layout_is_refused() -> None:
    padded, packed = batch_of([2, 3], 4, "padded"), batch_of([2, 3], 6, "packed")
    with pytest.raises(ConfigError, match="take block_diagonal_mask"):
        causal_mask(packed)
    with pytest.raises(ConfigError, match="take causal_mask"):
        block_diagonal_mask(padded)
    with pytest.raises(ConfigError, match="take causal_mask"):
        flex_block_mask(padded)
