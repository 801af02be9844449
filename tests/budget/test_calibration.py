"""Calibrations on a device that counts bytes: the largest budget by brute force, and what is recommended."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packer
from packer.budget import Calibration, HostDevice, Measured, Peak, trial
from packer.budget.advice import largest_mixed, smallest_fast
from packer.budget.trial import Bench, Speed
from packer.errors import ConfigError, PlanError, SampleTooLongError, TargetExistsError
from tests.budget.models import NotingDevice, training

LENGTHS = np.random.default_rng(0).integers(2, 100, 3000)
LIMIT = 4_000_000
CONFIG = {"max_tokens": 128, "step_tokens": 16_384}


@pytest.fixture(autouse=True)
def short_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks mean nothing here."""
    monkeypatch.setattr(trial, "LAP_SECONDS", 0.0)
    monkeypatch.setattr(trial, "LAPS", 1)


def calibrate(lengths: Any = LENGTHS, limit: int = LIMIT, **options: Any) -> Calibration:
    trained = training(attends=options.pop("attends", False))
    names = {"max_seconds", "margin", "device", "train_step", "loader_options"}
    others = {name: options.pop(name) for name in names & set(options)}
    config = packer.PlanConfig(**CONFIG | options)
    return packer.calibrate(
        seqlens=lengths, config=config, **trained | {"device": HostDevice(limit)} | others
    )


def fits(budget: int, limit: int, *, attends: bool, layout: str) -> bool:
    """Whether a plan's every micro-batch trains, one after the other, with gradients held."""
    config = packer.PlanConfig(max_tokens=budget, layout=layout, remainder="keep")
    plan = packer.make_plan(LENGTHS, config)
    return packer.rehearse(plan, device=HostDevice(limit), margin=0, **training(attends=attends)).fits


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("attends", [False, True])
def test_the_largest_budget_is_that_of_brute_force(layout: str, attends: bool) -> None:
    found = calibrate(layout=layout, attends=attends, margin=0, max_seconds=60)
    assert found.is_largest_sure
    budget = found.largest
    assert isinstance(budget, int)
    assert fits(budget, LIMIT, attends=attends, layout=layout)
    assert not fits(int(budget * 1.03), LIMIT, attends=attends, layout=layout)


def test_what_is_recommended_fits_keeps_the_steps_tokens_and_is_printed_as_a_command() -> None:
    found = calibrate(layout="packed", dp_size=2)
    config = found.recommended
    assert config.step_tokens is None
    plan = packer.make_plan(LENGTHS, config)
    counts = plan.header["epochs"][0]
    assert counts["num_tokens"] / counts["num_steps"] == pytest.approx(16_384, rel=0.1)
    assert packer.rehearse(plan, device=HostDevice(LIMIT), **training()).fits
    assert found.command.startswith("packer plan METRICS --out plan --max-tokens")
    assert f"--max-tokens {config.max_tokens} " in found.command
    assert f"--grad-accum {config.grad_accum}" in found.command
    assert found.command in str(found)


def test_it_survives_running_out_of_memory_and_leaves_everything_as_it_was() -> None:
    trained = training(attends=True)
    before = copy.deepcopy(trained["model"].state_dict())
    device = NotingDevice(LIMIT)
    config = packer.PlanConfig(layout="packed", **CONFIG)
    found = packer.calibrate(seqlens=LENGTHS, config=config, device=device, **trained)
    assert any(not trial.fits for trial in found.trials)
    assert device.num_released > len(found.trials)
    torch.testing.assert_close(trained["model"].state_dict(), before, rtol=0, atol=0)
    assert not trained["optimizer"].state
    device.release()
    device.reset_peak()
    held = sum(t.nbytes for t in [*trained["model"].parameters(), *trained["model"].buffers()])
    assert device.peak().allocated <= held + 64


def pretend(monkeypatch: pytest.MonkeyPatch, speed: Callable[[int], float | None]) -> None:
    """Let budgets be as fast as a test says; None: memory does not do for a step of them."""

    def measure_speed(self: Bench, budget: int, seconds: float) -> Speed | None:
        found = speed(budget)
        return None if found is None else Speed(tokens_per_second=found, peak=Peak(1, 1))

    monkeypatch.setattr(Bench, "measure_speed", measure_speed)


