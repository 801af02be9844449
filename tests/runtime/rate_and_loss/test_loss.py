"""Loss arithmetic: one step of unequal micro-batches is one big batch, on any number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from packer.errors import ConfigError, PlanError
from packer.plan import Plan, plan_in_memory
from packer.runtime import PlanLoader, count_loss_tokens, measure_loss_multiplier
from tests import plans
from tests.ranks import FSDP2_ON_CPU, run_ranks
from tests.runtime.replays import VOCABULARY, Tokens, tokens_of

SEQLENS = [10, 200, 30, 7]


def make_plan(layout: str = "padded", *, loss_tokens: bool = True) -> Plan:
    """One step of four micro-batches with 10, 200, 30 and 7 tokens."""
    rows = [plans.Row(pieces=[(sample_id, seqlen)]) for sample_id, seqlen in enumerate(SEQLENS)]
    epoch = plans.epoch(rows, grad_accum=4, layout=layout, loss_tokens=loss_tokens)
    facts = plans.facts(SEQLENS, grad_accum=4, layout=layout)
    return plan_in_memory(facts, [epoch], dropped=plans.drops())


class Model(nn.Module):
    """Enough of a language model: the loss of a token depends on the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = self.head(self.norm(self.embedding(input_ids)))
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )


def one_big_batch() -> list[torch.Tensor]:
    model = Model().double()
    losses = []
    for sample_id, seqlen in enumerate(SEQLENS):
        ids = torch.from_numpy(tokens_of(sample_id, seqlen)).long()[None]
        losses.append(model(ids, ids))
    (torch.stack(losses).sum() / sum(seqlen - 1 for seqlen in SEQLENS)).backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def by_hand(model: Model) -> Any:
    return model


def by_ddp(model: Model) -> Any:
    return DistributedDataParallel(model)


def by_fsdp2(model: Model) -> Any:
    fully_shard(model.head)
    return fully_shard(model)


def by_fsdp2_that_sums(model: Model) -> Any:
    sharded = fully_shard(model)
    sharded.set_gradient_divide_factor(1.0)
    return sharded


def by_hybrid_fsdp2(model: Model) -> Any:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[Callable[[Model], Any], Callable[[int], float]] = {
    by_hand: lambda world: 1.0,
    by_ddp: float,
}
if FSDP2_ON_CPU:
    WRAPPERS |= {by_fsdp2: float, by_fsdp2_that_sums: lambda world: 1.0, by_hybrid_fsdp2: float}


