"""What a rehearsal plays, tells, and says where a plan does not fit; on a device that counts bytes."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import packer
from packer.budget import HostDevice, Peak, find_extremes
from packer.errors import ConfigError, PlanError
from tests.budget.models import VOCABULARY, Model, training
from tests.runtime.replays import Tokens

LENGTHS = np.random.default_rng(0).integers(2, 60, 120).tolist()


def make_plan(layout: Any = "padded", **options: Any) -> packer.Plan:
    options = {"max_tokens": 240, "grad_accum": 2} | options
    return packer.make_plan(LENGTHS, packer.PlanConfig(layout=layout, **options))


def peak_of_a_run(plan: packer.Plan, dataset: Any, options: dict[str, Any]) -> int:
    """Train one epoch of a plan, and return the most bytes that it took."""
    device = HostDevice()
    model, optimizer = options["model"], options["optimizer"]
    device.note(model.parameters())
    device.note(model.buffers())
    with device.capped(None):
        device.reset_peak()
        for step in packer.PlanLoader(plan, dataset):
            for batch in step:
                options["train_step"](batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return device.peak().allocated


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("attends", [False, True])
def test_the_peak_that_is_told_is_that_of_the_run(layout: str, attends: bool) -> None:
    plan = make_plan(layout, epochs=2)
    told = packer.rehearse(plan, device="cpu", **training(attends=attends)).peak.allocated
    run = packer.make_plan(LENGTHS, packer.PlanConfig(max_tokens=240, grad_accum=2, layout=layout))
    actual = peak_of_a_run(run, Tokens([*LENGTHS]), training_of_ids(attends))
    assert told == pytest.approx(actual, rel=0.03)


def training_of_ids(attends: bool) -> dict[str, Any]:
    options = training(attends=attends)
    model: Model = options["model"]

    def step(batch: Any) -> torch.Tensor:
        small = {name: batch[name] % VOCABULARY for name in ("input_ids", "labels")}
        return model(small)

    return options | {"train_step": step}


def test_every_extreme_is_played_with_gradients_held_and_state_allocated() -> None:
    plan = make_plan()
    options = training()
    shapes, had_gradients, had_state = [], [], []

    def step(batch: Any) -> torch.Tensor:
        shapes.append(tuple(batch["input_ids"].shape))
        had_gradients.append(all(p.grad is not None for p in options["model"].parameters()))
        had_state.append(bool(options["optimizer"].state))
        return options["model"](batch)

    found = packer.rehearse(plan, device="cpu", **options | {"train_step": step})
    extremes = find_extremes(plan)
    warm_up = 2
    expected = [extremes[0]] * warm_up + [extreme for extreme in extremes for _ in range(2)]
    expected += [extremes[-1]] * 2  # once more, behind all others
    assert shapes == [(extreme.num_rows, extreme.seqlen) for extreme in expected]
    assert all(had_gradients[1:])
    assert all(had_state[1:])
    assert found.fits
    assert [played.extreme for played in found.played] == extremes
    assert all(played.seconds is not None and played.seconds > 0 for played in found.played)


def test_a_plan_that_does_not_fit_says_what_takes_how_much_and_the_cure() -> None:
    plan = make_plan()
    needed = packer.rehearse(plan, device="cpu", **training()).peak.allocated
    found = packer.rehearse(plan, device=HostDevice(int(needed * 0.8)), **training())
    assert not found.fits
    largest = found.played[-1]
    assert not largest.fits
    assert largest.predicted == pytest.approx(needed, rel=0.05)
    with pytest.raises(PlanError) as raised:
        found.require_fit()
    message = str(raised.value)
    assert f"micro-batch {largest.extreme.row} of epoch 0 ({largest.extreme.shape}" in message
    assert "would take about" in message
    told = int(message.split("--max-tokens ")[1].split(",")[0])
    assert packer.rehearse(
        make_plan(max_tokens=told), device=HostDevice(int(needed * 0.8)), **training()
    ).fits
    assert message in str(found)


def test_the_margin_stays_free() -> None:
    plan = make_plan()
    needed = packer.rehearse(plan, device="cpu", **training()).peak.allocated
    device = HostDevice(int(needed * 1.1))
    assert packer.rehearse(plan, device=device, margin=0.05, **training()).fits
    assert not packer.rehearse(plan, device=HostDevice(int(needed * 1.1)), margin=0.15, **training()).fits


def test_attention_that_takes_most_of_it_is_bounded_as_such() -> None:
    lengths = [600] * 2 + [300] * 4 + [30] * 40 + [10] * 400
    config = packer.PlanConfig(max_tokens=1200, num_shapes=4)
    options = training(attends=True, hidden_size=4)
    needed = packer.rehearse(packer.make_plan(lengths, config), device="cpu", **options).peak.allocated
    device = HostDevice(int(needed * 0.7))
    found = packer.rehearse(packer.make_plan(lengths, config), device=device, **options)
    assert not found.fits
    assert found.complaint is not None
    most = int(found.complaint.split("--max-attention ")[1].split(",")[0])
    assert most >= 600**2
    bounded = packer.make_plan(lengths, packer.PlanConfig(max_tokens=1200, num_shapes=4, max_attention=most))
    assert packer.rehearse(bounded, device=device, **options).fits


def test_where_nothing_fits_the_smallest_says_so() -> None:
    found = packer.rehearse(make_plan(), device=HostDevice(20_000), **training())
    assert not found.fits
    assert found.update is None
    assert "smallest" in str(found.complaint)
    assert "ran out of memory" in str(found.complaint)


def test_a_micro_batch_that_nothing_told_of_says_what_may_be_bounded() -> None:
    lengths = [600] * 2 + [10] * 400
    plan = packer.make_plan(lengths, packer.PlanConfig(max_tokens=1200))
    options = training(attends=True, hidden_size=4)
    needed = packer.rehearse(plan, device="cpu", **options).peak.allocated
    found = packer.rehearse(plan, device=HostDevice(int(needed * 0.7)), **options)
    assert "(2 × 600, largest tensor, most attention, longest) ran out of memory" in str(found.complaint)
    assert "--max-attention below 720000" in str(found.complaint)


class Fragmented(HostDevice):
    """Has less room once large micro-batches have been there."""

    def __init__(self, limit: int, num_peaks: int) -> None:
        super().__init__(limit)
        self.num_left = num_peaks

    def peak(self) -> Peak:
        self.num_left -= 1
        if self.num_left == 0:
            self._cap = self._cap * 3 // 4
        return super().peak()


def test_a_largest_micro_batch_that_fits_only_at_first_does_not_fit() -> None:
    plan = make_plan()
    needed = packer.rehearse(plan, device="cpu", **training()).peak.allocated
    assert packer.rehearse(plan, device=HostDevice(int(needed * 1.05)), **training()).fits
    # one after the first update, one after that, and two for each extreme
    device = Fragmented(int(needed * 1.05), 2 + 2 * len(find_extremes(plan)))
    found = packer.rehearse(plan, device=device, **training())
    assert [played.fits for played in found.played] == [True] * (len(found.played) - 1) + [False]


def test_real_samples_are_played_where_they_are_given() -> None:
    plan = make_plan()
    dataset = Tokens([*LENGTHS])
    seen = []

    def step(batch: Any) -> torch.Tensor:
        seen.append(batch)
        return options["model"]({name: batch[name] % VOCABULARY for name in ("input_ids", "labels")})

    options = training()
    packer.rehearse(plan, device="cpu", dataset=dataset, **options | {"train_step": step})
    first = seen[0]
    expected = dataset[int(first.sample_ids[0])]["input_ids"]
    assert first["input_ids"][0, : len(expected)].tolist() == expected.tolist()
    assert first.step.num_loss_tokens > 0


def test_a_sequence_parallel_rank_plays_its_slices() -> None:
    plan = make_plan("packed", sp_size=2)
    options = training()
    lengths = []

    def step(batch: Any) -> torch.Tensor:
        lengths.append(batch["input_ids"].shape[1])
        return options["model"](batch)

    place = {"dp_rank": 0, "dp_size": 1, "sp_rank": 1, "sp_size": 2}
    packer.rehearse(plan, device="cpu", loader_options=place, **options | {"train_step": step})
    assert max(lengths) == max(extreme.seqlen for extreme in find_extremes(plan)) // 2


def test_cut_samples_and_pairs_have_synthetic_samples_of_their_lengths() -> None:
    cut = packer.make_plan([30, 70, 8, 9], packer.PlanConfig(max_tokens=32, too_long="split"))
    assert packer.rehearse(cut, device="cpu", **training()).fits
    source, target = [5, 6, 7, 8, 3], [9, 2, 4, 6, 5]
    config = packer.PlanConfig(max_tokens={"source": 20, "target": 20})
    pairs = packer.make_plan(source, config, metrics={"source": source, "target": target})
    options = training()
    shapes = []

    def step(batch: Any) -> torch.Tensor:
        shapes.append([tuple(batch[name]["input_ids"].shape) for name in ("source", "target")])
        return options["model"](batch["source"]) + options["model"](batch["target"])

    assert packer.rehearse(pairs, device="cpu", **options | {"train_step": step}).fits
    assert all(size[0] * size[1] <= 20 for pair in shapes for size in pair)
    assert any(first != second for first, second in shapes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_step": lambda batch: 3.0}, "returned a float"),
        ({"train_step": lambda batch: torch.ones(3, requires_grad=True)}, r"tensor of shape \(3,\)"),
        ({"train_step": lambda batch: torch.ones(())}, "gradients"),
        ({"model": []}, "model= is to be"),
        ({"optimizer": [3]}, "optimizer= is to be"),
        ({"margin": 1.0}, "margin=1.0"),
        ({"device": "meta"}, "choose cuda"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        packer.rehearse(make_plan(), **training() | {"device": "cpu"} | change)


def test_errors_of_the_step_come_through() -> None:
    def step(batch: Any) -> torch.Tensor:
        raise KeyError("mask")

    with pytest.raises(KeyError, match="mask"):
        packer.rehearse(make_plan(), device="cpu", **training() | {"train_step": step})


def test_all_of_it_is_plain_json() -> None:
    found = packer.rehearse(make_plan(), device=HostDevice(200_000), **training())
    entries = json.loads(json.dumps(found.to_json()))
    assert entries["fits"] is found.fits
    assert entries["peak"]["allocated"] == found.peak.allocated
    assert entries["played"][0]["extreme"]["names"] == list(found.played[0].extreme.names)
