"""What Megatron and torchtitan ask a data iterator for: names, shapes, types and values."""

import numpy as np
import pytest
import torch

from packer.errors import ConfigError, StateError
from packer.integrations.megatron import MegatronIterator
from packer.integrations.torchtitan import TorchtitanLoader
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader

SEQLENS = [5, 3, 8, 2, 7, 4, 6, 9, 1, 5, 3, 8]


def dataset() -> list[dict[str, np.ndarray]]:
    return [
        {"input_ids": np.arange(100 * i, 100 * i + n), "labels": np.arange(100 * i, 100 * i + n)}
        for i, n in enumerate(SEQLENS)
    ]


def plan(**options):
    return make_plan(SEQLENS, PlanConfig(max_tokens=24, dp_size=1, grad_accum=2, epochs=2, **options))


def loader(**options) -> PlanLoader:
    return PlanLoader(plan(**options), dataset())


def test_padded_fields_are_megatrons():
    iterator = MegatronIterator(loader())
    fields = next(iterator)
    assert fields.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
    tokens, labels, mask = fields["tokens"], fields["labels"], fields["loss_mask"]
    assert tokens.dtype == labels.dtype == fields["position_ids"].dtype == torch.int64
    assert mask.dtype == torch.float32
    assert tokens.shape == labels.shape == mask.shape == fields["position_ids"].shape
    for row, sample_id in enumerate(iterator.loader.plan.epoch(0).microbatch(0).sample_ids.tolist()):
        count = SEQLENS[sample_id]
        first = 100 * sample_id
        assert tokens[row, :count].tolist() == list(range(first, first + count))
        assert labels[row, : count - 1].tolist() == list(range(first + 1, first + count))
        assert mask[row].tolist() == [1.0] * (count - 1) + [0.0] * (mask.shape[1] - count + 1)
        assert not labels[row, count - 1 :].any()


