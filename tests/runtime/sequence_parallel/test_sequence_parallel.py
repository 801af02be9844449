"""One step on dp × sp ranks is the step of one process: loss and gradients in float64, whoever averages."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from examples.decoder import Decoder, DecoderConfig
from packer.errors import ConfigError, PlanError
from packer.plan import Plan, plan_in_memory
from packer.runtime import PlanLoader, count_loss_tokens, measure_loss_multiplier
from packer.runtime.sequence_parallel.shard import RowLayout, rank_spans
from packer.runtime.sequence_parallel.ulysses import UlyssesAttention
from tests import plans
from tests.attentions import varlen
from tests.ranks import BACKENDS, FSDP2_ON_CPU, run_ranks
from tests.runtime.replays import VOCABULARY, Tokens, tokens_of

CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    loss_chunk=5,
)
SEQLENS = [9, 2, 1, 7, 3, 2, 40, 1, 12, 5, 3]
# Some samples are shorter than the ranks are many, and micro-batches differ in tokens as much as they can.
MICROBATCHES = [[0, 1, 2], [3], [4, 5], [6, 7], [8, 9, 10]]
FILLER = 2
TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


def labels_of(sample_id: int, seqlen: int) -> np.ndarray[Any, Any]:
    """The answer's labels: the prompt is the first third, and all of sample 3."""
    labels = tokens_of(sample_id, seqlen).astype(np.int64)
    labels[: seqlen if sample_id == 3 else seqlen // 3] = -100
    return labels


class SlicedTokens(Tokens):
    """A data set that reads slices, and counts the tokens it read."""

    def __init__(self) -> None:
        super().__init__(SEQLENS, labels=labels_of)
        self.num_tokens_read = 0

    def read_slice(self, sample_id: int, start: int, stop: int) -> dict[str, Any]:
        fields = {name: values[start:stop] for name, values in super().__getitem__(sample_id).items()}
        self.num_tokens_read += len(fields["input_ids"])
        return fields


def make_plan(layout: str, multiple: int) -> Plan:
    """One step of five micro-batches and a masked filler, with rows that ``multiple`` divides."""
    rows = []
    for index, sample_ids in enumerate([*MICROBATCHES, MICROBATCHES[FILLER]]):
        pieces = [(sample_id, SEQLENS[sample_id]) for sample_id in sample_ids]
        used = (sum if layout == "packed" else max)(seqlen for _, seqlen in pieces)
        # The row of sample 3 is long enough for slices of nothing but padding.
        length = -(-used // multiple) * multiple + (2 * used // multiple * multiple if index == 1 else 0)
        rows.append(plans.Row(pieces=pieces, padded_seqlen=length, is_filler=index == len(MICROBATCHES)))
    epoch = plans.epoch(rows, dp_size=2, grad_accum=3, layout=layout, loss_tokens=False)
    facts = plans.facts(SEQLENS, dp_size=2, grad_accum=3, layout=layout, sp_size=multiple)
    return plan_in_memory(facts, [epoch], dropped=plans.drops())


def make_model(device: torch.device, layout: str, mesh: DeviceMesh | None) -> Decoder:
    torch.manual_seed(11)
    function = varlen if layout == "packed" else functional.scaled_dot_product_attention
    attention = UlyssesAttention(function, None if mesh is None else mesh["sp"])
    return Decoder(CONFIG, attention).to(device, torch.float64)


def one_big_batch() -> tuple[float, list[torch.Tensor]]:
    """Loss a token and its gradients, sample by sample: neither packed nor padded, sliced nor accumulated."""
    model = make_model(torch.device("cpu"), "padded", None)
    samples = [sample_id for sample_ids in MICROBATCHES for sample_id in sample_ids]
    losses, num_loss_tokens = [], 0
    for sample_id in samples:
        labels = torch.from_numpy(labels_of(sample_id, SEQLENS[sample_id]))
        labels[0] = -100
        num_loss_tokens += int((labels != -100).sum())
        ids = torch.from_numpy(tokens_of(sample_id, SEQLENS[sample_id]).astype(np.int64))
        losses.append(
            model(
                {"input_ids": ids[None], "labels": labels[None], "position_ids": torch.arange(len(ids))[None]}
            )
        )
    loss = torch.stack(losses).sum() / num_loss_tokens
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def sum_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def sum_by_hand(model: Decoder, mesh: DeviceMesh) -> tuple[Any, float]:
    return model, 1.0


def average_by_ddp(model: Decoder, mesh: DeviceMesh) -> tuple[Any, float]:
    return DistributedDataParallel(model), mesh.size()


def average_by_fsdp2(model: Decoder, mesh: DeviceMesh) -> tuple[Any, float]:
    everyone = mesh["dp", "sp"]._flatten("everyone")
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone), mesh.size()


def average_by_hybrid_fsdp2(model: Decoder, mesh: DeviceMesh) -> tuple[Any, float]:
    """Whole copies along dp, shards along sp."""
    return fully_shard(model, mesh=mesh), mesh.size()


WRAPPERS = [sum_by_hand, average_by_ddp]
if FSDP2_ON_CPU:
    WRAPPERS += [average_by_fsdp2, average_by_hybrid_fsdp2]
# Layout, and whether slices are ragged.
KINDS = [("padded", False), ("packed", False), ("packed", True)]


def errors_of_a_step(
    device: torch.device, topology: tuple[int, int], expected_loss: float, expected: list[torch.Tensor]
) -> dict[tuple[str, bool, str], float]:
    """On one rank: how far loss and gradients of a step are from those of one big batch, however it is
    done."""
    mesh = init_device_mesh(device.type, topology, mesh_dim_names=("dp", "sp"))
    errors = {}
    for (layout, ragged), wrap in itertools.product(KINDS, WRAPPERS):
        plan = make_plan(layout, 1 if ragged else topology[1])
        model, multiplier = wrap(make_model(device, layout, mesh), mesh)
        step, probe = (
            next(iter(PlanLoader(plan, SlicedTokens(), mesh=mesh, ragged=ragged, device=device)))
            for _ in range(2)
        )
        first = next(probe)
        measured = measure_loss_multiplier(
            model,
            lambda model=model, first=first: model(first, row_length=first.padded_seqlen),
            after_backward=lambda model=model, wrap=wrap: wrap is sum_by_hand and sum_gradients(model),
        )
        assert measured == multiplier
        num_loss_tokens = count_loss_tokens(step)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in step:
            loss = model(batch, row_length=batch.padded_seqlen)
            (loss * measured / num_loss_tokens).backward()
            total += loss.detach()
        if wrap is sum_by_hand:
            sum_gradients(model)
        dist.all_reduce(total)
        gradients = [parameter.grad for parameter in model.parameters()]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        errors[layout, ragged, wrap.__name__] = max(
            abs(float(total) / num_loss_tokens - expected_loss),
            *(float((g.cpu() - e).abs().max()) for g, e in zip(whole, expected, strict=True)),
        )
    return errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_step_is_that_of_one_big_batch(topology: tuple[int, int], backend: str) -> None:
    size = topology[0] * topology[1]
    loss, gradients = one_big_batch()
    assert min(float(gradient.abs().max()) for gradient in gradients) > 1e-5
    for errors in run_ranks(errors_of_a_step, size, topology, loss, gradients, backend=backend):
        assert len(errors) == len(KINDS) * len(WRAPPERS)
        assert max(errors.values()) < 1e-12, errors


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.called.append(str(function))
        return function(*args, **(kwargs or {}))


def collectives_of_a_loader(device: torch.device, layout: str) -> tuple[list[str], list[str], int, int]:
    """On one rank: what a loader communicates, what a barrier does, and how many tokens were read and are
    held."""
    mesh = init_device_mesh(device.type, (1, dist.get_world_size()), mesh_dim_names=("dp", "sp"))
    dataset = SlicedTokens()
    with Collectives() as by_loader:
        loader = PlanLoader(make_plan(layout, mesh.size()), dataset, mesh=mesh)
        batches = list(loader.microbatches())
        state = loader.state_dict()
        loader.load_state_dict(state)
    with Collectives() as by_barrier:
        dist.barrier()
    return (
        by_loader.called,
        by_barrier.called,
        dataset.num_tokens_read,
        sum(b["input_ids"].numel() for b in batches),
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_loader_communicates_nothing_and_reads_its_slices_alone(layout) -> None:
    pieces = sum(len(sample_ids) for sample_ids in [*MICROBATCHES, MICROBATCHES[FILLER]])
    tokens = sum(SEQLENS[i] for sample_ids in [*MICROBATCHES, MICROBATCHES[FILLER]] for i in sample_ids)
    ranks = run_ranks(collectives_of_a_loader, 2, layout)
    for by_loader, by_barrier, num_read, num_held in ranks:
        assert by_loader == []
        assert by_barrier != []
        assert num_read <= num_held
    # Each rank reads one token ahead of each of its pieces, for that token's label.
    assert tokens <= sum(num_read for _, _, num_read, _ in ranks) <= tokens + 2 * pieces


def slices_of(device: torch.device, layout: str) -> list[tuple[list[Any], list[Any]]]:
    """On one rank: which micro-batches, and which ids of them, it is given."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "sp"))
    loader = PlanLoader(make_plan(layout, 2), SlicedTokens(), mesh=mesh)
    return [(batch.sample_ids.tolist(), batch["input_ids"].tolist()) for batch in loader.microbatches()]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_ranks_of_a_group_are_neighbours_and_share_each_micro_batch(layout) -> None:
    ranks = run_ranks(slices_of, 4, layout)
    for dp_rank in range(2):
        whole = PlanLoader(make_plan(layout, 2), SlicedTokens(), dp_rank=dp_rank, dp_size=2)
        for batch, *slices in zip(whole.microbatches(), *ranks[2 * dp_rank : 2 * dp_rank + 2], strict=True):
            assert [ids for ids, _ in slices] == [batch.sample_ids.tolist()] * 2
            assert (
                np.concatenate([part for _, part in slices], axis=1).tolist() == batch["input_ids"].tolist()
            )


MESHES = [(2, 1, 2), (1, 2, 2), (1, 1, 4)]


def places(device: torch.device) -> list[tuple[int, int, int, int]]:
    """On one rank: its place on each mesh of replicas × shards × sequence ranks."""
    plan, found = make_plan("packed", 4), []
    for shape in MESHES:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
        loader = PlanLoader(plan, SlicedTokens(), mesh=mesh)
        found.append((loader.dp_rank, loader.dp_size, loader.sp_rank, loader.sp_size))
    return found


def test_groups_are_contiguous_on_a_mesh_of_replicas_shards_and_sequence_ranks() -> None:
    for rank, found in enumerate(run_ranks(places, 4)):
        assert found == [(rank // sp, 4 // sp, rank % sp, sp) for _, _, sp in MESHES]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_plan_that_does_not_divide_is_refused(layout) -> None:
    with pytest.raises(PlanError, match="plan again with --sp-size 4"):
        PlanLoader(make_plan(layout, 2), SlicedTokens(), dp_rank=0, dp_size=2, sp_rank=0, sp_size=4)


@pytest.mark.parametrize("option", [{"collate": list}, {"sample_padding_fn": lambda sample, length: sample}])
def test_functions_of_whole_samples_are_refused(option) -> None:
    with pytest.raises(
        ConfigError, match="see whole samples, and the ranks of a sequence-parallel group read"
    ):
        PlanLoader(
            make_plan("padded", 2), SlicedTokens(), dp_rank=0, dp_size=2, sp_rank=0, sp_size=2, **option
        )


@pytest.mark.parametrize("shard", ["zigzag", "zigzag-samples", "zigzag-samples-torch"])
def test_zigzag_slices_put_back_in_place_are_the_row(shard) -> None:
    pieces = [(0, 9), (3, 7), (8, 12)]
    row = plans.Row(pieces=pieces, padded_seqlen=40)
    epoch = plans.epoch([row], layout="packed", loss_tokens=False)
    facts = plans.facts(SEQLENS, layout="packed", pad_segments_to=4)
    plan = plan_in_memory(facts, [epoch], dropped=plans.drops())
    (whole,) = PlanLoader(plan, SlicedTokens(), dp_rank=0, dp_size=1).microbatches()
    layout = RowLayout.packed(np.array([9, 7, 12]), 40, 4)
    for rank in range(2):
        loader = PlanLoader(plan, SlicedTokens(), dp_rank=0, dp_size=1, sp_rank=rank, sp_size=2, shard=shard)
        (batch,) = loader.microbatches()
        spans = rank_spans(layout, rank, 2, shard).tolist()
        for name in ("input_ids", "position_ids"):
            assert batch[name][0].tolist() == [v for a, b in spans for v in whole[name][0, a:b].tolist()]
        shifted = [*whole["labels"][0, 1:].tolist(), -100]
        assert batch["shift_labels"][0].tolist() == [v for a, b in spans for v in shifted[a:b]]
        assert batch["cu_seqlens"].tolist() == whole["cu_seqlens"].tolist() == [0, 12, 20, 32, 40]
        assert batch["max_seqlen"] == whole["max_seqlen"] == 12
