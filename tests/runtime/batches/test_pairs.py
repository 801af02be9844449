"""Plans with two budgets: a batch for the source and one for the target, each padded to its own S."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from packer.errors import ConfigError, LengthMismatchError, PlanError, SourceError
from packer.plan import Plan, plan_in_memory
from packer.runtime import Batch, PlanLoader, count_loss_tokens
from tests import plans
from tests.runtime.replays import tokens_of

SOURCE = [3, 5, 2, 4]
TARGET = [6, 1, 2, 7]


def make_plan() -> Plan:
    rows = []
    for first in (0, 2):
        pair = [first, first + 1]
        rows.append(
            plans.Row(
                pieces=[(i, SOURCE[i]) for i in pair],
                padded_seqlens={
                    "source": max(SOURCE[i] for i in pair),
                    "target": max(TARGET[i] for i in pair),
                },
            )
        )
    epoch = plans.epoch(rows)
    return plan_in_memory(
        plans.facts(SOURCE, max_tokens={"source": 16, "target": 16}), [epoch], dropped=plans.drops()
    )


def dataset(target: list[int], *, nested: bool = False) -> list[dict[str, Any]]:
    def member(sample_id: int, seqlen: int) -> Any:
        ids = tokens_of(sample_id, seqlen)
        return {"input_ids": ids, "kinds": np.arange(seqlen)} if nested else ids

    return [
        {"source": member(i, source), "target": member(10 + i, seqlen)}
        for i, (source, seqlen) in enumerate(zip(SOURCE, target, strict=True))
    ]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pairs_arrive_as_two_batches(nested: bool, num_workers: int) -> None:
    loader = PlanLoader(make_plan(), dataset(TARGET, nested=nested), device="cpu", num_workers=num_workers)
    batches = list(loader.microbatches())
    assert [batch["source"]["input_ids"].shape for batch in batches] == [(2, 5), (2, 4)]
    assert [batch["target"]["input_ids"].shape for batch in batches] == [(2, 6), (2, 7)]
    target = batches[0]["target"]
    assert isinstance(target, Batch)
    assert target.seqlens.tolist() == [6, 1]
    assert target["attention_mask"].sum(dim=1).tolist() == [6, 1]
    assert target["input_ids"][0].tolist() == tokens_of(10, 6).tolist()
    assert ("kinds" in target) == nested
    assert target["labels"][1].tolist() == [tokens_of(11, 1)[0], *[-100] * 5]  # the first one is predicted
    assert batches[0].num_loss_tokens == target.num_loss_tokens == 7


def test_loss_tokens_of_the_target_are_counted_not_planned() -> None:
    step = next(iter(PlanLoader(make_plan(), dataset(TARGET))))
    assert count_loss_tokens(step) == 7
    with pytest.raises(PlanError, match="count_loss_tokens"):
        _ = step.num_loss_tokens


def test_members_that_are_missing_or_do_not_fit_are_refused() -> None:
    with pytest.raises(LengthMismatchError, match="target of sample 0 has 9 tokens"):
        next(iter(PlanLoader(make_plan(), dataset([9, 1, 2, 7])).microbatches()))
    without = [{"source": sample["source"]} for sample in dataset(TARGET)]
    with pytest.raises(SourceError, match="sample 0 has no target"):
        next(iter(PlanLoader(make_plan(), without).microbatches()))
    with pytest.raises(ConfigError, match="pairs"):
        PlanLoader(make_plan(), dataset(TARGET), dp_rank=0, dp_size=1, sp_rank=0, sp_size=2)


def test_a_users_collate_learns_both_lengths() -> None:
    def collate(samples: Any, shape: Any) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(len(samples), length) for name, length in shape.padded_seqlens.items()}

    batch = next(iter(PlanLoader(make_plan(), dataset(TARGET), collate=collate).microbatches()))
    assert {name: tensor.shape for name, tensor in batch.items()} == {"source": (2, 5), "target": (2, 6)}


def measured_plan(columns: dict[str, str]) -> Plan:
    """The same plan, of metrics that were analyzed from columns."""
    plan = make_plan()
    facts = plans.facts(SOURCE, max_tokens={"source": 16, "target": 16})
    source = replace(facts.sources[0], definition={"kind": "tokens", "columns": columns})
    facts = replace(facts, sources=[source])
    rows = [plan.epoch(0).microbatch(row) for row in range(2)]
    epoch = plans.epoch(
        [
            plans.Row(
                pieces=list(zip(row.sample_ids.tolist(), row.seqlens.tolist(), strict=True)),
                padded_seqlens=row.padded_seqlens,
            )
            for row in rows
        ]
    )
    return plan_in_memory(facts, [epoch], dropped=plans.drops())


def test_the_member_that_the_plan_holds_the_lengths_of_is_checked_exactly() -> None:
    changed = dataset(TARGET)
    changed[0]["source"] = tokens_of(0, 2)  # one less than planned, and within the tensor
    plan = measured_plan({"source": "src", "target": "tgt"})
    assert len(list(PlanLoader(plan, dataset(TARGET)).microbatches())) == 2
    with pytest.raises(
        LengthMismatchError, match="source of sample 0 has 2 tokens and the plan was made for 3"
    ):
        next(iter(PlanLoader(plan, changed).microbatches()))
    # A third metric is what this plan holds, so that neither member has a length in it.
    other = measured_plan({"seqlen": "all", "source": "src", "target": "tgt"})
    assert len(list(PlanLoader(other, changed).microbatches())) == 2


def test_a_member_without_tokens_is_refused() -> None:
    without = [{"source": {"kinds": np.arange(3)}, "target": [1]} for _ in SOURCE]
    with pytest.raises(SourceError, match="sample 0 is a dict without input_ids"):
        next(iter(PlanLoader(make_plan(), without).microbatches()))