def test_packed_fields_tell_samples_and_their_padding_apart():
    source = loader(layout="packed", pad_segments_to=4, pad_multiple=8)
    iterator = MegatronIterator(source)
    for fields, planned in zip(
        iterator, (source.plan.epoch(0).microbatch(row) for row in range(4)), strict=False
    ):
        seqlens = planned.seqlens.tolist()
        taken = [-(-n // 4) * 4 for n in seqlens]
        tail = planned.padded_seqlen - sum(taken)
        lengths, positions = (x + [tail] * (tail > 0) for x in (seqlens, taken))
        assert fields["cu_seqlens"].tolist() == [[0, *np.cumsum(lengths).tolist()]]
        assert fields["cu_seqlens_padded"].tolist() == [[0, *np.cumsum(positions).tolist()]]
        assert fields["cu_seqlens"].dtype == fields["cu_seqlens_padded"].dtype == torch.int32
        assert fields["max_seqlen"].tolist() == [max(positions)]
        assert fields["max_seqlen"].dtype == torch.int32
        assert fields["tokens"].shape == (1, planned.padded_seqlen)
        edges = fields["cu_seqlens_padded"][0].tolist()
        for sample_id, count, start in zip(planned.sample_ids.tolist(), seqlens, edges[:-1], strict=False):
            first = 100 * sample_id
            assert fields["tokens"][0, start : start + count].tolist() == list(range(first, first + count))
            assert fields["loss_mask"][0, start : start + count].tolist() == [1.0] * (count - 1) + [0.0]
            assert fields["position_ids"][0, start : start + count].tolist() == list(range(count))
        assert fields["loss_mask"].sum() == sum(n - 1 for n in seqlens)


def test_epochs_follow_each_other_and_a_state_goes_on():
    iterator = MegatronIterator(loader())
    tokens = [fields["tokens"].tolist() for fields in iterator]
    steps = [epoch["num_steps"] for epoch in iterator.loader.plan.header["epochs"]]
    assert len(tokens) == 2 * sum(steps)
    with pytest.raises(StopIteration):
        next(iterator)
    broken = MegatronIterator(loader())
    played = 2 * steps[0] + 2
    for _ in range(played):
        next(broken)
    other = MegatronIterator(loader())
    other.load_state_dict(broken.state_dict())
    assert [fields["tokens"].tolist() for fields in other] == tokens[played:]
    with pytest.raises(StateError, match="plan"):
        MegatronIterator(loader(seed=1)).load_state_dict(broken.state_dict())


def test_rows_that_are_cut_already_are_refused():
    cut = PlanLoader(plan(sp_size=2), dataset(), dp_rank=0, dp_size=1, sp_rank=0, sp_size=2)
    with pytest.raises(ConfigError, match="second time"):
        MegatronIterator(cut)


def test_a_stage_without_data_gets_none():
    middle = PlanLoader(plan(), dataset(), dp_rank=0, dp_size=1, pp_rank=1, pp_size=3)
    assert next(MegatronIterator(middle)) == {}


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore::Warning")  # of the packages that Megatron imports
def test_megatrons_own_slices_of_our_rows_are_our_slices(monkeypatch):
    from megatron.core import utils

    monkeypatch.setattr(utils, "get_pg_size", lambda group: 2)
    monkeypatch.setattr(utils, "get_pg_rank", lambda group: group)
    whole = next(MegatronIterator(loader(pad_multiple=4)))
    for rank in range(2):
        sliced = utils.get_batch_on_this_cp_rank(dict(whole), cp_group=rank)
        cut = PlanLoader(
            plan(pad_multiple=4),
            dataset(),
            dp_rank=0,
            dp_size=1,
            sp_rank=rank,
            sp_size=2,
            shard="zigzag",
        )
        ours = next(iter(cut.microbatches()))
        assert torch.equal(sliced["tokens"], ours["input_ids"])
        assert torch.equal(sliced["position_ids"], ours["position_ids"])
        assert torch.equal(sliced["loss_mask"], (ours["shift_labels"] != -100).float())


def test_torchtitan_gets_inputs_and_shifted_labels_of_every_epoch():
    source = loader(layout="packed")
    batches = list(TorchtitanLoader(source))
    assert len(batches) == 2 * sum(epoch["num_steps"] for epoch in source.plan.header["epochs"])
    fields = next(MegatronIterator(loader(layout="packed")))
    inputs, labels = batches[0]
    assert inputs.keys() == {"input", "positions"}
    assert torch.equal(inputs["input"], fields["tokens"])
    assert torch.equal(inputs["positions"], fields["position_ids"])
    assert torch.equal(labels != -100, fields["loss_mask"].bool())
    assert torch.equal(labels.where(labels != -100, 0), fields["labels"])
    bare, _ = next(iter(TorchtitanLoader(loader(), positions=None)))
    assert bare.keys() == {"input"}


def test_torchtitan_goes_on_from_a_state_and_weighs_a_sum():
    source = TorchtitanLoader(loader())
    batches = iter(source)
    for _ in range(2):
        next(batches)
    step = source.loader.current_step
    assert source.loss_weight(4) == pytest.approx(4 * 2 / step.num_loss_tokens)
    rest = [inputs["input"].tolist() for inputs, _ in batches]
    other = TorchtitanLoader(loader())
    begun = iter(other)
    for _ in range(2):
        next(begun)
    again = TorchtitanLoader(loader())
    again.load_state_dict(other.state_dict())
    assert [inputs["input"].tolist() for inputs, _ in again] == rest


@pytest.mark.parametrize("make", [MegatronIterator, TorchtitanLoader], ids=["Megatron", "torchtitan"])
def test_a_mixture_is_played_to_its_total_pass_after_pass(make):
    first_id = {"web": 0, "code": len(SEQLENS)}
    data = {
        name: [{"input_ids": np.full(n, 1 + first + row)} for row, n in enumerate(SEQLENS)]
        for name, first in first_id.items()
    }
    config = PlanConfig(max_tokens=24, grad_accum=2, mix={"web": 0.8, "code": 0.2}, total_steps=9)
    mixed = make_plan({"web": SEQLENS, "code": SEQLENS}, config)
    assert mixed.sources[0].num_passes > 1
    played = 0
    for row, batch in enumerate(make(PlanLoader(mixed, data))):
        tokens = batch["tokens"] if make is MegatronIterator else batch[0]["input"]
        planned = mixed.epoch(0).microbatch(row)
        assert tokens[:, 0].tolist() == [1 + sample for sample in planned.sample_ids.tolist()]
        played += 1
    assert played == 9 * 2 == mixed.epoch(0).num_microbatches
