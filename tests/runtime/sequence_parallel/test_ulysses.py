"""Attention over shared rows is attention over whole rows: results and gradients, any heads, any lengths."""

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from packer.errors import ConfigError
from packer.runtime.sequence_parallel.shard import even_edges
from packer.runtime.sequence_parallel.ulysses import (
    UlyssesAttention,
    head_repeats,
    key_value_heads,
    query_heads,
)
from tests.attentions import flash, flash_varlen, of_ones_own, reference, segments_of, varlen
from tests.ranks import BACKENDS, run_ranks

HEAD_DIM, VALUE_DIM = 8, 4


class Case(NamedTuple):
    attention: str
    num_heads: int
    num_kv_heads: int
    num_rows: int = 1
    row_length: int = 12
    cu_seqlens: tuple[int, ...] | None = None


HEADS = [(4, 4), (4, 2), (4, 1), (5, 5), (6, 3), (6, 2), (7, 1), (8, 2), (12, 4)]
CASES = (
    [Case("varlen", h, kv, cu_seqlens=(0, 5, 6, 12)) for h, kv in HEADS]
    + [Case("sdpa", h, kv, num_rows=3) for h, kv in HEADS]
    # Ragged rows, rows shorter than the ranks are many, one position.
    + [Case(name, 6, 3, row_length=n) for name in ("sdpa", "varlen", "flash") for n in (13, 3, 1)]
    + [Case("sdpa", 6, 3, num_rows=2, row_length=n) for n in (13, 3)]
    + [Case("flash_varlen", 8, 2, row_length=13, cu_seqlens=(0, 1, 2, 9, 13))]
    + [Case("varlen", 4, 2, num_rows=3, row_length=8)]
    + [Case("flash", 6, 2, num_rows=2)]
    + [Case("own", 6, 2, num_rows=2)]
    + [Case("sdpa_with_mask", 6, 2, cu_seqlens=(0, 5, 6, 12))]
    + [Case("flex", 6, 2, cu_seqlens=(0, 5, 6, 12)), Case("flex", 6, 6, num_rows=2)]
)


def build(case: Case, group: Any, device: torch.device) -> tuple[UlyssesAttention, dict[str, Any]]:
    """The module of a case, and what its call needs besides queries, keys and values."""
    cu_seqlens, max_seqlen = None, None
    if case.cu_seqlens is not None:
        cu_seqlens = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
        max_seqlen = max(b - a for a, b in pairwise(case.cu_seqlens))
    call = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "row_length": case.row_length}
    functions = {
        "sdpa": functional.scaled_dot_product_attention,
        "sdpa_with_mask": functional.scaled_dot_product_attention,
        "varlen": varlen,
        "flash_varlen": functools.partial(flash_varlen, softmax_scale=None),
        "flash": flash,
        "flex": flex_attention,
    }
    if case.attention == "own":
        return UlyssesAttention(of_ones_own, group, axis_order="bshd"), call
    if case.attention in ("flex", "sdpa_with_mask"):
        segments = torch.zeros(case.row_length, dtype=torch.int64, device=device)
        if cu_seqlens is not None:
            segments = segments_of(cu_seqlens)

        def sees(batch, head, q, k):
            return (q >= k) & (segments[q] == segments[k])

        if case.attention == "flex":
            size = (case.row_length, case.row_length)
            call["block_mask"] = create_block_mask(sees, None, None, *size, device=device)
        else:
            at = torch.arange(case.row_length, device=device)
            call["attn_mask"] = sees(0, 0, at[:, None], at[None, :])
    return UlyssesAttention(functions[case.attention], group), call


