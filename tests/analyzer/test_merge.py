"""Summaries without sorting, against sorting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.analyzer.merge import exact_sum, merge_metric, order_statistic
from packer.metrics import open_metrics

values = st.lists(st.one_of(st.integers(0, 50), st.integers(0, 2**62)), min_size=1, max_size=40)


@given(values, st.data())
def test_order_statistic_equals_sorting(numbers, data):
    rank = data.draw(st.integers(0, len(numbers) - 1))
    pieces = [np.array(numbers[:3], dtype=np.int64), np.array(numbers[3:], dtype=np.int64)]
    assert order_statistic(lambda: pieces, rank, max(numbers)) == sorted(numbers)[rank]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
def test_exact_sum_beyond_64_bits(numbers):
    assert exact_sum(np.array(numbers, dtype=np.int64)) == sum(numbers)


@given(st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=10), min_size=1, max_size=5).filter(any))
def test_merged_metric_is_what_went_in(tmp_path_factory, units):
    folder = tmp_path_factory.mktemp("merged")
    numbers = sorted(number for unit in units for number in unit)
    merged = merge_metric(folder, "m", lambda: [np.array(u, dtype=np.int64) for u in units], len(numbers))

    count = len(numbers)
    at_least_99 = next(n for n in numbers if sum(m <= n for m in numbers) * 100 >= 99 * count)
    assert merged.summary.min == numbers[0]
    assert merged.summary.median == numbers[(count - 1) // 2]
    assert merged.summary.p99 == at_least_99
    assert merged.summary.max == numbers[-1]
    assert merged.summary.total == sum(numbers)
    assert open_metrics(folder).metric("m").tolist() == [number for unit in units for number in unit]
    assert set(merged.files) == {"m/m_sample_to_metric.bin", "m/m_sample_to_metric.idx"}


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [([0, 2**31 - 1], np.int32), ([-(2**31), 5], np.int32), ([2**31], np.int64), ([-(2**31) - 1], np.int64)],
)
def test_int64_only_where_a_value_needs_it(tmp_path, numbers, dtype):
    merge_metric(tmp_path, "m", lambda: [np.array(numbers)], len(numbers))
    assert open_metrics(tmp_path).metric("m").dtype == dtype