def test_the_smallest_budget_within_two_percent_of_the_best_speed_is_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, lambda budget: 1000 * budget / (budget + 20))
    found = calibrate(layout="packed")
    best = max(one.tokens_per_second for one in found.speeds)
    (chosen,) = [one for one in found.speeds if one.max_tokens == found.recommended.max_tokens]
    assert chosen.tokens_per_second >= 0.98 * best
    slower = [one for one in found.speeds if one.budget < chosen.budget]
    assert slower
    assert all(one.tokens_per_second < 0.98 * best for one in slower)
    assert chosen.budget <= 1.5 * max(one.budget for one in slower)
    assert found.alternative is None
    budgets = [one.budget for one in found.speeds]
    assert budgets == sorted(budgets)


def test_where_no_fast_budget_is_a_mix_both_are_shown_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.concatenate([np.full(1500, 20), np.full(700, 90), np.full(3000, 8)])
    pretend(monkeypatch, lambda budget: float(budget))
    found = calibrate(lengths, limit=40_000_000, step_tokens=8192)
    assert found.alternative is not None
    assert isinstance(found.alternative.max_tokens, int)
    assert isinstance(found.recommended.max_tokens, int)
    assert found.alternative.max_tokens < found.recommended.max_tokens
    (note,) = [note for note in found.notes if "design effect" in note]
    assert "--layout packed" in note
    wanted = int(note.split("--step-tokens of about ")[1].split(" ")[0].replace(",", ""))
    assert wanted > 8192
    mixed = [one for one in found.speeds if one.is_mixed]
    assert max(one.budget for one in mixed) == found.alternative.max_tokens


def measured(budget: int, speed: float, effect: float | None) -> Measured:
    return Measured(
        max_tokens=budget,
        tokens_per_second=speed,
        peak=Peak(1, 1),
        grad_accum=1,
        step_tokens=1.0,
        padding=0.0,
        design_effect=effect,
    )


def test_of_fast_budgets_one_that_is_a_mix_is_preferred() -> None:
    speeds = [measured(10, 50, 0.1), measured(20, 98.5, 1.2), measured(30, 100, 0.9), measured(40, 99, 0.5)]
    assert smallest_fast(speeds).budget == 30
    assert largest_mixed(speeds, speeds[2]) is None
    assert largest_mixed(speeds, speeds[1]) is speeds[3]
    assert smallest_fast([measured(10, 99, None), measured(20, 100, 0.5)]).budget == 10


def test_a_budget_larger_than_a_steps_share_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda budget: float(budget))
    found = calibrate(step_tokens=2048, dp_size=2, layout="packed")
    assert isinstance(found.largest, int)
    assert found.largest > 2048
    assert max(one.budget for one in found.speeds) <= 1024


def test_a_step_that_does_not_fit_makes_way_for_a_smaller_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda budget: None if budget > 1000 else float(budget))
    assert max(one.budget for one in calibrate(layout="packed").speeds) <= 1000
    pretend(monkeypatch, lambda budget: None)
    with pytest.raises(PlanError, match="raise margin="):
        calibrate(layout="packed")


def test_attention_gets_a_bound_where_it_takes_memory_and_none_where_it_does_not() -> None:
    found = calibrate(attends=True, num_shapes=4)
    assert found.max_attention is not None
    assert found.recommended.max_attention == found.max_attention
    assert f"--max-attention {found.max_attention}" in found.command
    plan = packer.make_plan(LENGTHS, found.recommended)
    assert packer.rehearse(plan, device=HostDevice(LIMIT), **training(attends=True)).fits
    assert calibrate(num_shapes=4).max_attention is None


def test_time_that_runs_out_is_told() -> None:
    found = calibrate(limit=10**11, max_seconds=1e-3)
    assert not found.is_largest_sure
    assert "at least" in str(found)
    assert any("time ran out" in note for note in found.notes)
    assert len(found.trials) == 1
    assert len(found.speeds) == 1


