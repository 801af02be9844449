"""Damaged metrics directories: some here, hundreds among the slow tests, ten thousand of each by script."""

import pytest

from tests.fuzz.children import fuzz
from tests.fuzz.fuzz_metrics import SUBJECTS

MODULE = "tests.fuzz.fuzz_metrics"


@pytest.mark.parametrize("subject", ["manifest.json", "DeepSpeed's .idx"])
def test_some(subject):
    failures, outcomes = fuzz(MODULE, subject, 60, seed=0)
    assert not failures
    assert outcomes["MetricsError"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_hundreds(subject):
    failures, outcomes = fuzz(MODULE, subject, 400, seed=100_000)
    assert not failures
    assert outcomes["MetricsError"] > 0
