"""Evaluation under Hugging Face's Trainer: each sample once, by tokens, on any number of ranks."""

from typing import Any

import pytest

from tests.integrations.processes import SCRIPTS, run_script

pytestmark = pytest.mark.frameworks


def run_case(name: str, folder: object, *, processes: int) -> list[Any]:
    return run_script(SCRIPTS / "evaluation.py", name, folder, processes=processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_loss_and_metrics_are_those_of_the_samples_one_by_one(tmp_path, processes: int):
    for rank in run_case("figures", tmp_path, processes=processes):
        assert rank["found"].keys() == {"plain", "padded", "packed", "predict"}
        for found in rank["found"].values():
            assert found == pytest.approx(rank["alone"], rel=1e-5)
        assert rank["only"] == pytest.approx(rank["alone"]["loss"], rel=1e-5)
        assert rank["only steps"] * processes == pytest.approx(2 * rank["planned steps"]["packed"], rel=0.05)
        assert rank["in order"]
        assert rank["same model"]
        for samples in rank["samples"].values():
            assert samples == pytest.approx(rank["alone"]["rows"], rel=0.01)
        for name, steps in rank["planned steps"].items():
            assert rank["steps"][name] * processes == pytest.approx(steps * 2, rel=0.05)


def test_training_stops_early_and_ends_with_the_best_model(tmp_path):
    (run,) = run_case("training", tmp_path, processes=1)
    losses = run["losses"]
    assert run["finite"]
    assert len(losses) < run["planned"]
    best = losses.index(min(losses))
    assert best == len(losses) - 3, "two more evaluations without a better one"
    assert run["best"] == losses[best]
    assert run["loaded"] == pytest.approx(losses[best], rel=1e-5)
    measured, trained = run["samples"]
    assert measured == pytest.approx(trained, rel=0.01)
    assert run["logged"]


def test_what_could_not_be_evaluated_right_is_refused_at_construction(tmp_path):
    (refused,) = run_case("refusals", tmp_path, processes=1)
    expected = {
        "drops": "eval_plan leaves out",
        "repeats": "eval_plan plays",
        "epochs": "eval_plan has 2 epochs",
        "no data": "give eval_dataset",
        "names": "eval_plan['b'] has no data set; eval_dataset has 'a'",
        "other data": "20 samples and the plan was made for 21",
        "texts": "eval_dataset['b'] has samples without input_ids",
        "no sample": "eval_dataset holds no sample",
        "by batch": "batch_eval_metrics=True",
        "inputs": "include_for_metrics=['inputs']",
    }
    assert refused.keys() == expected.keys()
    for reason, words in expected.items():
        assert words in refused[reason]