def test_a_data_set_that_ends_first_is_told() -> None:
    found = calibrate(LENGTHS[:200], limit=10**10, step_tokens=1000, layout="packed")
    assert not found.is_largest_sure
    assert any("the data set" in note for note in found.notes)


def test_fragments_are_told_where_segments_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragmented(HostDevice):
        is_expandable = False

        def peak(self) -> Peak:
            allocated = super().peak().allocated
            return Peak(allocated, allocated * 5 // 4)

    found = calibrate(device=Fragmented(LIMIT))
    assert any("expandable_segments:True" in note for note in found.notes)
    assert not any("expandable_segments:True" in note for note in calibrate().notes)


def test_pairs_are_scaled_together() -> None:
    source, target = LENGTHS[:1000], LENGTHS[1000:2000]
    trained = training()
    model = trained["model"]

    def step(batch: Any) -> torch.Tensor:
        return model(batch["source"]) + model(batch["target"])

    config = packer.PlanConfig(max_tokens={"source": 200, "target": 400}, grad_accum=4)
    found = packer.calibrate(
        seqlens=source,
        config=config,
        metrics={"source": source, "target": target},
        device=HostDevice(LIMIT),
        **trained | {"train_step": step},
    )
    assert isinstance(found.largest, dict)
    assert found.largest["target"] == 2 * found.largest["source"] > 400
    assert "--max-tokens source=" in found.command


def test_rows_of_one_length_grow_with_the_budget() -> None:
    found = calibrate(layout="packed", fixed_seqlen=128, loader_options={"pad_cu_seqlens": True})
    assert isinstance(found.largest, int)
    assert found.largest > 1000
    assert found.recommended.fixed_seqlen == found.recommended.max_tokens


def test_a_metrics_directory_is_named_in_the_command(tmp_path: Path) -> None:
    rows = [{"tokens": list(range(n))} for n in LENGTHS[:300].tolist()]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    packer.analyze(data, out=tmp_path / "metrics", tokens_column="tokens")
    found = calibrate(tmp_path / "metrics", step_tokens=2048)
    assert f"packer plan {tmp_path / 'metrics'} --out plan" in found.command


def test_a_sample_that_fits_alone_nowhere_is_told_with_what_the_weights_take() -> None:
    with pytest.raises(PlanError, match=r"a budget of 99 tokens, .* does not fit into 50\.\d kB; turn on"):
        calibrate(limit=51_000)
    lengths = [3000, *LENGTHS.tolist()]
    with pytest.raises(PlanError, match=r"3,000 tokens, .* for weights, gradients and optimizer; turn on"):
        calibrate(lengths, limit=3_500_000, max_tokens=3000, layout="packed")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_seconds": 0}, ConfigError, "leaves no time"),
        ({"margin": -0.1}, ConfigError, "is no share"),
        ({"max_tokens": 50}, SampleTooLongError, "over"),
        ({"train_step": lambda batch: None}, ConfigError, "returned a NoneType"),
    ],
)
def test_what_has_no_meaning_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        calibrate(**options)


def test_a_mapping_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="must be a PlanConfig, not dict"):
        packer.calibrate(seqlens=LENGTHS, config={"max_tokens": 5}, **training())  # type: ignore[arg-type]


def test_json_and_page_tell_the_same(tmp_path: Path) -> None:
    found = calibrate(attends=True, layout="packed")
    entries = json.loads(json.dumps(found.to_json()))
    assert entries["largest"] == found.largest
    assert entries["recommended"]["max_tokens"] == found.recommended.max_tokens
    assert [one["budget"] for one in entries["trials"]] == [one.budget for one in found.trials]
    assert entries["speeds"][0]["peak"]["allocated"] == found.speeds[0].peak.allocated
    page = tmp_path / "calibration.html"
    found.write_html(page)
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert text.count('class="dot chosen"') == 1
    assert text.count('class="failed"') == sum(not trial.fits for trial in found.trials) > 0
    assert found.command in text
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(TargetExistsError):
        found.write_html(other)
