"""The slices of a row: each token once, the order that torch and Megatron use, refusals that name the
option."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as torch_context_parallel

from packer.errors import ConfigError, PackerError, PlanError
from packer.planner import PlanConfig, make_plan
from packer.runtime.sequence_parallel.shard import (
    RowLayout,
    even_edges,
    position_ids,
    rank_spans,
    require_divisible,
)
from tests.ranks import run_ranks

needs_torchs_balancers = pytest.mark.skipif(
    not hasattr(torch_context_parallel, "_PerDocumentHeadTailLoadBalancer"),
    reason="this torch has no load balancers to compare with",
)
ZIGZAGS = ["zigzag", "zigzag-samples", "zigzag-samples-torch"]


def positions(layout: RowLayout, rank: int, size: int, shard: str, **options: bool) -> list[int]:
    spans = rank_spans(layout, rank, size, shard, **options)
    return [position for first, last in spans.tolist() for position in range(first, last)]


@st.composite
def layouts(draw, multiple=1):
    """A padded or packed layout whose rows and samples are padded to a multiple."""
    seqlens = np.array(draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)), np.int32)
    extra = draw(st.integers(0, 3)) * multiple
    if draw(st.booleans()):
        return RowLayout.padded(seqlens, math.ceil(seqlens.max() / multiple) * multiple + extra)
    padded = -(-seqlens // multiple) * multiple
    return RowLayout.packed(seqlens, int(padded.sum()) + extra, multiple)


@given(layouts(), st.integers(1, 8))
def test_contiguous_slices_tile_the_row(layout, size):
    held = [positions(layout, rank, size, "contiguous", ragged=True) for rank in range(size)]
    assert [position for of_rank in held for position in of_rank] == list(range(layout.row_length))
    assert max(map(len, held)) - min(map(len, held)) <= 1


@given(st.data(), st.integers(1, 4), st.sampled_from(ZIGZAGS))
def test_zigzag_slices_hold_each_position_once_and_equally_many(data, size, shard):
    layout = data.draw(layouts(multiple=2 * size))
    held = [positions(layout, rank, size, shard) for rank in range(size)]
    assert sorted(position for of_rank in held for position in of_rank) == list(range(layout.row_length))
    assert {len(of_rank) for of_rank in held} == {layout.row_length // size}


@given(layouts(), st.integers(1, 5))
def test_positions_restart_in_each_sample_and_in_the_padding(layout, size):
    restarted = [
        n for first, last in np.stack([layout.bounds[:-1], layout.bounds[1:]], 1) for n in range(last - first)
    ]
    for rank in range(size):
        spans = rank_spans(layout, rank, size, ragged=True)
        held = positions(layout, rank, size, "contiguous", ragged=True)
        assert position_ids(layout, spans).tolist() == [restarted[position] for position in held]


def test_segment_edges_of_a_packed_row():
    layout = RowLayout.packed(np.array([3, 5, 8]), 24, pad_segments_to=4)
    assert layout.cu_seqlens.tolist() == [0, 4, 12, 20, 24]
    assert layout.cu_seqlens.dtype == np.int32
    assert layout.max_segment == 8
    assert layout.starts.tolist() == [0, 4, 12]
    assert RowLayout.packed(np.array([3, 5]), 8).cu_seqlens.tolist() == [0, 3, 8]


@needs_torchs_balancers
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_order_of_a_row_is_torchs(size):
    row = 4 * 2 * size
    layout = RowLayout.padded(np.array([row]), row)
    balancer = torch_context_parallel._HeadTailLoadBalancer(row, size, "cpu")
    expected = balancer._generate_indices()[0].chunk(size)
    assert [positions(layout, rank, size, "zigzag") for rank in range(size)] == [
        part.tolist() for part in expected
    ]


@needs_torchs_balancers
@given(st.data(), st.integers(1, 4))
def test_order_per_sample_is_torchs(data, size):
    layout = data.draw(layouts(multiple=2 * size))
    documents = np.diff(layout.bounds).tolist()
    balancer = torch_context_parallel._PerDocumentHeadTailLoadBalancer([documents], size, "cpu")
    expected = balancer._generate_indices()[0].chunk(size)
    held = [positions(layout, rank, size, "zigzag-samples-torch") for rank in range(size)]
    assert held == [part.tolist() for part in expected]


@needs_torchs_balancers
@given(st.data(), st.integers(1, 4))
def test_orders_per_sample_pair_the_same_chunks(data, size):
    layout = data.draw(layouts(multiple=2 * size))
    balancer = torch_context_parallel._PerDocumentHeadTailLoadBalancer(
        [np.diff(layout.bounds).tolist()], size, "cpu"
    )
    # torch: document by document, rank by rank. Megatron: rank by rank, document by document.
    order = balancer._generate_indices()[0].tolist()
    edges = layout.bounds.tolist()
    for rank in range(size):
        expected = []
        for first, last in pairwise(edges):
            share = (last - first) // size
            expected += order[first + rank * share : first + (rank + 1) * share]
        assert positions(layout, rank, size, "zigzag-samples") == expected


def shards_of_torch(device: torch.device, row_length: int, documents: list[int]) -> list[list[int]]:
    """On one rank: what torch's context parallelism leaves of a row of positions, by row and by document."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    balancers = [
        torch_context_parallel._HeadTailLoadBalancer(row_length, mesh.size(), device),
        torch_context_parallel._PerDocumentHeadTailLoadBalancer([documents], mesh.size(), device),
    ]
    row = torch.arange(row_length)[None]
    parts = [torch_context_parallel._context_parallel_shard(mesh, [row], [1], by)[0] for by in balancers]
    return [part[0].tolist() for part in parts]


