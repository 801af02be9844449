"""Opening refuses what is no plan, or not this plan, by name."""

import json
import pickle
import shutil
import sys
from dataclasses import replace

import pytest

from packer.errors import PlanError, TargetExistsError
from packer.plan import Plan, load_plan, schema, write_plan
from packer.plan.storage import PlanTable
from tests import plans

FILES = ["epoch-00000/microbatches.arrow", "epoch-00001/steps.arrow", "dropped.arrow"]


@pytest.fixture
def folder(tmp_path):
    plan, _ = plans.whole_plan()
    plan.save(tmp_path / "plan")
    return tmp_path / "plan"


def test_what_is_no_plan_is_refused(tmp_path):
    with pytest.raises(PlanError, match="nowhere does not exist; make one with `packer plan"):
        load_plan(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match=r"empty holds no plan.json"):
        load_plan(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(PlanError, match="file is a file"):
        load_plan(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", 'does not say format "packer-plan"'),
        ('{"format": "packer-metrics"}', 'does not say format "packer-plan"'),
        ('{"format": "packer-plan"}', "has format version None, this packer reads versions 1 and 2"),
        (
            '{"format": "packer-plan", "version": 3}',
            "has format version 3, this packer reads versions 1 and 2",
        ),
        ('{"format": "packer-plan", "version": true}', "has format version True"),
        ('{"format": "packer-plan", "version": 2}', "was changed after it was written"),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, text, message):
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=message):
        load_plan(tmp_path)


def test_an_edited_header_is_refused(folder):
    path = folder / "plan.json"
    path.write_text(path.read_text().replace('"dp_size": 2', '"dp_size": 1'))
    with pytest.raises(PlanError, match="was changed after it was written"):
        load_plan(folder)


