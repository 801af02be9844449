"""What the pictures show is what the rows say."""

import math

import numpy as np
import pytest

from packer.plan import plan_in_memory
from packer.report import compare, step_rows, survey
from packer.report.screen import sparkline
from packer.report.series import binned
from tests import plans


def test_lengths_padding_and_ranks():
    plan, seqlens = plans.whole_plan()
    found = survey(plan)
    rows = [plan.epoch(e).microbatch(r) for e in range(2) for r in range(4)]
    edges, planned = found.length_edges, found.planned_lengths
    for low, high, count in zip(edges, edges[1:], planned, strict=False):
        assert count == sum(low <= n < high for row in rows for n in row.seqlens.tolist())
    assert sum(planned) == sum(row.num_samples for row in rows)
    assert {reason: sum(counts) for reason, counts in found.dropped_lengths.items()} == {
        "empty": 2, "too_long": 2, "filtered": 2, "remainder": 5,
    }  # fmt: skip
    steps = [rows[i : i + 2] for i in range(0, 8, 2)]
    area = [sum(row.num_samples * row.padded_seqlen for row in step) for step in steps]
    tokens = [sum(row.num_tokens for row in step) for step in steps]
    assert found.padding.mean == pytest.approx([a / t - 1 for a, t in zip(area, tokens, strict=True)])
    costs = [sum(row.cost for row in rows if row.dp_rank == rank) for rank in range(2)]
    assert found.rank_costs == pytest.approx([cost / sum(costs) for cost in costs])
    assert sum(seqlens) == plan.header["num_tokens"]
    assert found.example_steps["first"] == (0, 0)


def test_batches_of_fixed_size_are_counted_by_hand():
    seqlens = [4] * 10 + [8] * 10
    rows = [plans.Row(pieces=[(2 * i, seqlens[2 * i]), (2 * i + 1, seqlens[2 * i + 1])]) for i in range(10)]
    plan = plan_in_memory(plans.facts(seqlens, pad_multiple=3), [plans.epoch(rows)], dropped=plans.drops())
    fixed = survey(plan).fixed_size
    # A micro-batch holds two samples: those of one length take 2 × 6 or 2 × 9, a mixed pair 2 × 9.
    assert fixed.num_rows == 2
    assert fixed.times_largest == pytest.approx(18 / 16)
    assert fixed.times_tokens == pytest.approx(1 + fixed.padding)
    padded = (1 + fixed.padding) * 120
    mixed_pairs = (padded - (10 * 6 + 10 * 9)) / 3  # each pads a sample of 4 to 9 where 6 would do
    assert mixed_pairs == pytest.approx(round(mixed_pairs))
    assert 0 < mixed_pairs <= 10


def test_batches_of_fixed_size_hold_the_tokens_of_a_step_whatever_the_longest_sample():
    seqlens = [10] * 99 + [100]
    ids = np.array_split(np.arange(100), 10)
    rows = [plans.Row(pieces=[(int(i), seqlens[i]) for i in group]) for group in ids]
    facts = plans.facts(seqlens, layout="packed", max_tokens=190)
    plan = plan_in_memory(facts, [plans.epoch(rows, layout="packed")], dropped=plans.drops())
    fixed = survey(plan).fixed_size
    assert fixed.num_rows == 10  # not the one sample that surely fits
    assert fixed.times_tokens == pytest.approx((90 * 10 + 10 * 100) / 1090)


def test_the_mean_length_of_steps_beside_that_of_random_ones():
    seqlens = [2, 2, 4, 4, 8, 8]
    rows = [plans.Row(pieces=[(2 * i, seqlens[2 * i]), (2 * i + 1, seqlens[2 * i + 1])]) for i in range(3)]
    plan = plan_in_memory(plans.facts(seqlens), [plans.epoch(rows)], dropped=plans.drops())
    found = survey(plan)
    assert found.mean_length.mean == [2, 4, 8]
    mean, spread = found.random_length
    assert mean == pytest.approx(np.mean(seqlens))
    assert spread == pytest.approx(np.std(seqlens) / np.sqrt(2))


def test_pieces_and_what_is_lost_of_them_are_shown_at_their_own_length():
    plan, _ = plans.cut_plan()
    found = survey(plan)
    assert found.is_cut
    assert not survey(plans.whole_plan()[0]).is_cut
    lengths = {low for low, count in zip(found.length_edges, found.planned_lengths, strict=False) if count}
    assert max(lengths) <= 8
    assert found.length_edges[-1] <= 10  # no bin for the whole samples of 14 and 25


def test_long_lengths_get_bins_that_grow():
    seqlens = [*range(1, 50), 40_000]
    rows = [plans.Row(pieces=[(i, n)]) for i, n in enumerate(seqlens)]
    plan = plan_in_memory(plans.facts(seqlens), [plans.epoch(rows)], dropped=plans.drops())
    found = survey(plan)
    widths = np.diff(found.length_edges)
    assert widths[-1] > 100 * widths[0]
    assert found.length_edges[0] <= 1
    assert found.length_edges[-1] > 40_000
    assert sum(found.planned_lengths) == 50


@pytest.mark.parametrize("pieces", [1, 3, 7])
@pytest.mark.parametrize("num_bins", [1, 4, 20, 100])
def test_stretches_of_a_series(pieces, num_bins):
    values = np.random.default_rng(0).integers(0, 100, 20)
    series = binned(np.array_split(values, pieces), 20, num_bins)
    stretches = np.split(values, np.linspace(0, 20, min(num_bins, 20) + 1).astype(int)[1:-1])
    assert series.mean == pytest.approx([stretch.mean() for stretch in stretches])
    assert series.low == [stretch.min() for stretch in stretches]
    assert series.high == [stretch.max() for stretch in stretches]


def test_sparklines():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([5.0, 5.0]) == "▄▄"
    assert len(sparkline([math.pi])) == 1


def test_shares_of_the_sources_along_the_steps():
    shares = survey(plans.mixed_plan()).source_shares
    assert list(shares) == ["web", "code", "old"]
    assert shares["web"].mean == [8 / 14, 8 / 17, 11 / 18, 2 / 11]
    assert shares["code"].mean == pytest.approx([1 - share for share in shares["web"].mean])
    assert shares["old"].high == [0.0] * 4
    assert survey(plans.whole_plan()[0]).source_shares == {}


def test_a_steps_rows_say_which_source_each_sample_is_of():
    rows = list(step_rows(plans.mixed_plan(), 0, 2))
    assert [(row["sample_ids"], row["sources"]) for row in rows] == [([4, 5], [0, 0]), ([8, 7], [1, 1])]
    assert "sources" not in next(step_rows(plans.whole_plan()[0], 0, 0))


def test_two_mixtures_are_compared_source_by_source():
    effects = {effect.name: effect for effect in compare(plans.mixed_plan(), plans.whole_plan()[0]).effects}
    assert (effects["share of web"].left, effects["share of web"].right) == (29 / 60, None)
    assert effects["passes of code"].left == 5 / 3
    assert effects["passes of old"].left == 0