@needs_torchs_balancers
def test_slices_are_what_torchs_context_parallelism_cuts():
    layout = RowLayout.packed(np.array([4, 3, 12, 5]), 32, pad_segments_to=4)
    documents = np.diff(layout.bounds).tolist()
    for rank, (by_row, by_document) in enumerate(run_ranks(shards_of_torch, 2, 32, documents)):
        assert positions(layout, rank, 2, "zigzag") == by_row
        assert positions(layout, rank, 2, "zigzag-samples-torch") == by_document


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_order_of_a_row_is_megatrons(size, monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    row = 3 * 2 * size
    layout = RowLayout.padded(np.array([row, row - 1]), row)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    for rank in range(size):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        batch = get_batch_on_this_cp_rank({"tokens": torch.arange(row).repeat(2, 1)})
        assert batch["tokens"].tolist() == [positions(layout, rank, size, "zigzag")] * 2


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match=r"contiguous.* over 4 ranks.*\(14 positions\).*--sp-size 4"):
        rank_spans(RowLayout.padded(np.array([14]), 14), 0, 4)
    with pytest.raises(PlanError, match=r"\(14 positions\).*--pad-multiple 4"):
        rank_spans(RowLayout.padded(np.array([14]), 14), 0, 2, "zigzag")
    with pytest.raises(PlanError, match=r"padded samples \(3 positions\).*--pad-segments-to 4"):
        rank_spans(RowLayout.packed(np.array([4, 3]), 8), 0, 2, "zigzag-samples")


def test_samples_that_outgrow_their_row_are_refused():
    with pytest.raises(PlanError, match=r"take 12 positions of a row of 8.*--pad-segments-to"):
        RowLayout.packed(np.array([5, 3]), 8, pad_segments_to=4)


