"""Small, odd mixtures by every packing and option, gone on from: all invariants hold, or they are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.errors import ConfigError, EmptyPlanError, SampleTooLongError
from packer.plan import load_plan, verify_plan
from packer.plan.trained import Trained
from packer.planner import PlanConfig, make_plan
from tests import invariants

PACKINGS = ["wrapped", "wrapped", "mixed", "windowed", "best-fit", "next-fit"]
ENDS = ["mix", "repeat", "total_tokens", "total_steps", "none"]


def drawn_sources(random: np.random.Generator) -> dict[str, Any]:
    return {
        f"s{number}": random.integers(
            random.random() >= 0.3, int(random.integers(3, 60)), int(random.integers(1, 120))
        )
        for number in range(int(random.integers(1, 4)))
    }


def drawn_options(random: np.random.Generator, names: list[str]) -> dict[str, Any]:
    packing, end = str(random.choice(PACKINGS)), str(random.choice(ENDS))
    options: dict[str, Any] = {
        "max_tokens": int(random.integers(60, 200)),
        "packing": packing,
        "layout": "packed" if packing in ("wrapped", "mixed", "best-fit") else "padded",
        "dp_size": int(random.integers(1, 3)),
    }
    if end == "mix":
        parts = np.round(random.dirichlet(np.ones(len(names))), 3)
        parts[-1] = round(1 - parts[:-1].sum(), 3)
        options["mix"] = dict(zip(names, map(float, parts), strict=True))
    if end == "repeat":
        options["repeat"] = {name: float(random.choice([0, 0.5, 1, 2, 2.5])) for name in names}
    if end in ("mix", "total_tokens"):
        options["total_tokens"] = int(random.integers(1, 4000))
    if end == "total_steps":
        options["total_steps"] = int(random.integers(1, 12))
    if end in ("none", "repeat"):
        options["epochs"] = int(random.integers(1, 3))
        options["remainder"] = str(random.choice(["drop", "keep", "fill"]))
    if random.random() < 0.3:
        options["too_long"] = str(random.choice(["split", "truncate", "drop"]))
        options["max_seqlen"] = int(random.integers(3, 30))
    if random.random() < 0.2:
        options["step_tokens"] = int(random.integers(50, 600))
    else:
        options["grad_accum"] = int(random.integers(1, 4))
    return options


def check(folder: Path, lengths: np.ndarray[Any, Any]) -> None:
    invariants.check(folder, lengths)
    verify_plan(load_plan(folder))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_invariant_holds_or_the_plan_is_refused(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    num_planned = 0
    for number in range(40):
        sources = drawn_sources(random)
        lengths = np.concatenate(list(sources.values()))
        plan, rest = tmp_path / f"{number}", tmp_path / f"{number}-rest"
        try:
            config = PlanConfig(**drawn_options(random, list(sources)))
            made = make_plan(sources, config, out=plan)
            check(plan, lengths)
            num_planned += 1
            epoch = made.num_epochs - 1
            step = made.epoch(epoch).num_steps * int(random.integers(1, 3)) // 2
            make_plan(sources, config, trained=[Trained(plan=made, epoch=epoch, step=step)], out=rest)
            check(rest, lengths)
        except (ConfigError, EmptyPlanError, SampleTooLongError):
            continue
    assert num_planned > 10
