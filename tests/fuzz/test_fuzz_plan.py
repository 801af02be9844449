"""Damaged plans: some here, ten thousand of each kind among the slow tests."""

import pytest

from tests.fuzz.children import fuzz
from tests.fuzz.fuzz_plan import SUBJECTS

MODULE = "tests.fuzz.fuzz_plan"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_some(subject):
    failures, outcomes = fuzz(MODULE, subject, 60, seed=0)
    assert not failures
    assert outcomes.get("PlanError", 0) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_ten_thousand(subject):
    failures, _ = fuzz(MODULE, subject, 10_000 if subject.endswith("damaged") else 3_000, seed=1000)
    assert not failures