def largest_errors(device: torch.device, cases: list[Case]) -> list[float]:
    """On one rank: the largest deviation of output and gradients from whole rows, case by case."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    errors = []
    for case in cases:
        generator = torch.Generator().manual_seed(7)

        def draw(heads, dim, case=case, generator=generator):
            shape = (case.num_rows, case.row_length, heads, dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

        value_dim = HEAD_DIM if case.attention == "flex" else VALUE_DIM
        whole = [
            draw(case.num_heads, HEAD_DIM),
            draw(case.num_kv_heads, HEAD_DIM),
            draw(case.num_kv_heads, value_dim),
        ]
        weights = draw(case.num_heads, value_dim)
        first, last = even_edges(case.row_length, size)[rank : rank + 2]
        # flex_attention has no backward on the CPU.
        backward = case.attention != "flex" or device.type == "cuda"
        mine = [x[:, first:last].clone().requires_grad_(backward) for x in whole]
        module, call = build(case, group, device)
        output = module(*mine, **call)
        leaves = [x.requires_grad_(backward) for x in whole]
        expected = reference(*leaves, call["cu_seqlens"])
        assert output.shape == expected[:, first:last].shape
        differences = [output - expected[:, first:last]]
        if backward:
            (output * weights[:, first:last]).sum().backward()
            (expected * weights).sum().backward()
            differences += [a.grad - b.grad[:, first:last] for a, b in zip(mine, leaves, strict=True)]
        errors.append(max(float(d.detach().abs().max()) if d.numel() else 0.0 for d in differences))
    return errors


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 4])
def test_equals_attention_over_whole_rows(size: int, backend: str) -> None:
    for errors in run_ranks(largest_errors, size, CASES, backend=backend):
        wrong = {case: error for case, error in zip(CASES, errors, strict=True) if not error < 1e-12}
        assert not wrong


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", [case for case in CASES if case.row_length > 3])
def test_one_rank_is_the_plain_function(case: Case) -> None:
    torch.manual_seed(0)
    dims = ((case.num_heads, HEAD_DIM), (case.num_kv_heads, HEAD_DIM), (case.num_kv_heads, HEAD_DIM))
    tensors = [torch.randn(case.num_rows, case.row_length, *dim, dtype=torch.float64) for dim in dims]
    module, call = build(case, None, torch.device("cpu"))
    torch.testing.assert_close(module(*tensors, **call), reference(*tensors, call["cu_seqlens"]))


def test_not_causal() -> None:
    tensors = [torch.randn(2, 6, 4, HEAD_DIM, dtype=torch.float64) for _ in range(3)]
    expected = reference(*tensors, None, causal=False)
    for function in (functional.scaled_dot_product_attention, flash, varlen):
        output = UlyssesAttention(function, causal=False)(*tensors, cu_seqlens=None)
        torch.testing.assert_close(output, expected)


def test_what_a_partial_has_settled_stays() -> None:
    tensors = [torch.randn(2, 6, 4, HEAD_DIM, dtype=torch.float64) for _ in range(3)]
    module = UlyssesAttention(functools.partial(flash, causal=False))
    torch.testing.assert_close(module(*tensors, cu_seqlens=None), reference(*tensors, None, causal=False))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functional.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (flash, "flash"),
        (flex_attention, "flex"),
    ],
)
def test_packed_rows_are_refused_by_name_where_samples_would_see_each_other(function, name) -> None:
    tensors = [torch.randn(1, 6, 4, HEAD_DIM) for _ in range(3)]
    module = UlyssesAttention(function, causal=False)
    with pytest.raises(
        ConfigError, match=f"{name}.* cannot tell the samples of a packed row apart.*varlen_attn"
    ):
        module(*tensors, cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32), max_seqlen=4)


def test_a_function_of_ones_own_is_refused_packed_rows_it_would_mix() -> None:
    tensors = [torch.randn(1, 6, 4, HEAD_DIM) for _ in range(3)]
    with pytest.raises(ConfigError, match="of_ones_own cannot tell"):
        UlyssesAttention(of_ones_own, axis_order="bshd")(*tensors, cu_seqlens=torch.tensor([0, 2, 6]))


def test_whether_rows_are_packed_must_be_said() -> None:
    tensors = [torch.randn(1, 6, 4, HEAD_DIM) for _ in range(3)]
    with pytest.raises(TypeError, match="cu_seqlens"):
        UlyssesAttention(flash)(*tensors)


@pytest.mark.parametrize(
    ("shapes", "call", "message"),
    [
        (((4, 8), (3, 8), (3, 8)), {"cu_seqlens": None}, "4 query heads do not group over 3"),
        (((4, 8),) * 3, {"cu_seqlens": None, "row_length": 7}, "holds 6 positions.* row of 7 has 7"),
        (((4, 8),) * 3, {"cu_seqlens": torch.tensor([0, 6])}, "pass max_seqlen"),
    ],
)
def test_calls_that_cannot_be_right_are_refused(shapes, call, message) -> None:
    tensors = [torch.randn(1, 6, *shape) for shape in shapes]
    with pytest.raises(ConfigError, match=message):
        UlyssesAttention(varlen)(*tensors, **call)


def test_several_rows_are_not_one_packed_row() -> None:
    tensors = [torch.randn(2, 6, 4, HEAD_DIM) for _ in range(3)]
    with pytest.raises(ConfigError, match="2 rows; pass None"):
        UlyssesAttention(varlen)(*tensors, cu_seqlens=torch.tensor([0, 6]), max_seqlen=6)


def test_mixed_dtypes_are_refused() -> None:
    query, key, value = (torch.randn(1, 6, 4, HEAD_DIM) for _ in range(3))
    with pytest.raises(ConfigError, match=r"torch.float32, torch.float32, torch.bfloat16; cast"):
        UlyssesAttention(flash)(query, key, value.bfloat16(), cu_seqlens=None)


def test_flex_without_a_mask_would_see_the_future() -> None:
    tensors = [torch.randn(1, 6, 4, HEAD_DIM) for _ in range(3)]
    with pytest.raises(ConfigError, match="flex_attention is causal through its block_mask alone"):
        UlyssesAttention(flex_attention)(*tensors, cu_seqlens=None)


def test_an_unknown_axis_order_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="of_ones_own do not tell the order of its axes; pass axis_order"):
        UlyssesAttention(of_ones_own)
    with pytest.raises(ConfigError, match="of_ones_own takes rows end to end"):
        UlyssesAttention(of_ones_own, axis_order="thd")


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("sp_size", range(1, 13))
def test_every_query_head_meets_its_key_value_head(num_kv_heads: int, sp_size: int) -> None:
    num_heads, group = 12, 12 // num_kv_heads
    heads = query_heads(num_heads, sp_size)
    kv_heads = key_value_heads(heads, group)
    assert [head for first, last in heads for head in range(first, last)] == list(range(num_heads))
    for (first, last), (first_kv, last_kv) in zip(heads, kv_heads, strict=True):
        repeats = head_repeats((first, last), group)
        met = [kv for kv, count in zip(range(first_kv, last_kv), repeats, strict=True) for _ in range(count)]
        assert met == [head // group for head in range(first, last)]


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="5 sequence-parallel ranks cannot share 4 heads; take 4 ranks at most"
    ):
        query_heads(4, 5)


def refusals(device: torch.device) -> list[str]:
    """On one rank: what is refused where several ranks share a row, without an exchange that would hang."""
    module = UlyssesAttention(functional.scaled_dot_product_attention, dist.group.WORLD)
    messages = []
    for heads, call in ((1, {"cu_seqlens": None}), (4, {"cu_seqlens": torch.tensor([0, 2, 8])})):
        try:
            module(*(torch.randn(1, 4, heads, HEAD_DIM) for _ in range(3)), **call)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_refusals_come_before_the_first_exchange() -> None:
    for too_few_heads, packed in run_ranks(refusals, 2):
        assert "cannot share 1 heads" in too_few_heads
        assert "scaled_dot_product_attention cannot tell" in packed


class Projected(torch.nn.Module):
    """A projection and attention, to be compiled."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.attention = UlyssesAttention(functional.scaled_dot_product_attention, group)
        self.projection = torch.nn.Linear(3 * 32, 3 * 32, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.projection(x).unflatten(2, (3, 4, 8)).unbind(2)
        return self.attention(*heads, cu_seqlens=None).flatten(2)


def deviation_of_compiled(device: torch.device) -> float:
    """On one rank: how far a compiled module, in one graph, is from itself; output and gradient."""
    torch.manual_seed(0)
    module = Projected(dist.group.WORLD).to(device)
    x = torch.randn(1, 6, 96, dtype=torch.float64, device=device)
    results = []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        output = call(x)
        output.square().sum().backward()
        results.append([output.detach(), module.projection.weight.grad])
        module.zero_grad()
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_one_graph(backend: str) -> None:
    assert max(run_ranks(deviation_of_compiled, 2, backend=backend)) < 1e-12
