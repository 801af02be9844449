"""A plan that another one replaces under a running loader: it is played to its end, or the run stops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.errors import PlanError
from packer.plan import Plan, PlanSource, load_plan, write_plan
from packer.runtime import PlanLoader
from tests import plans

ROWS, EPOCHS = 40, 12


class Sevens:
    """Samples of seven tokens, all of them the sample's own number."""

    def __len__(self) -> int:
        return 2 * ROWS

    def __getitem__(self, sample_id: int) -> dict[str, Any]:
        return {"input_ids": np.full(7, sample_id)}


def write(folder: Path, *, turned: bool, rows: int = ROWS) -> Plan:
    facts, epochs = plans.many_rows(rows, EPOCHS)
    if turned:
        epochs = [replace(epoch, sample_ids=epoch.sample_ids[::-1].copy()) for epoch in epochs]
    facts = replace(facts, sources=[PlanSource(num_samples=2 * ROWS, num_tokens=14 * ROWS)])
    return write_plan(folder, facts, epochs, dropped=plans.drops(), overwrite=True)


@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
@pytest.mark.parametrize("rows", [ROWS, ROWS // 2])
def test_it_is_played_to_its_end_or_the_run_stops(
    tmp_path: Path, num_workers: int, rows: int, context: str | None
) -> None:
    write(tmp_path / "plan", turned=False)
    loader = PlanLoader(
        load_plan(tmp_path / "plan"),
        Sevens(),
        dp_rank=0,
        dp_size=1,
        num_workers=num_workers,
        multiprocessing_context=context,
    )
    played = 0
    with pytest.raises(PlanError, match=r"replaced by another plan|is missing|plan\.json says"):
        for _ in range(EPOCHS):
            for step in loader:
                for batch in step:
                    assert batch.sample_ids.tolist() == [2 * step.index, 2 * step.index + 1]
                    assert batch["input_ids"][:, 0].tolist() == batch.sample_ids.tolist()
                    played += 1
                if played == ROWS // 2:
                    write(tmp_path / "plan", turned=True, rows=rows)
    assert played >= ROWS  # the epoch that was being played came to its end
    other = PlanLoader(load_plan(tmp_path / "plan"), Sevens(), dp_rank=0, dp_size=1)
    assert sum(1 for _ in other.microbatches()) == rows
