"""The loop to copy runs as it stands, learns, and goes on where it was stopped."""

import gzip
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from packer.runtime import PlanLoader
from tests import plans
from tests.examples.launches import EXAMPLES
from tests.runtime.replays import Tokens


def train(source: Path, out: Path, *, kill_after: int | None = None) -> dict[int, float]:
    """Run the example, or some steps of it; return the loss that it prints for each step."""
    command = [
        sys.executable,
        "-u",
        EXAMPLES / "train.py",
        "--source",
        source,
        "--out",
        out,
        "--max-tokens",
        256,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # one thread adds up in one order
    losses: dict[int, float] = {}
    with subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if match := re.match(r"epoch 0 step (\d+): loss (\S+) over", line):
                losses[int(match[1])] = float(match[2])
            if kill_after is not None and len(losses) == kill_after:
                run.kill()
                break
    assert kill_after is not None or run.returncode == 0
    return losses


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    with gzip.open(EXAMPLES / "data" / "instructions.jsonl.gz", "rt") as lines:
        source.write_text(
            "".join(line for line in lines if len(line) < 500)[:40_000].rsplit("\n", 1)[0] + "\n"
        )
    whole = train(source, tmp_path / "whole")
    assert list(whole) == list(range(len(whole)))
    assert len(whole) > 20
    assert min(list(whole.values())[-5:]) < whole[0] - 0.5
    begun = train(source, tmp_path / "killed", kill_after=14)
    resumed = train(source, tmp_path / "killed")
    assert min(resumed) == 10  # a checkpoint is taken after every tenth step
    assert begun | resumed == pytest.approx(whole, abs=2e-3)
    assert train(source, tmp_path / "killed") == {}  # it was finished


def test_a_step_without_anything_to_learn_changes_no_weight(monkeypatch):
    """All labels of its samples are −100: a mean over none of them would make NaN of every weight."""
    monkeypatch.syspath_prepend(EXAMPLES)
    loop = importlib.import_module("train")
    rows = [plans.Row(pieces=[(i, 4)]) for i in range(3)]
    epoch = replace(plans.epoch(rows), step_num_loss_tokens=np.array([3, 0, 3]))
    facts = replace(plans.facts([4, 4, 4]), loss_tokens="labels")
    plan = plans.plan_in_memory(facts, [epoch], dropped=plans.drops())
    loader = PlanLoader(plan, Tokens([4] * 3, labels=lambda i, n: np.full(n, -100 if i == 1 else 5)))
    model = loop.small_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    played = [step.index for step, _ in loop.train_epoch(model, loader, optimizer, scheduler)]
    assert played == [0, 2]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
