"""Fields: settled once for the run, the same for whole rows and slices, and nothing is bent to fit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from packer.errors import ConfigError, PackerError, SourceError
from packer.plan import Plan
from packer.runtime import Batch, PlanLoader
from tests import plans
from tests.runtime.replays import Tokens

SEQLENS = [4, 3, 4, 5]
Values = Callable[[int, int], Any]
LAYOUTS = ["padded", "packed"]
PLACES: list[dict[str, Any]] = [
    {},
    {"dp_rank": 0, "dp_size": 1, "sp_rank": 0, "sp_size": 2, "ragged": True},
]


def plan_of(layout: str = "padded", **row: Any) -> Plan:
    """Two samples a micro-batch, in the order of their ids."""
    rows = [plans.Row(pieces=[(i, SEQLENS[i]), (i + 1, SEQLENS[i + 1])], **row) for i in (0, 2)]
    facts = plans.facts(SEQLENS, layout=layout)
    return plans.plan_in_memory(facts, [plans.epoch(rows, layout=layout)], dropped=plans.drops())


def play(plan: Plan, options: dict[str, Any] | None = None, **fields: Values) -> list[Batch]:
    return list(PlanLoader(plan, Tokens(SEQLENS, **fields), **options or {}).microbatches())


def from_sample(first: int, early: Values, late: Values) -> Values:
    """One kind of values up to a sample, another from it on."""
    return lambda sample_id, n: (late if sample_id >= first else early)(sample_id, n)


def full(value: Any, dtype: Any) -> Values:
    return lambda _, n: (
        torch.full((n,), value, dtype=dtype) if isinstance(dtype, torch.dtype) else np.full(n, value, dtype)
    )


@pytest.mark.parametrize("places", PLACES, ids=["rows", "slices"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("early", "late"),
    [
        (full(1, np.uint8), full(300, np.int64)),
        (full(1, np.float16), full(1e6, np.float64)),
        (full(1, np.int32), full(1.5, np.float32)),
        (full(1, torch.uint8), full(300, torch.int64)),
        (full(1, torch.float16), full(1e6, torch.float32)),
        (full(1, torch.float32), full(2**40 + 1, torch.int64)),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("first", [1, 2], ids=["same micro-batch", "next micro-batch"])
def test_a_value_that_the_settled_type_does_not_hold_is_refused(
    first: int, early: Values, late: Values, layout: str, places: dict[str, Any]
) -> None:
    with pytest.raises(SourceError, match=r"w of sample [12] is "):
        play(plan_of(layout), places, w=from_sample(first, early, late))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_smaller_type_is_taken_into_the_settled_one(layout: str) -> None:
    batches = play(plan_of(layout), w=from_sample(2, full(300, np.int64), full(7, np.uint8)))
    assert [batch["w"].dtype for batch in batches] == [torch.int64] * 2
    assert batches[1]["w"].max() == 7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_ids_beyond_int64_are_refused_and_other_unsigned_ones_are_not(layout: str) -> None:
    ok = play(plan_of(layout), input_ids=full(2**40, np.uint64))
    assert all(batch["input_ids"].max() == 2**40 for batch in ok)
    with pytest.raises(SourceError, match=r"input_ids of sample 1 reach 2\^63"):
        play(plan_of(layout), input_ids=from_sample(1, full(1, np.uint64), full(2**63, np.uint64)))


@pytest.mark.parametrize(
    ("pads", "fields", "complaint"),
    [
        ({"w": -1}, {"w": full(1, np.uint8)}, r"pad_values\['w'\]=-1 does not fit into uint8"),
        ({"w": 0.5}, {"w": full(1, torch.int32)}, r"pad_values\['w'\]=0.5 does not fit into torch.int32"),
        ({"w": 1e6}, {"w": full(1, np.float16)}, r"pad_values\['w'\]=1000000.0 does not fit into float16"),
        ({"input_ids": 0.5}, {}, r"pad_values\['input_ids'\]=0.5 is no token id"),
    ],
    ids=range(4),
)
def test_padding_that_does_not_fit_is_refused(
    pads: dict[str, float], fields: dict[str, Values], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        play(plan_of(), {"pad_values": pads}, **fields)


def test_padding_that_is_rounded_or_no_number_is_what_was_asked_for() -> None:
    (batch, _) = play(plan_of(), {"pad_values": {"w": 0.1}}, w=full(1, np.float32))
    assert batch["w"][1, 3] == np.float32(0.1)
    (batch, _) = play(plan_of(), {"pad_values": {"w": float("nan")}}, w=full(1, np.float32))
    assert batch["w"][1, 3].isnan()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_field_that_happens_to_have_one_value_a_token_is_no_tensor_in_one_batch_and_a_list_in_the_next(
    num_workers: int,
) -> None:
    # Four scores: as many as tokens in sample 0, not in sample 1.
    scores: Values = lambda sample_id, n: np.arange(4)  # noqa: E731
    batches = play(plan_of(), {"num_workers": num_workers}, scores=scores)
    assert [type(batch["scores"]) for batch in batches] == [list, list]

    rows = [plans.Row(pieces=[(i, SEQLENS[i])]) for i in (0, 2, 3, 1)]  # at first it looks like one a token
    plan = plans.plan_in_memory(plans.facts(SEQLENS), [plans.epoch(rows)], dropped=plans.drops())
    with pytest.raises(SourceError, match=r"sample 3 has 4 scores for 5 tokens; .* token_fields= must name"):
        play(plan, {"num_workers": num_workers}, scores=scores)
    named = play(plan, {"num_workers": num_workers, "token_fields": []}, scores=scores)
    assert [type(batch["scores"]) for batch in named] == [list] * 4


def test_workers_that_settle_other_fields_are_told_apart() -> None:
    """Worker 1 reads only micro-batches of the other type, which it would take for the settled one."""
    with pytest.raises(SourceError, match=r"of step 1 has the fields .*int64.*, and another"):
        play(plan_of(), {"num_workers": 2}, w=from_sample(2, full(1, np.uint8), full(300, np.int64)))
    with pytest.raises(SourceError, match="of step 1 has the fields None, and another worker found"):
        list(PlanLoader(plan_of(), LabelsAtFirst(SEQLENS), num_workers=2).microbatches())


class LabelsAtFirst(Tokens):
    """Samples 2 and 3 have no labels: all of their tokens would be trained."""

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        sample = super().__getitem__(sample_id)
        return sample if sample_id > 1 else sample | {"labels": sample["input_ids"]}


def test_labels_that_are_missing_from_some_micro_batches_are_refused() -> None:
    with pytest.raises(SourceError, match="sample 2 has the fields input_ids, and sample 0, the first"):
        list(PlanLoader(plan_of(), LabelsAtFirst(SEQLENS)).microbatches())


def counted(start: int = 0) -> Values:
    return lambda _, n: np.arange(start, start + n)


@pytest.mark.parametrize("places", PLACES, ids=["rows", "slices"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_data_sets_own_mask_and_positions_are_ours_or_are_asked_for(
    layout: str, places: dict[str, Any]
) -> None:
    plain = play(plan_of(layout), places)
    same = play(plan_of(layout), places, attention_mask=full(1, np.int64), position_ids=counted(3))
    for ours, theirs in zip(plain, same, strict=True):
        assert ours.keys() == theirs.keys()
        assert torch.equal(ours["position_ids"], theirs["position_ids"])
    holes: Values = lambda _, n: np.arange(n) % 2  # noqa: E731
    grid: Values = lambda _, n: np.stack([np.arange(n)] * 3, axis=1)  # noqa: E731
    for name, values in (("attention_mask", holes), ("position_ids", grid), ("position_ids", holes)):
        with pytest.raises(SourceError, match=f"{name} of sample 0 .* name {name} in token_fields"):
            play(plan_of(layout), places, **{name: values})
        (batch, _) = play(plan_of(layout), {"token_fields": [name], **places}, **{name: values})
        found = batch[name]
        assert found[0, :2].tolist() == values(0, 4)[:2].tolist()


@pytest.mark.parametrize("name", ["cu_seqlens", "max_seqlen", "shift_labels"])
def test_what_only_the_loader_can_know_is_refused(name: str) -> None:
    with pytest.raises(SourceError, match=f"sample 0 has a field {name}, which the loader makes itself"):
        play(plan_of(), **{name: full(1, np.int64)})


def test_padding_on_the_left_is_refused() -> None:
    def pad_left(sample: Any, length: int) -> dict[str, Any]:
        return {"input_ids": np.pad(sample["input_ids"], (length - len(sample["input_ids"]), 0))}

    with pytest.raises(ConfigError, match=r"moved the 3 tokens of a sample from its row's head; let it"):
        play(plan_of(), {"sample_padding_fn": pad_left})


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_a_fillers_labels_never_train_whatever_collate_returns(kind: Callable[[Any], Any]) -> None:
    def collate(name: str) -> Any:
        def collated(samples: Any, shape: Any) -> dict[str, Any]:
            rows = [np.resize(sample["labels"], shape.padded_seqlen) for sample in samples]
            return {name: kind(np.array(rows)), "mirror": kind(np.array(rows))}

        return collated

    plan = plan_of(is_filler=True)
    for name in ("labels", "shift_labels"):
        (batch, _) = play(plan, {"collate": collate(name)}, labels=counted(1))
        assert (np.asarray(batch[name]) == -100).all()
        assert (np.asarray(batch["mirror"]) == -100).all()  # it was made of labels, which said so already
        assert batch.num_loss_tokens == 0
    with pytest.raises(ConfigError, match=r"is a filler.*nor shift_labels but targets, mirror"):
        play(plan, {"collate": collate("targets")}, labels=counted(1))


def test_ids_with_an_axis_too_many_are_named_by_their_shape() -> None:
    for places in PLACES:
        with pytest.raises(PackerError, match=r"input_ids of sample 0 have the shape \(1, 4\); .* \(4,\)"):
            play(plan_of(), places, input_ids=lambda _, n: np.ones((1, n), np.int64))