def a_step(device: torch.device, expected: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
    """On one rank: the multiplier that was measured, and how far the step's gradients are from those
    expected."""
    outcomes = {}
    for wrap in WRAPPERS:
        if wrap is by_hybrid_fsdp2 and dist.get_world_size() == 1:
            continue
        inner = Model().double()
        model = wrap(inner)

        def sum_by_hand(model: Any = model) -> None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

        after_backward = sum_by_hand if wrap is by_hand else None
        loader = PlanLoader(make_plan(), Tokens(SEQLENS))
        ids = torch.from_numpy(tokens_of(dist.get_rank(), 5)).long()[None]
        multiplier = measure_loss_multiplier(
            model, lambda model=model, ids=ids: model(ids, ids), after_backward=after_backward
        )
        assert all(parameter.grad is None for parameter in model.parameters())
        for step in loader:
            assert count_loss_tokens(step) == step.num_loss_tokens
            for batch in step:
                (model(**batch) * multiplier / step.num_loss_tokens).backward()
        if after_backward is not None:
            after_backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        error = max(float((g - e).abs().max()) for g, e in zip(whole, expected, strict=True))
        outcomes[wrap.__name__] = (multiplier, error)
    return outcomes


@pytest.mark.parametrize("world", [1, 2, 4])
def test_unequal_microbatches_give_the_gradient_of_one_big_batch(world: int) -> None:
    for outcomes in run_ranks(a_step, world, one_big_batch()):
        assert len(outcomes) >= len(WRAPPERS) - 1
        for wrap, expected in WRAPPERS.items():
            if wrap.__name__ in outcomes:
                multiplier, error = outcomes[wrap.__name__]
                assert multiplier == expected(world), wrap.__name__
                assert error < 1e-12, wrap.__name__


def nobody_reduces(device: torch.device) -> str:
    model = Model()
    ids = torch.from_numpy(tokens_of(0, 5)).long()[None]  # the same on every rank
    try:
        measure_loss_multiplier(model, lambda: model(ids, ids))
    except ConfigError as error:
        return str(error)
    return "passed"


def test_gradients_that_nobody_reduces_are_no_multiplier() -> None:
    for message in run_ranks(nobody_reduces, 2):
        assert "no common multiple" in message


def multipliers_of_compiled(device: torch.device) -> list[float]:
    """Of a model that ran compiled before it was measured, and of one that was wrapped before."""
    ids = torch.from_numpy(tokens_of(0, 5)).long()[None]
    outer = torch.compile(DistributedDataParallel(Model()), backend="eager")
    inner = DistributedDataParallel(torch.compile(Model(), backend="eager"))
    found = []
    for model in (outer, inner):
        model(ids, ids).backward()
        model.zero_grad()
        found.append(measure_loss_multiplier(model, lambda model=model: model(ids, ids)))
    return found


def test_a_compiled_model_is_measured_as_it_is() -> None:
    assert run_ranks(multipliers_of_compiled, 2) == [[2.0, 2.0]] * 2


def a_loss_of_another_model(device: torch.device) -> str:
    ids = torch.from_numpy(tokens_of(0, 5)).long()[None]
    other = Model()
    with pytest.raises(ConfigError, match="no gradient arrived at the parameters of the model") as error:
        measure_loss_multiplier(Model(), lambda: other(ids, ids))
    return str(error.value)


def test_a_loss_that_is_not_the_models_is_refused() -> None:
    assert len(run_ranks(a_loss_of_another_model, 2)) == 2


def counts_of_copies(device: torch.device) -> dict[str, Any]:
    """On one rank of four: what is counted where ranks have copies of each other's tokens."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def count(group: Any = None, **places: Any) -> Any:
        step = next(iter(PlanLoader(make_plan(), Tokens(SEQLENS), **places)))
        try:
            return count_loss_tokens(step, group)
        except PlanError as error:
            return str(error)

    return {
        "alike": count(dp_rank=rank, dp_size=4),
        "stages": count(pp_size=2),
        "two stages of one": count(pp_size=4),
        "copies": count(tp_size=2),
        "copies of stages": count(pp_size=2, tp_size=2),
        "each stage": count(pairs[rank // 2], pp_size=2),
        "half of the ranks": count(pairs[rank // 2], dp_rank=rank, dp_size=4),
    }


def test_tokens_that_several_ranks_have_are_counted_once() -> None:
    for counts in run_ranks(counts_of_copies, 4):
        partial = counts.pop("half of the ranks")
        assert set(counts.values()) == {sum(SEQLENS) - 4}, counts
        assert "2 ranks of the group read samples, and a step is dealt to 4" in partial


def test_alone_nothing_is_measured_and_nothing_reduced() -> None:
    assert measure_loss_multiplier(Model(), lambda: torch.zeros(())) == 1.0
    loader = PlanLoader(make_plan(loss_tokens=False), Tokens(SEQLENS))
    step = next(iter(loader))
    with pytest.raises(PlanError, match="count_loss_tokens"):
        _ = step.num_loss_tokens
    assert count_loss_tokens(step) == sum(SEQLENS) - 4
    assert loader.state_dict()["microbatch"] == 0  # counting hands nothing out
    assert [batch.num_tokens for batch in step] == SEQLENS


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_means_of_means_would_be_wrong(layout: str) -> None:
    """Guards the test above against a model for which any weighting is right."""
    model = Model().double()
    step = next(iter(PlanLoader(make_plan(layout), Tokens(SEQLENS))))
    for batch in step:
        (model(batch["input_ids"], batch["labels"]) / batch.num_loss_tokens / 4).backward()
    errors = [
        float((parameter.grad - expected).abs().max())  # type: ignore[operator]
        for parameter, expected in zip(model.parameters(), one_big_batch(), strict=True)
    ]
    assert max(errors) > 1e-3
