"""The examples for frameworks run as they stand, each on two processes."""

import re
import shutil
from pathlib import Path

import pytest

import packer
from tests.examples.launches import EXAMPLES, TORCHRUN, run

pytestmark = pytest.mark.frameworks

SOURCE = EXAMPLES / "data" / "instructions.jsonl.gz"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Metrics, a padded, a packed and a shared plan of the example data."""
    folder = tmp_path_factory.mktemp("prepared")
    packer.analyze(
        SOURCE, out=folder / "metrics", text_column="text", tokenizer=EXAMPLES / "data" / "tokenizer.json"
    )
    metrics = packer.open_metrics(folder / "metrics")
    two_ranks = {"max_tokens": 3072, "dp_size": 2, "grad_accum": 2, "lr_scaling": "sqrt"}
    for name, options in {
        "padded": two_ranks,
        "packed": two_ranks | {"layout": "packed"},
        "shared": {"max_tokens": 3072, "grad_accum": 8, "sp_size": 2, "max_samples": 1},
        "to train on": two_ranks | {"layout": "packed", "sample_ids": range(64, metrics.num_samples)},
        "held out": two_ranks | {"layout": "packed", "sample_ids": range(64), "remainder": "keep"},
    }.items():
        packer.make_plan(metrics, packer.PlanConfig(**options), out=folder / name)
    return folder


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss'?:? '?(\d+\.\d+)", output)]


def assert_learns(output: str, steps: int) -> None:
    found = losses(output)
    assert len(found) >= steps, output
    assert found[-1] < found[0]


def test_trainer(prepared, tmp_path):
    script = (*TORCHRUN, EXAMPLES / "hf_trainer.py", "--metrics", prepared / "metrics", "--out", tmp_path)
    assert_learns(run(*script, "--plan", prepared / "padded", "--steps", 6), 6)
    resumed = run(*script, "--plan", prepared / "padded", "--steps", 8, "--resume")
    assert len(re.findall("'learning_rate'", resumed)) == 2


def test_fine_tuning(tmp_path):
    script = (EXAMPLES / "sft.py",)
    prepared = run(*script, "prepare", "--out", tmp_path, "--max-tokens", 1024)
    assert "loss on 107,114 of 172,979 tokens (assistant)" in prepared
    train = (*script, "train", "--out", tmp_path, "--steps", 4, "--every", 2)
    output = run(*train)
    assert "loss on the assistant)" in output
    assert_learns(output, 4)
    assert len(set(re.findall(r"'eval_loss': '?(\d+\.\d+)", output))) >= 2
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-4")
    resumed = run(*train, "--resume")
    of_steps = re.compile(r"'loss': '?[\d.]+'?, 'grad_norm': '?[\d.e-]+")
    assert of_steps.findall(resumed) == of_steps.findall(output)[2:]


def test_trainer_with_ulysses_from_a_configuration_file(prepared, tmp_path):
    launch = ("-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "hf_ulysses.yaml")
    script = (EXAMPLES / "hf_trainer.py", "--metrics", prepared / "metrics", "--plan", prepared / "shared")
    output = run(
        *launch,
        *script,
        "--out",
        tmp_path,
        "--steps",
        4,
        ACCELERATE_TORCH_DEVICE="cpu",
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert len(re.findall("'learning_rate'", output)) >= 4


def test_trl_with_an_adapter_and_a_planned_evaluation(prepared, tmp_path):
    plans = ("--plan", prepared / "to train on", "--eval-plan", prepared / "held out")
    script = (*TORCHRUN, EXAMPLES / "hf_trl.py", "--metrics", prepared / "metrics", "--out", tmp_path, *plans)
    output = run(*script, "--steps", 4)
    assert_learns(output, 4)
    evaluated = [float(loss) for loss in re.findall(r"'eval_loss': '?(\d+\.\d+)", output)]
    assert len(evaluated) == 2
    assert evaluated[-1] < losses(output)[0]
    resumed = run(*script, "--steps", 6, "--resume")
    assert len(re.findall("'learning_rate'", resumed)) == 2


def test_accelerate(prepared):
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", 2)
    script = (EXAMPLES / "accelerate_loop.py", "--metrics", prepared / "metrics")
    assert_learns(run(*launch, *script, "--plan", prepared / "packed", "--steps", 6), 6)


def test_lightning(prepared, tmp_path):
    script = (EXAMPLES / "lightning_module.py", "--metrics", prepared / "metrics", "--devices", 2)
    options = ("--plan", prepared / "padded", "--out", tmp_path, "--steps", 6)
    assert_learns(run(*script, *options), 6)


def test_deepspeed(tmp_path):
    script = (*TORCHRUN, EXAMPLES / "deepspeed_dynamic_batching.py", "--metrics", tmp_path / "metrics")
    assert_learns(run(*script, "--steps", 4, TORCH_EXTENSIONS_DIR=str(tmp_path)), 8)
    pipeline = run(*script, "--steps", 3, "--stages", 2, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert_learns(pipeline, 6)
