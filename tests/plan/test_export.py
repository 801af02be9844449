"""Exports say what the plan says, to readers that do not know packer."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.errors import ConfigError, PlanError, TargetExistsError
from packer.plan import plan_in_memory
from packer.plan.export import export_plan
from tests import plans


@pytest.fixture(params=["whole", "cut", "fill"])
def plan(request):
    makers = {"whole": plans.whole_plan, "cut": plans.cut_plan}
    return makers[request.param]()[0] if request.param in makers else plans.copying_plan("fill")[0]


def rows_of(plan, epoch):
    opened = plan.epoch(epoch)
    return [opened.microbatch(row) for row in range(opened.num_microbatches)]


def test_deepspeed_lists(tmp_path):
    plan, _ = plans.whole_plan()
    names = export_plan(plan, tmp_path / "out", to="deepspeed")
    assert names == ["epoch-00000.json", "epoch-00001.json"]
    for epoch in range(2):
        lists = json.loads((tmp_path / "out" / f"epoch-{epoch:05d}.json").read_text())
        rows, opened = rows_of(plan, epoch), plan.epoch(epoch)
        assert lists["microbatch_ids"] == [[row.step, row.sample_ids.tolist()] for row in rows]
        steps = [opened.step(step) for step in range(opened.num_steps)]
        assert lists["batch_sizes"] == [step.num_samples for step in steps]
        assert lists["batch_max_seqlens"] == [step.max_seqlen for step in steps]


def test_deepspeed_lists_cannot_say_everything(tmp_path):
    with pytest.raises(PlanError, match="whole samples, this plan cuts some; export it to npz or parquet"):
        export_plan(plans.cut_plan()[0], tmp_path / "out", to="deepspeed")
    with pytest.raises(PlanError, match="cannot mask a filler"):
        export_plan(plans.copying_plan("keep")[0], tmp_path / "out", to="deepspeed")
    assert not list(tmp_path.iterdir())


def test_numpy_arrays(plan, tmp_path):
    names = export_plan(plan, tmp_path / "out", to="npz")
    assert names == ["dropped.npz", *(f"epoch-{e:05d}.npz" for e in range(plan.num_epochs))]
    for epoch in range(plan.num_epochs):
        arrays = np.load(tmp_path / "out" / f"epoch-{epoch:05d}.npz", allow_pickle=False)
        rows, opened = rows_of(plan, epoch), plan.epoch(epoch)
        assert arrays["offsets"].dtype == np.int64
        for at, row in enumerate(rows):
            pieces = slice(arrays["offsets"][at], arrays["offsets"][at + 1])
            assert arrays["sample_ids"][pieces].tolist() == row.sample_ids.tolist()
            assert arrays["seqlens"][pieces].tolist() == row.seqlens.tolist()
            if row.starts is not None:
                assert arrays["starts"][pieces].tolist() == row.starts.tolist()
            for name in ("step", "accum", "dp_rank", "padded_seqlen", "cost", "is_filler", "is_repeat"):
                assert arrays[name][at] == getattr(row, name)
        for step in range(opened.num_steps):
            for name, value in opened.step(step)._asdict().items():
                assert arrays[f"step_{name}"][step] == value
    lost = np.load(tmp_path / "out" / "dropped.npz", allow_pickle=False)
    expected = [
        (e, i, n, t, plans.DROP_REASONS[r])
        for part in plan.dropped()
        for e, i, n, t, r in zip(*(column.tolist() for column in part[:5]), strict=True)
    ]
    columns = ("epoch", "sample_id", "seqlen", "num_tokens", "reason")
    assert list(zip(*(lost[name].tolist() for name in columns), strict=True)) == expected


def test_parquet(plan, tmp_path):
    plan = plan.save(tmp_path / "plan")
    names = export_plan(plan, tmp_path / "out", to="parquet")
    arrow = sorted(path.relative_to(plan.path).as_posix() for path in plan.path.rglob("*.arrow"))
    assert names == [name.replace(".arrow", ".parquet") for name in arrow]
    for name in arrow:
        with pa.memory_map(str(plan.path / name)) as source:
            expected = pa.ipc.open_file(source).read_all()
        assert (
            pq.read_table(tmp_path / "out" / name.replace(".arrow", ".parquet")).to_pylist()
            == expected.to_pylist()
        )


@pytest.mark.parametrize("to", ["npz", "parquet"])
def test_the_same_plan_gives_the_same_bytes(plan, tmp_path, to):
    for folder in ("a", "b"):
        export_plan(plan, tmp_path / folder, to=to)
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    said = json.loads((tmp_path / "a" / "export.json").read_text())
    assert (said["to"], said["content_hash"]) == (to, plan.fingerprint)


@pytest.mark.parametrize("to", ["deepspeed", "npz", "parquet"])
def test_many_record_batches(tmp_path, to):
    rows = [plans.Row(pieces=[(i, 1)]) for i in range(70_000)]
    plan = plan_in_memory(plans.facts([1] * 70_000), [plans.epoch(rows)], dropped=plans.drops())
    export_plan(plan, tmp_path / "out", to=to)
    if to == "npz":
        arrays = np.load(tmp_path / "out" / "epoch-00000.npz")
        assert arrays["offsets"].tolist() == [*range(70_001)]
        assert arrays["sample_ids"].tolist() == [*range(70_000)]
    elif to == "parquet":
        table = pq.read_table(tmp_path / "out" / "epoch-00000" / "microbatches.parquet")
        assert table["sample_ids"].to_pylist() == [[i] for i in range(70_000)]
    else:
        lists = json.loads((tmp_path / "out" / "epoch-00000.json").read_text())
        assert lists["microbatch_ids"] == [[i, [i]] for i in range(70_000)]
        assert lists["batch_sizes"] == [1] * 70_000


@pytest.mark.parametrize("to", ["deepspeed", "npz", "parquet"])
def test_a_plan_without_steps(tmp_path, to):
    plan = plan_in_memory(plans.facts([0]), [plans.epoch([])], dropped=plans.drops((0, 0, 0, "empty")))
    export_plan(plan, tmp_path / "out", to=to)
    if to == "deepspeed":
        lists = json.loads((tmp_path / "out" / "epoch-00000.json").read_text())
        assert lists == {"microbatch_ids": [], "batch_sizes": [], "batch_max_seqlens": []}
    if to == "npz":
        assert np.load(tmp_path / "out" / "epoch-00000.npz")["sample_ids"].shape == (0,)


@pytest.mark.parametrize("to", ["deepspeed", "npz", "parquet"])
def test_progress_is_told(tmp_path, to):
    plan, _ = plans.whole_plan()
    told = []
    export_plan(plan, tmp_path / "out", to=to, progress=told.append)
    assert told == sorted(told)
    assert 0 < told[0] < 1
    assert told[-1] == 1
    assert len(told) >= plan.num_epochs


def test_a_target_is_refused_before_the_plan_is_read(plan, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(plan, "epoch", lambda number: pytest.fail("the plan was read"))
    with pytest.raises(TargetExistsError, match="exists already"):
        export_plan(plan, tmp_path / "out", to="deepspeed")


def test_targets_and_formats(tmp_path):
    plan, _ = plans.whole_plan()
    with pytest.raises(ConfigError, match="--to csv is unknown; choose one of deepspeed, npz, parquet"):
        export_plan(plan, tmp_path / "out", to="csv")
    export_plan(plan, tmp_path / "out", to="npz")
    with pytest.raises(TargetExistsError, match="--overwrite"):
        export_plan(plan, tmp_path / "out", to="parquet")
    export_plan(plan, tmp_path / "out", to="parquet", overwrite=True)
    assert not list((tmp_path / "out").glob("*.npz"))
    plan.save(tmp_path / "plan")
    with pytest.raises(TargetExistsError, match=r"holds no export.json"):
        export_plan(plan, tmp_path / "plan", to="npz", overwrite=True)


@pytest.mark.parametrize("place", [{}, {"step": 1}, {"epoch": 1}, {"epoch": 1, "step": 1}])
def test_what_was_trained_is_listed(tmp_path, place):
    plan, seqlens = plans.whole_plan()
    assert export_plan(plan, tmp_path / "out", to="samples", **place) == ["samples.parquet"]
    found = pq.read_table(tmp_path / "out" / "samples.parquet").to_pylist()
    epochs = [place.get("epoch", 0)] if place else range(2)
    expected = [
        (epoch, row.step, None, sample, sample, 0, seqlens[sample], False)
        for epoch in epochs
        for row in rows_of(plan, epoch)
        if row.step < place.get("step", 2)
        for sample in row.sample_ids.tolist()
    ]
    assert [tuple(entry.values()) for entry in found] == expected
    assert list(found[0]) == [
        *("epoch", "step", "source", "row", "sample_id", "start", "num_tokens", "is_repeat"),
    ]


def test_pieces_and_repeats_that_were_trained_are_listed_and_fillers_are_not(tmp_path):
    export_plan(plans.cut_plan()[0], tmp_path / "cut", to="samples", step=1)
    found = pq.read_table(tmp_path / "cut" / "samples.parquet").to_pylist()
    assert [(row["sample_id"], row["start"], row["num_tokens"]) for row in found] == [
        (0, 0, 8),
        (1, 2, 2),
        (0, 16, 8),
    ]
    for kind, last in (("keep", [False]), ("fill", [False, True])):
        export_plan(plans.copying_plan(kind)[0], tmp_path / kind, to="samples")
        found = pq.read_table(tmp_path / kind / "samples.parquet").to_pylist()
        assert [row["is_repeat"] for row in found if row["sample_id"] == 2] == last


def test_a_place_is_of_what_was_trained(tmp_path):
    plan, _ = plans.whole_plan()
    with pytest.raises(ConfigError, match="--to npz is the whole plan; leave them out"):
        export_plan(plan, tmp_path / "out", to="npz", step=1)
    with pytest.raises(PlanError, match=r"epoch 0 of .* has 2 steps, and no step 3"):
        export_plan(plan, tmp_path / "out", to="samples", step=3)
    assert not list(tmp_path.iterdir())
