"""Sizes around every boundary, data that leaves nothing to plan, ids beyond 32 bits."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.analyzer import analyze
from packer.errors import ConfigError, EmptyPlanError, MetricsError, PlanError, SampleTooLongError
from packer.kernels import counting, rng, windows
from packer.metrics import open_metrics
from packer.plan import verify_plan
from packer.plan.epoch import DROP_REASONS
from packer.planner import PlanConfig, make_plan
from packer.planner.choose.limits import limits_for
from packer.planner.choose.pieces import Pieces
from packer.planner.compose.composition import compose
from packer.planner.compose.mixture import Mixture
from packer.planner.order.stream import Draw
from packer.planner.packing.pack import pack


def rows(plan, epoch=0):
    played = plan.epoch(epoch)
    return [played.microbatch(row) for row in range(played.num_microbatches)]


def samples(plan, epoch=0):
    return sorted(int(sample) for row in rows(plan, epoch) for sample in row.sample_ids)


@pytest.mark.parametrize("packing", ["windowed", "next-fit"])
@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_one_sample_more_or_less_than_fills_the_steps(packing, pipeline, extra):
    """Samples of one length, 4 a micro-batch, 6 micro-batches a step."""
    size = 2 * 6 * 4 + extra
    shape = {"same_num_samples": pipeline, "same_seqlen": pipeline}
    kept = {
        remainder: make_plan(
            [25] * size,
            PlanConfig(
                max_tokens=100, packing=packing, dp_size=3, grad_accum=2, remainder=remainder, **shape
            ),
        )
        for remainder in ("drop", "keep", "fill")
    }
    assert samples(kept["keep"])[0] == 0
    assert {*samples(kept["keep"])} == {*samples(kept["fill"])} == set(range(size))
    dropped = kept["drop"].header["epochs"][0]["dropped"]
    assert len(samples(kept["drop"])) + sum(d["num_samples"] for d in dropped.values()) == size
    # where all of a step must agree, the tail makes smaller micro-batches and what is left of it a third step
    assert kept["keep"].epoch(0).num_steps == (3 if extra == 1 or (pipeline and extra == -1) else 2)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_single_sample(layout):
    plan = make_plan([7], PlanConfig(max_tokens=10, layout=layout))
    assert samples(plan) == [0]
    plan = make_plan([7], PlanConfig(max_tokens=10, layout=layout, dp_size=4, remainder="keep"))
    assert [row.is_filler for row in rows(plan)].count(True) == 3
    plan = make_plan([7], PlanConfig(max_tokens=10, layout=layout, dp_size=4, remainder="fill"))
    assert plan.epoch(0).step(0).num_samples == 4


def test_tiny_data_against_many_ranks_names_the_cure():
    with pytest.raises(EmptyPlanError, match="--remainder keep or fill"):
        make_plan([7, 7], PlanConfig(max_tokens=10, dp_size=64))
    with pytest.raises(EmptyPlanError, match="no sample"):
        make_plan([], PlanConfig(max_tokens=10))
    with pytest.raises(EmptyPlanError, match="2 empty"):
        make_plan([0, 0], PlanConfig(max_tokens=10))
    with pytest.raises(EmptyPlanError, match="--min-samples"):
        make_plan([4], PlanConfig(max_tokens=12, min_samples=2))
    with pytest.raises(SampleTooLongError, match="--min-samples 2 with the shortest others"):
        make_plan([4, 9], PlanConfig(max_tokens=12, min_samples=2))


def test_one_giant():
    lengths = [5] * 20 + [10**9]
    with pytest.raises(
        SampleTooLongError, match=r"sample 20 has 1000000000 tokens, over the limit of 64 \(--max-tok"
    ):
        make_plan(lengths, PlanConfig(max_tokens=64))
    cut = make_plan(lengths, PlanConfig(max_tokens=64, too_long="truncate"))
    assert cut.header["dropped"]["truncated"] == {"num_samples": 1, "num_tokens": 10**9 - 64}
    whole = make_plan(lengths, PlanConfig(max_tokens=10**9, layout="packed"))
    assert samples(whole) == list(range(21))
    with pytest.raises(SampleTooLongError, match="and 2 more"):
        make_plan([9, 99, 99, 99], PlanConfig(max_tokens=64, max_seqlen=50))


def test_giants_of_64_bits():
    lengths = np.array([5, 2**40], np.int64)
    plan = make_plan(lengths, PlanConfig(max_tokens=64, too_long="drop"))
    assert plan.header["num_tokens"] == 2**40 + 5
    with pytest.raises(PlanError, match="start after token"):
        make_plan(lengths, PlanConfig(max_tokens=2**31 - 1, too_long="split"))


def test_pieces_of_a_split_sample_never_meet():
    lengths = [100] * 5
    for options in (
        {"layout": "packed"},
        {"layout": "packed", "packing": "windowed"},
        {"packing": "windowed"},
        {"packing": "next-fit"},
        {"order": "sequential"},
        {"packing": "windowed", "same_num_samples": True, "same_seqlen": True, "dp_size": 2},
    ):
        config = PlanConfig(max_tokens=64, max_seqlen=16, too_long="split", remainder="keep", **options)
        plan = make_plan(lengths, config)
        for row in rows(plan):
            assert len(set(row.sample_ids.tolist())) == len(row.sample_ids)
        pieces = sorted(
            (int(sample), int(start), int(length))
            for row in rows(plan)
            if not row.is_filler
            for sample, start, length in zip(row.sample_ids, row.starts, row.seqlens, strict=True)
        )
        assert pieces == [
            (sample, start, min(16, 100 - start)) for sample in range(5) for start in range(0, 100, 16)
        ]


def test_long_documents_cut_to_pieces_fill_their_micro_batches():
    """40 documents of 50 pieces, 8 pieces a micro-batch: keeping pieces apart costs hardly a micro-batch."""
    for options in ({}, {"layout": "packed"}, {"packing": "next-fit"}):
        config = PlanConfig(max_tokens=8 * 64, max_seqlen=64, too_long="split", **options)
        most = 1.35 if options.get("packing") == "next-fit" else 1.02
        assert len(rows(make_plan([3200] * 40, config))) <= 40 * 50 / 8 * most + 1


def test_ids_beyond_32_bits():
    """A synthetic index: the samples of an index of 3 billion that are left, without the index."""
    ids = np.array([5, 2**31 - 1, 2**31, 2**31 + 7, 3_000_000_000], np.int64)
    lengths = np.full(5, 10, np.int32)
    source = np.broadcast_to(np.int32(10), (3_000_000_001,))
    pieces = Pieces(lengths=lengths[np.newaxis], seqlens=lengths, ids=ids, starts=None, source=source)
    config = PlanConfig(max_tokens=20, dp_size=2)
    for options in ({}, {"layout": "packed"}, {"packing": "next-fit"}):
        config = PlanConfig(max_tokens=20, dp_size=2, **options)
        packed = pack(pieces.lengths, pieces.owners, limits_for(config), config, np.uint64(1))
        drawn = Draw(pieces=pieces)
        composed = compose(packed, drawn, Mixture.of(drawn, 1), config, 0, None)
        planned = composed.sample_ids
        assert planned.dtype == composed.dropped.sample_ids.dtype == np.int64
        assert sorted([*planned.tolist(), *composed.dropped.sample_ids.tolist()]) == ids.tolist()
        assert {DROP_REASONS[code] for code in composed.dropped.reasons} == {"remainder"}


def test_kernels_count_beyond_32_bits():
    """An index of 3 billion samples of one length that takes no memory; a stretch of it is worked on."""
    lengths = np.broadcast_to(np.int32(7), (3_000_000_000,))
    start, stop = 2**31 - 5, 2**31 + 45
    expected = list(range(start, stop))
    out = np.empty(50, np.int64)
    counting.scatter_by_length(lengths, start, stop, np.zeros(8, np.int64), out)
    assert out.tolist() == expected
    entries, counts = np.empty(50, np.int64), np.zeros(2, np.int64)
    rng.count_buckets(start, stop, np.uint64(63), np.uint64(1), counts)
    rng.scatter_entries(lengths, start, stop, np.uint64(63), np.uint64(1), np.array([0, counts[0]]), entries)
    assert sorted(entries.tolist()) == [7 << 32 | sample for sample in expected]
    starts, sizes, left = np.empty(50, np.int64), np.empty(50, np.int64), np.empty(1, np.int64)
    none = np.empty(0, np.int64)
    config = PlanConfig(max_tokens=70)
    windows.partition_windows(
        entries, np.array([0, 50]), 3, limits_for(config), 1, 8, none, starts, sizes, left
    )
    assert sorted((entries & 0xFFFFFFFF).tolist()) == expected


def test_every_epoch_has_its_own_order_from_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(1, 50, 500)
    for packing, layout in (("windowed", "padded"), ("next-fit", "padded"), ("best-fit", "packed")):
        options = {"max_tokens": 200, "packing": packing, "layout": layout}
        orders = [
            [
                row.sample_ids.tolist()
                for row in rows(make_plan(lengths, PlanConfig(seed=seed, epochs=3, **options)), e)
            ]
            for seed in (0, 1)
            for e in range(3)
        ]
        assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
        again = make_plan(lengths, PlanConfig(seed=1, epochs=3, **options))
        assert [row.sample_ids.tolist() for row in rows(again, 2)] == orders[5]


def test_seqlen_under_drop_does_not_lose_the_longest():
    lengths = list(range(1, 102))
    lost = set()
    for seed in range(10):
        plan = make_plan(lengths, PlanConfig(max_tokens=101, order="seqlen", dp_size=7, seed=seed))
        lost |= set(range(101)) - set(samples(plan))
    assert min(lost) < 50


def test_two_budgets_hold_both():
    random = np.random.default_rng(0)
    source = random.integers(1, 100, 2000)
    target = np.clip(source + random.integers(-20, 20, 2000), 1, None)
    options = {"max_tokens": {"source": 1000, "target": 800}, "dp_size": 2, "pad_multiple": 4}
    metrics = {"source": source, "target": target}
    for more in (
        {"packing": "windowed"},
        {"packing": "next-fit"},
        {"order": "seqlen"},
        {"packing": "windowed", "same_num_samples": True, "same_seqlen": True},
        {"packing": "next-fit", "same_num_samples": True, "same_seqlen": True},
    ):
        plan = make_plan(source + target, PlanConfig(**options, **more), metrics=metrics)
        area = 0
        for row in rows(plan):
            for name, values in metrics.items():
                padded = row.padded_seqlens[name]
                assert padded % 4 == 0
                assert padded >= values[row.sample_ids].max()
                assert padded * row.num_samples <= options["max_tokens"][name]
                area += padded * row.num_samples
            assert row.seqlens.tolist() == (source + target)[row.sample_ids].tolist()
        if more == {"packing": "windowed"}:
            assert area / int((source + target).sum()) < 1.2
    with pytest.raises(ConfigError, match="names metric 'target', and measured is only seqlen"):
        make_plan(source, PlanConfig(**options), metrics={"source": source})
    with pytest.raises(SampleTooLongError, match="has 900 target"):
        make_plan([5, 5], PlanConfig(**options), metrics={"source": [1, 1], "target": [1, 900]})


def test_num_shapes_are_chosen_over_all_epochs():
    lengths = np.random.default_rng(0).integers(1, 100, 800)
    for options in ({"packing": "windowed"}, {"layout": "packed", "packing": "next-fit"}):
        plan = make_plan(lengths, PlanConfig(max_tokens=500, num_shapes=3, epochs=3, **options))
        assert len({row.padded_seqlen for epoch in range(3) for row in rows(plan, epoch)}) <= 3


@pytest.mark.parametrize("min_samples", [1, 2])
@pytest.mark.parametrize("values", [[0] * 4, [0, 0, 3, 9]])
def test_a_budget_on_another_metric_alone_that_may_be_0(values, min_samples):
    config = PlanConfig(max_tokens={"images": 9}, min_samples=min_samples, too_long="drop")
    plan = make_plan([1, 2, 3, 4], config, metrics={"images": values})
    verify_plan(plan)
    fits = range(3) if max(values) * min_samples > 9 else range(4)
    assert samples(plan) == list(fits)


def test_costs_whose_sum_outgrows_64_bits_are_compared_as_they_are():
    """Two steps of a long sample beside one of half its length, a quarter of its cost: 2 / (1 + 1/4) − 1."""
    lengths = [2**31 - 1, 2**31 - 1, 2**30, 2**30]
    plan = make_plan(lengths, PlanConfig(max_tokens=2**31 - 1, dp_size=2, balance="flops"))
    assert plan.header["epochs"][0]["rank_imbalance"] == pytest.approx(0.6, abs=1e-4)


def test_lengths_that_are_none():
    for wrong in ([1.5], [[1]], [[1, 2], [3]], ["a"], np.array([True])):
        with pytest.raises(MetricsError, match="one integer a sample"):
            make_plan(wrong, PlanConfig(max_tokens=9))
    with pytest.raises(MetricsError, match="sample 1 has seqlen -4"):
        make_plan([3, -4], PlanConfig(max_tokens=9))
    with pytest.raises(MetricsError, match="2 values for 1 samples"):
        make_plan([3], PlanConfig(max_tokens=9), loss_tokens=[1, 2])
    with pytest.raises(PlanError, match="names sample 3"):
        make_plan([3], PlanConfig(max_tokens=9, sample_ids=[0, 3]))


def test_lengths_of_every_integer_type():
    expected = make_plan([3, 4, 5], PlanConfig(max_tokens=9)).fingerprint
    for kind in ("u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4"):
        assert make_plan(np.array([3, 4, 5], kind), PlanConfig(max_tokens=9)).fingerprint == expected


def test_a_plan_does_not_depend_on_threads(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 400, 70_000)
    for options in ({"packing": "windowed"}, {"layout": "packed", "balance": "flops", "dp_size": 4}):
        hashes = set()
        for count in (1, 3):
            monkeypatch.setattr("packer.planner.order.threads.num_cores", lambda count=count: count)
            monkeypatch.setattr("packer.planner.order.threads.MIN_CHUNK", 1)
            hashes.add(make_plan(lengths, PlanConfig(max_tokens=1000, **options)).fingerprint)
        assert len(hashes) == 1


def test_a_plan_of_a_metrics_directory_takes_all_that_the_directory_knows(tmp_path) -> None:
    seqlens = (5, 3, 8, 2)
    columns = {"input_ids": [[1] * n for n in seqlens], "labels": [[-100] * (n - 1) + [1] for n in seqlens]}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    analyze(
        tmp_path / "data.parquet",
        out=tmp_path / "metrics",
        tokens_column="input_ids",
        labels_column="labels",
    )
    metrics = open_metrics(tmp_path / "metrics")
    plan = make_plan(metrics, PlanConfig(max_tokens=16), out=tmp_path / "plan")
    assert plan.header["metrics_fingerprint"] == metrics.fingerprint
    assert plan.sources[0].files == metrics.sources
    assert plan.header["loss_tokens"] == "labels"
    epoch = plan.epoch(0)
    assert sum(epoch.step(index).num_loss_tokens or 0 for index in range(epoch.num_steps)) == 4


def test_metrics_that_were_changed_are_not_planned(tmp_path) -> None:
    pq.write_table(pa.table({"length": [5, 3, 8, 2]}), tmp_path / "data.parquet")
    analyze(tmp_path / "data.parquet", out=tmp_path / "metrics", length_column="length")
    make_plan(tmp_path / "metrics", PlanConfig(max_tokens=16))
    with (tmp_path / "metrics/seqlen/seqlen_sample_to_metric.bin").open("r+b") as file:
        file.write(b"\x06")
    with pytest.raises(MetricsError, match="not the file that was written"):
        make_plan(tmp_path / "metrics", PlanConfig(max_tokens=16))


@pytest.mark.parametrize("order", ["random", "seqlen"])
@pytest.mark.parametrize("budgets", [1, 2])
def test_no_sample_is_left_out_in_every_epoch(order, budgets):
    """Shape rules leave out what fills no step: others in every epoch, not the same shortest or longest."""
    lengths = list(range(1, 8))
    options = {"grad_accum": 3, "same_num_samples": True, "same_seqlen": True, "epochs": 12, "order": order}
    max_tokens = 50 if budgets == 1 else {"seqlen": 50, "target": 50}
    metrics = {"target": lengths} if budgets == 2 else None
    plan = make_plan(lengths, PlanConfig(max_tokens=max_tokens, **options), metrics=metrics)
    left_out = [
        set(range(7)) - {i for row in rows(plan, e) for i in row.sample_ids.tolist()} for e in range(12)
    ]
    assert all(left_out)
    assert not set.intersection(*left_out)
