"""A plan behind a URL: copied once a node, checked, and mapped from there."""

import pickle
import shutil
import threading

import fsspec
import pytest

from packer import node_cache
from packer.errors import PlanError
from packer.plan import load_plan, plan_in_memory
from tests.plans import drops, many_rows
from tests.sources.counted import CountedFileSystem, forget, num_fetched

URL = "counted://plans/plan"


def saved(folder, num_rows):
    return plan_in_memory(*many_rows(num_rows), dropped=drops()).save(folder)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv(node_cache.FOLDER_VARIABLE, str(tmp_path / "node"))
    local = saved(tmp_path / "plan", 50)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "plan"), "memory://plans/plan", recursive=True)
    forget()
    yield local
    memory.rm("/plans", recursive=True)
    forget()


def rows(plan):
    return [plan.epoch(0).microbatch(row).sample_ids.tolist() for row in range(50)]


def test_the_plan_is_the_same_and_copied_once(plan):
    opened = load_plan(URL)
    assert opened.fingerprint == plan.fingerprint
    assert rows(opened) == rows(plan)
    forget()
    assert rows(load_plan(URL)) == rows(plan)
    assert num_fetched() == (plan.path / "plan.json").stat().st_size


def test_processes_that_start_together_copy_once(plan):
    threads = [threading.Thread(target=load_plan, args=(URL,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetched = sum(file.stat().st_size for file in plan.path.rglob("*.arrow"))
    assert num_fetched() == fetched + 4 * (plan.path / "plan.json").stat().st_size


def test_a_worker_maps_the_copy_and_another_node_makes_its_own(plan, tmp_path):
    sent = pickle.dumps(load_plan(URL))
    forget()
    assert rows(pickle.loads(sent)) == rows(plan)
    assert num_fetched() == 0
    shutil.rmtree(tmp_path / "node")
    assert rows(pickle.loads(sent)) == rows(plan)


def test_a_broken_off_copy_is_begun_anew(plan, tmp_path):
    CountedFileSystem.failures += [lambda piece: piece, PermissionError("expired")]
    with pytest.raises(PlanError, match=r"counted://plans/plan/\S+: permission denied"):
        load_plan(URL)
    assert not list((tmp_path / "node").glob("*.plan"))
    assert rows(load_plan(URL)) == rows(plan)


def test_another_file_than_the_header_names_is_refused(plan, tmp_path):
    memory = fsspec.filesystem("memory")
    name = "/plans/plan/epoch-00000/steps.arrow"
    memory.pipe(name, memory.cat_file(name)[:-8] + b"12345678")
    with pytest.raises(
        PlanError, match=r"steps\.arrow is not the file that plan\.json names; upload the whole"
    ):
        load_plan(URL)
    assert not list((tmp_path / "node").glob("*.plan"))


def test_another_plan_under_the_url_is_another_copy(plan, tmp_path):
    assert rows(load_plan(URL)) == rows(plan)
    other = saved(tmp_path / "other", 60)
    memory = fsspec.filesystem("memory")
    memory.rm("/plans/plan", recursive=True)
    memory.put(str(tmp_path / "other"), "memory://plans/plan", recursive=True)
    assert load_plan(URL).fingerprint == other.fingerprint


def test_no_plan_there():
    with pytest.raises(PlanError, match=r"counted://plans/none holds no plan\.json, so it is no plan"):
        load_plan("counted://plans/none")


def test_no_room_names_the_cure(plan, monkeypatch):
    monkeypatch.setenv(node_cache.LIMIT_VARIABLE, "0")
    with pytest.raises(
        PlanError, match=r"cannot be copied to this node, which takes [\d,]+ bytes; set PACKER_CACHE"
    ):
        load_plan(URL)
