"""What was written is what is read: against plain Python lists, in memory and on disk."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.plan import Plan, load_plan, plan_in_memory, schema, write_plan
from packer.plan.sources import PlanSource
from tests import plans
from tests.plans import Row


@st.composite
def written_plans(draw):
    """Draw rows of some epochs, with everything that a plan can carry."""
    dp_size, grad_accum = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cut, metrics = draw(st.booleans()), draw(st.sampled_from([[], ["source", "target"]]))
    layout = draw(st.sampled_from(["padded", "packed"]))
    ids = st.integers(0, 2**10 - 1)
    lengths = st.integers(1, 1000)
    piece = st.tuples(ids, lengths, st.integers(0, 50)) if cut else st.tuples(ids, lengths)
    row = st.builds(
        Row,
        pieces=st.lists(piece, min_size=1, max_size=4),
        padded_seqlen=st.integers(1, 5000),
        cost=st.integers(0, 2**62),
        is_filler=st.booleans(),
        is_repeat=st.booleans(),
        padded_seqlens=st.fixed_dictionaries({metric: st.integers(1, 99) for metric in metrics}),
    )
    epochs = []
    for _ in range(draw(st.integers(0, 3))):
        num_rows = draw(st.integers(0, 3)) * dp_size * grad_accum
        epochs.append(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))
    lost = st.tuples(ids, st.integers(0, 2**40), st.integers(0, 2**40), st.sampled_from(plans.DROP_REASONS))
    dropped = [draw(st.lists(lost, max_size=5)) for _ in range(len(epochs) + 1)]
    options = {"dp_size": dp_size, "grad_accum": grad_accum, "layout": layout}
    return options, cut, epochs, dropped, draw(st.booleans())


def build(drawn) -> Plan:
    options, cut, epochs, dropped, loss_tokens = drawn
    return plan_in_memory(
        plans.facts([5] * 2**10, **options, total_steps=1),  # with which every reason may occur
        (
            plans.epoch(rows, cut=cut, loss_tokens=loss_tokens, dropped=plans.drops(*lost), **options)
            for rows, lost in zip(epochs, dropped[1:], strict=True)
        ),
        dropped=plans.drops(*dropped[0]),
    )


@given(written_plans())
@settings(deadline=None)
def test_a_reader_returns_what_was_written(drawn):
    options, cut, epochs, dropped, loss_tokens = drawn
    plan = build(drawn)
    accum, ranks = options["grad_accum"], options["dp_size"]
    assert plan.num_epochs == len(epochs)
    samples_before = tokens_before = 0
    for number, rows in enumerate(epochs):
        epoch = plan.epoch(number)
        assert epoch.num_microbatches == len(rows) == epoch.num_steps * accum * ranks
        for at, row in enumerate(rows):
            read = epoch.microbatch(at)
            assert (read.step * accum + read.accum) * ranks + read.dp_rank == at
            assert read.sample_ids.tolist() == [piece[0] for piece in row.pieces]
            assert read.seqlens.tolist() == row.seqlens
            assert (read.starts is None) == (not cut)
            if read.starts is not None:
                assert read.starts.tolist() == [piece[2] for piece in row.pieces]
            assert (read.num_samples, read.num_tokens) == (len(row.pieces), sum(row.seqlens))
            assert (read.max_seqlen, read.padded_seqlen) == (max(row.seqlens), row.padded_seqlen)
            assert (read.cost, read.is_filler, read.is_repeat) == (row.cost, row.is_filler, row.is_repeat)
            assert read.padded_seqlens == row.padded_seqlens
        for step in range(epoch.num_steps):
            mine = rows[step * accum * ranks : (step + 1) * accum * ranks]
            lengths = [n for row in mine if not row.is_filler for n in row.seqlens]
            read = epoch.step(step)
            assert (read.num_samples, read.num_tokens) == (len(lengths), sum(lengths))
            assert read.num_loss_tokens == (sum(n - 1 for n in lengths) if loss_tokens else None)
            assert (read.samples_before, read.tokens_before) == (samples_before, tokens_before)
            samples_before, tokens_before = samples_before + len(lengths), tokens_before + sum(lengths)
    read = [
        row for part in plan.dropped() for row in zip(*(column.tolist() for column in part[:5]), strict=True)
    ]
    assert read == [
        (epoch, *lost[:3], plans.DROP_REASONS.index(lost[3]))
        for epoch, losses in enumerate(dropped, start=-1)
        for lost in losses
    ]


@given(written_plans())
@settings(deadline=None, max_examples=30)
def test_a_plan_in_memory_saves_the_bytes_that_are_written_to_disk(tmp_path_factory, drawn):
    options, cut, epochs, dropped, loss_tokens = drawn
    folder = tmp_path_factory.mktemp("plans")
    memory = build(drawn)
    memory.save(folder / "saved")
    written = write_plan(
        folder / "written",
        plans.facts([5] * 2**10, **options, total_steps=1),  # with which every reason may occur
        (
            plans.epoch(rows, cut=cut, loss_tokens=loss_tokens, dropped=plans.drops(*lost), **options)
            for rows, lost in zip(epochs, dropped[1:], strict=True)
        ),
        dropped=plans.drops(*dropped[0]),
    )
    assert tree(folder / "saved") == tree(folder / "written")
    assert set(tree(folder / "written")) == {*schema.plan_files(len(epochs)), "plan.json"}
    assert memory.fingerprint == written.fingerprint == load_plan(folder / "saved").fingerprint
    assert memory.header == written.header


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def big_plan(num_rows: int = 200_000) -> Plan:
    """Return a plan of several record batches: row r holds sample 2r and 2r + 1."""
    return plan_in_memory(*plans.many_rows(num_rows), dropped=plans.drops())


def test_rows_are_found_across_record_batches(tmp_path):
    plan = big_plan().save(tmp_path / "plan")
    with pa.memory_map(str(tmp_path / "plan/epoch-00000/microbatches.arrow")) as source:
        reader = pa.ipc.open_file(source)
        sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        assert reader.schema.metadata == {b"rows_per_batch": b"65536"}
    assert sizes == [65536, 65536, 65536, 200_000 - 3 * 65536]
    epoch = plan.epoch(0)
    for row in (0, 65_535, 65_536, 131_071, 131_072, 199_999):
        assert epoch.microbatch(row).sample_ids.tolist() == [2 * row, 2 * row + 1]
        assert epoch.step(row).samples_before == 2 * row
    for row in (-1, 200_000):
        with pytest.raises(IndexError, match="200000"):
            epoch.microbatch(row)


def test_arrays_are_views_of_the_mapped_file(tmp_path):
    epoch = big_plan(1000).save(tmp_path / "plan").epoch(0)
    row = epoch.microbatch(500)
    assert not row.sample_ids.flags.owndata
    assert not row.sample_ids.flags.writeable
    (table,) = epoch.microbatches()
    assert np.shares_memory(row.sample_ids, table.sample_ids)


def test_record_batches_shrink_where_micro_batches_hold_many_samples():
    assert schema.rows_per_batch(np.arange(0, 100_001)) == 65_536
    assert schema.rows_per_batch(np.arange(0, 1000 * 100_001, 1000)) == 256
    lone_giant = np.concatenate((np.arange(100_000), [99_999 + 2**31 - 1]))
    assert schema.rows_per_batch(lone_giant) <= 8
    assert schema.rows_per_batch(np.zeros(1, np.int64)) == 65_536


def test_a_plan_on_disk_pickles_as_its_path(tmp_path):
    plan = big_plan(1000).save(tmp_path / "plan")
    data = pickle.dumps(plan)
    assert len(data) < 1000
    assert pickle.loads(data).epoch(0).microbatch(3).sample_ids.tolist() == [6, 7]
    memory = pickle.loads(pickle.dumps(big_plan(1000)))
    assert memory.fingerprint == plan.fingerprint
    assert memory.epoch(0).microbatch(3).sample_ids.tolist() == [6, 7]


def test_wide_ids_where_the_data_set_needs_them():
    assert schema.id_type(2**31) == pa.int32()
    assert schema.id_type(2**31 + 1) == pa.int64()
    facts = plans.PlanFacts(config=plans.config(), sources=[PlanSource(num_samples=2**40, num_tokens=2**50)])
    rows = [Row(pieces=[(2**39 + 1, 5)])]
    plan = plan_in_memory(facts, [plans.epoch(rows, id_dtype=np.int64)], dropped=plans.drops())
    assert plan.epoch(0).microbatch(0).sample_ids.tolist() == [2**39 + 1]


def test_many_drops_fill_record_batches_of_equal_size():
    lost = plans.drops(*[(i, 1, 1, "filtered") for i in range(40_000)])
    epochs = [plans.epoch([Row(pieces=[(50_000, 1)])], dropped=lost) for _ in range(4)]
    plan = plan_in_memory(plans.facts([1] * 50_001), epochs, dropped=lost)
    parts = list(plan.dropped())
    assert [len(part.sample_id) for part in parts] == [65_536, 65_536, 65_536, 200_000 - 3 * 65_536]
    assert np.concatenate([p.sample_id for p in parts]).tolist() == [*range(40_000)] * 5
    assert np.concatenate([p.epoch for p in parts]).tolist() == [
        e for e in range(-1, 4) for _ in range(40_000)
    ]
