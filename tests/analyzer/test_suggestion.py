"""The budget that is proposed is one that a plan accepts, and no giant row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packer
from cli.inputs import parse_max_tokens
from packer.analyzer import suggest_plan
from packer.metrics import open_metrics

ONES = [1] * 300


class Nothing:
    """A data set of lengths alone."""

    def __init__(self, seqlens):
        self.seqlens = seqlens

    def __len__(self):
        return len(self.seqlens)

    def __getitem__(self, index):
        return self.seqlens[index]


def lengths_of(samples):
    return np.array(samples, np.int64)


def measured(folder, seqlens):
    packer.analyze_dataset(Nothing(seqlens), lengths_of, out=folder / "m")
    return open_metrics(folder / "m")


def planned(metrics, suggestion):
    words = suggestion.options.split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    max_tokens = parse_max_tokens(None, None, options.pop("--max-tokens"))
    config = packer.PlanConfig(max_tokens=max_tokens, too_long=options.pop("--too-long", "error"))
    assert not options
    return packer.make_plan(metrics, config)


@pytest.mark.parametrize(
    ("seqlens", "options"),
    [
        ([1], "--max-tokens 2"),
        ([0, 0, 5], "--max-tokens 8"),
        ([2396, *[928] * 99], "--max-tokens 4096"),
        ([300_000] * 20, "--max-tokens 131072 --too-long split"),  # books
        ([*[100] * 300, 1_000_000], "--max-tokens 1024 --too-long split"),
        ([*[100] * 300, 2_000_000_000], "--max-tokens 1024 --too-long drop"),
        ([*[100] * 300, 2**40], "--max-tokens 1024 --too-long drop"),
        ([*[0] * 300, 7], "--max-tokens 8"),
        ([*[0] * 300, 1000], "--max-tokens 16 --too-long split"),
    ],
)
def test_by_distribution(tmp_path, seqlens, options):
    metrics = measured(tmp_path, seqlens)
    suggestion = suggest_plan(metrics.manifest)
    assert suggestion.options == options
    assert planned(metrics, suggestion).num_epochs == 1


@pytest.mark.parametrize("seqlens", [[0], [0, 0], [2**31], [1, 2**62], [2**31 - 1], [*[0] * 300, 2**31 - 1]])
def test_where_no_budget_plans_anything(tmp_path, seqlens):
    assert suggest_plan(measured(tmp_path, seqlens).manifest) is None


@settings(max_examples=40)
@given(
    st.lists(
        st.integers(0, 9) | st.integers(0, 5000) | st.sampled_from([2**17, 2**20, 2**31 - 1, 2**31, 2**45]),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([[], ONES]),
)
def test_a_plan_accepts_it(tmp_path_factory, seqlens, more):
    folder = tmp_path_factory.mktemp("suggestion")
    metrics = measured(folder, seqlens + more)
    suggestion = suggest_plan(metrics.manifest)
    if suggestion is not None:
        assert max(suggestion.max_tokens.values()) <= 1 << 17
        planned(metrics, suggestion)
