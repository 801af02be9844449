"""No length drift along the epoch: steps come in an order that no test tells from a random one.

Two-sample Kolmogorov–Smirnov test of the mean length, the largest length and the size of the steps of the
first half of an epoch against those of the second, at the level 0.001 with fixed seeds; and the rank
correlation with time below 3.3 standard deviations.
"""

import math

import numpy as np
import pytest

from packer.planner import PlanConfig, make_plan


def ks_critical(n, m, level):
    """Return the distance that n and m values of one distribution exceed with chance ``level``."""
    return math.sqrt(-math.log(level / 2) / 2 * (n + m) / (n * m))


def ks_distance(first, second):
    values = np.sort(np.concatenate([first, second]))
    below = [np.searchsorted(np.sort(half), values, side="right") / len(half) for half in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


def rank_correlation(values):
    ranks = np.argsort(np.argsort(values, kind="stable"))
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


LENGTHS = np.sort(np.clip(np.random.default_rng(7).lognormal(5, 1, 60_000), 1, 2048).astype(np.int32))
CONFIGS = [
    {"packing": "windowed"},
    {"packing": "windowed", "same_num_samples": True, "same_seqlen": True},
    {"packing": "windowed", "balance": "flops", "balance_steps": 4},
    {"packing": "windowed", "layout": "packed"},
    {"packing": "best-fit", "layout": "packed"},
    {"packing": "best-fit", "layout": "packed", "balance": "tokens", "balance_steps": 4},
    {"packing": "next-fit"},
]


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_no_drift(options):
    config = PlanConfig(max_tokens=4096, dp_size=4, seed=3, window=32, **options)
    epoch = make_plan(LENGTHS, config).epoch(0)
    steps = [epoch.step(step) for step in range(epoch.num_steps)]
    assert len(steps) > 400
    statistics = {
        "mean length": [step.num_tokens / step.num_samples for step in steps],
        "longest": [step.max_seqlen for step in steps],
        "samples": [step.num_samples for step in steps],
    }
    for name, values in statistics.items():
        series = np.array(values, float)
        half = len(series) // 2
        critical = ks_critical(half, len(series) - half, 0.001)
        assert ks_distance(series[:half], series[half:]) < critical, name
        assert abs(rank_correlation(series)) * math.sqrt(len(series) - 1) < 3.3, name


def test_the_test_sees_a_drift():
    """A sorted order fails it."""
    config = PlanConfig(max_tokens=4096, dp_size=4, order="seqlen")
    epoch = make_plan(LENGTHS, config).epoch(0)
    series = np.array([epoch.step(step).max_seqlen for step in range(epoch.num_steps)], float)
    half = len(series) // 2
    assert ks_distance(series[:half], series[half:]) > ks_critical(half, len(series) - half, 0.001)