def test_a_header_that_is_only_spelled_otherwise_is_read(folder):
    path = folder / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True, separators=(",", ":")))
    assert load_plan(folder).num_epochs == 2


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_a_folder_whose_name_is_not_utf_8_is_read(tmp_path):
    plan, _ = plans.whole_plan()
    assert plan.save(tmp_path / "plan-\udcff").fingerprint == load_plan(tmp_path / "plan-\udcff").fingerprint


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(PlanError, match=f"{name} is missing"):
        load_plan(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_file_is_named(folder, name, keep):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:keep])
    with pytest.raises(PlanError, match=f"{name} has .* bytes, plan.json says {len(data)}"):
        load_plan(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_file_of_the_same_size_is_named(folder, name):
    (folder / name).write_bytes(b"x" * (folder / name).stat().st_size)
    with pytest.raises(PlanError, match=f"{name} is no Arrow file"):
        load_plan(folder)


def test_a_table_of_another_kind_is_named(folder):
    steps, rows = (folder / name for name in (schema.steps_file(0), schema.microbatches_file(0)))
    header = json.loads((folder / "plan.json").read_text())
    shutil.copy(steps, rows)
    header["files"][schema.microbatches_file(0)]["size"] = rows.stat().st_size
    (folder / "plan.json").write_text(json.dumps(header))
    plans.forge(folder, "plan.json", lambda header: None)
    with pytest.raises(PlanError, match=r"microbatches.arrow does not have the columns"):
        load_plan(folder)


@pytest.mark.parametrize("name", ["../elsewhere.arrow", "/etc/passwd", "epoch-00002/steps.arrow"])
def test_no_path_in_the_header_leaves_the_folder(folder, name):
    def edit(header):
        header["files"][name] = header["files"].pop(schema.steps_file(0))

    plans.forge(folder, "plan.json", edit)
    with pytest.raises(PlanError, match="files does not list those of 2 epochs"):
        load_plan(folder)


def test_values_exchanged_between_epochs_are_noticed(folder):
    # The same size and shape, so only the values tell: a plan swapped under a running loader.
    first, second = (folder / schema.steps_file(epoch) for epoch in (0, 1))
    assert first.stat().st_size == second.stat().st_size
    shutil.copy(second, first)
    with pytest.raises(PlanError, match="values are not those that were written"):
        load_plan(folder).epoch(0).step(0)


def test_a_large_record_batch_is_checked_once_a_second_row_is_asked_for(folder, monkeypatch):
    monkeypatch.setattr(PlanTable, "CHECKED_AT_ONCE", 0)  # every record batch is a large one
    first, second = (folder / schema.steps_file(epoch) for epoch in (0, 1))
    shutil.copy(second, first)
    epoch = load_plan(folder).epoch(0)
    epoch.step(0)
    for _ in range(2):
        with pytest.raises(PlanError, match="values are not those that were written"):
            epoch.step(1)
    with pytest.raises(PlanError, match="values are not those that were written"):
        list(epoch.steps())


def test_a_plan_of_the_same_shape_that_takes_the_place_of_one_in_use_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(PlanTable, "CHECKED_AT_ONCE", 0)  # every record batch is a large one
    monkeypatch.setattr(Plan, "OPEN_TABLES", 1)
    facts, epochs = plans.many_rows(50, 2)
    other = [replace(epoch, sample_ids=epoch.sample_ids[::-1].copy()) for epoch in epochs]
    before = write_plan(tmp_path / "plan", facts, epochs, dropped=plans.drops())
    first = before.epoch(0)
    write_plan(tmp_path / "plan", facts, other, dropped=plans.drops(), overwrite=True)
    assert first.microbatch(1).sample_ids.tolist() == [2, 3]
    with pytest.raises(PlanError, match="replaced by another plan while it was in use"):
        before.epoch(1)
    write_plan(tmp_path / "plan", facts, epochs, dropped=plans.drops(), overwrite=True)
    assert before.epoch(1).microbatch(1).sample_ids.tolist() == [2, 3]  # it came back


def test_a_plan_replaced_between_processes_is_noticed(folder):
    data = pickle.dumps(load_plan(folder))
    plan, _ = plans.copying_plan("keep")
    plan.save(folder, overwrite=True)
    with pytest.raises(PlanError, match="replaced by another plan"):
        pickle.loads(data)


def test_a_running_reader_keeps_its_plan_or_stops(folder, monkeypatch):
    monkeypatch.setattr(
        Plan, "OPEN_TABLES", 1
    )  # as in a plan of many epochs: the next one is opened when played
    before = load_plan(folder)
    first = before.epoch(0)
    ids = first.microbatch(0).sample_ids.tolist()
    other, _ = plans.copying_plan("keep")
    other.save(folder, overwrite=True)
    assert first.microbatch(0).sample_ids.tolist() == ids
    for epoch in (0, 1):
        with pytest.raises(PlanError, match=r"replaced by another plan|is missing"):
            before.epoch(epoch)


def test_plans_and_epochs_in_a_line(folder):
    plan = load_plan(folder)
    assert repr(plan) == f"Plan({folder}, padded, 2 epochs, {plan.fingerprint[:12]})"
    assert repr(plan.epoch(0)) == "Epoch(2 steps, 4 micro-batches)"


def test_epochs_that_are_not_planned(folder):
    plan = load_plan(folder)
    for epoch in (-1, 2):
        with pytest.raises(PlanError, match=f"epoch {epoch} is not planned: the plan has 2"):
            plan.epoch(epoch)


def test_an_existing_target_is_kept(folder):
    plan, _ = plans.copying_plan("keep")
    with pytest.raises(TargetExistsError, match="--overwrite"):
        plan.save(folder)
    assert load_plan(folder).num_epochs == 2


def test_a_metrics_directory_is_called_one(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(PlanError, match="is a metrics directory, not a plan"):
        load_plan(tmp_path)


def test_a_relative_path_stays_what_it_meant_when_it_was_opened(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = load_plan("plan")
    expected = load_plan(folder).epoch(0).microbatch(0).sample_ids.tolist()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for plan in (opened, pickle.loads(pickle.dumps(opened))):
        assert plan.epoch(0).microbatch(0).sample_ids.tolist() == expected