@pytest.mark.parametrize(
    ("config", "size", "shard"),
    [
        ({}, 1, "contiguous"),
        ({"sp_size": 4}, 2, "contiguous"),
        ({"sp_size": 2, "pad_multiple": 3}, 6, "contiguous"),
        ({"pad_multiple": 64}, 2, "zigzag"),
        ({"fixed_seqlen": 4096}, 8, "contiguous"),
        ({"layout": "packed", "pad_segments_to": 8}, 4, "zigzag-samples"),
        ({"layout": "packed", "pad_segments_to": 8, "pad_multiple": 16}, 4, "zigzag-samples-torch"),
        ({"layout": "packed", "pad_segments_to": 8}, 8, "contiguous"),
        ({"layout": "padded", "pad_multiple": 8}, 4, "zigzag-samples"),
    ],
)
def test_plans_that_divide_are_taken(config, size, shard):
    require_divisible(config, size, shard)


@pytest.mark.parametrize(
    ("config", "size", "shard", "cure"),
    [
        ({}, 2, "contiguous", "--sp-size 2"),
        ({"sp_size": 2}, 4, "contiguous", "--sp-size 4"),
        ({"sp_size": 2}, 2, "zigzag", "--pad-multiple 4"),
        ({"sp_size": 2, "fixed_seqlen": 4098}, 4, "contiguous", "a --fixed-seqlen that 4 divides"),
        ({"layout": "packed", "sp_size": 8}, 2, "zigzag-samples", "--pad-segments-to 4"),
        (
            {"layout": "packed", "pad_segments_to": 4, "pad_multiple": 6},
            2,
            "zigzag-samples",
            "--pad-multiple 4",
        ),
        ({"layout": "padded", "pad_segments_to": 4}, 2, "zigzag", "--pad-multiple 4"),
        (
            {"layout": "packed", "pad_segments_to": 8, "fixed_seqlen": 4100},
            4,
            "zigzag-samples",
            "--fixed-seqlen",
        ),
    ],
)
def test_plans_that_may_not_divide_are_refused_with_the_option(config, size, shard, cure):
    with pytest.raises(PlanError, match=f"plan again with.*{cure}"):
        require_divisible(config, size, shard)
    if shard == "contiguous":
        require_divisible(config, size, shard, ragged=True)


def test_arguments_without_meaning_are_refused():
    with pytest.raises(ConfigError, match="'ring' is not known; choose one of contiguous, zigzag"):
        require_divisible({}, 2, "ring")
    with pytest.raises(ConfigError, match="ragged slices are contiguous"):
        require_divisible({}, 2, "zigzag", ragged=True)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_even_edges(total, parts):
    shares = np.diff(even_edges(total, parts))
    assert shares.sum() == total
    assert shares.max() - shares.min() <= 1


@given(
    seqlens=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    layout=st.sampled_from(["padded", "packed"]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "sp_size": st.sampled_from([1, 2, 3, 4]),
            "pad_multiple": st.sampled_from([1, 2, 4, 6, 8]),
            "pad_segments_to": st.sampled_from([1, 2, 4, 8]),
            "fixed_seqlen": st.sampled_from([96, 100, 128]),
            "num_shapes": st.sampled_from([1, 2]),
            "same_seqlen": st.booleans(),
        },
    ),
    size=st.sampled_from([2, 3, 4]),
    shard=st.sampled_from(["contiguous", *ZIGZAGS]),
)
def test_no_row_of_a_plan_that_is_taken_fails_to_divide(seqlens, layout, options, size, shard):
    try:
        plan = make_plan(seqlens, PlanConfig(max_tokens=128, layout=layout, remainder="keep", **options))
        require_divisible(plan.config, size, shard)
    except PackerError:
        return
    epoch = plan.epoch(0)
    for planned in map(epoch.microbatch, range(epoch.num_microbatches)):
        if layout == "packed":
            rows = RowLayout.packed(
                planned.seqlens, planned.padded_seqlen, plan.config.get("pad_segments_to") or 1
            )
        else:
            rows = RowLayout.padded(planned.seqlens, planned.padded_seqlen)
        held = [positions(rows, rank, size, shard) for rank in range(size)]
        assert {len(of_rank) for of_rank in held} == {planned.padded_seqlen // size}
