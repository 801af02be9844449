"""Damaged plans: some here, ten thousand of each kind among the slow tests."""

import pytest

from tests.fuzz import fuzz_plan


@pytest.mark.parametrize("mode", fuzz_plan.MODES)
@pytest.mark.parametrize("kind", fuzz_plan.KINDS)
def test_some(kind, mode):
    failures, outcomes = fuzz_plan.fuzz(kind, mode, 60, seed=0)
    assert not failures
    assert outcomes.get("PlanError", 0) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", fuzz_plan.MODES)
@pytest.mark.parametrize("kind", fuzz_plan.KINDS)
def test_ten_thousand(kind, mode):
    failures, _ = fuzz_plan.fuzz(kind, mode, 10_000 if mode == "damaged" else 3_000, seed=1000)
    assert not failures
