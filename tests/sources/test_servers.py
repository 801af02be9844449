"""Data sets and plans on S3 (moto), Azure (azurite) and plain HTTP: through the clients that people use."""

import gzip
import json

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer import node_cache
from packer.errors import SourceError
from packer.plan import load_plan
from packer.samples import LengthDefinition, open_dataset
from packer.sources import open_source
from tests.sources import servers
from tests.sources.test_arrow import write
from tests.sources.test_indexed import write_pair

pytestmark = [
    pytest.mark.frameworks,
    # of the clients: botocore still asks for the time as it was done before 3.12
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RNG = np.random.default_rng(1)
ROWS = [RNG.integers(0, 30_000, n).tolist() for n in RNG.integers(50, 400, 1000)]
AT_RANDOM = RNG.permutation(len(ROWS))[:48].tolist()
DEFINITION = LengthDefinition.by_tokens("ids")
NAMES = ["p.parquet", "a.arrow", "b.arrows", "j.jsonl", "z.jsonl.gz", "t.idx"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    table = pa.table({"ids": pa.array(ROWS, pa.list_(pa.int32()))})
    pq.write_table(table, folder / "p.parquet", row_group_size=100)
    write(folder / "a.arrow", table, "file", rows_per_batch=100)
    write(folder / "b.arrows", table, "stream", rows_per_batch=100)
    lines = "".join(json.dumps({"ids": row}) + "\n" for row in ROWS)
    (folder / "j.jsonl").write_text(lines)
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
    write_pair(folder / "t", ROWS, 4, np.dtype(np.int32))
    plan = packer.make_plan([len(row) for row in ROWS], packer.PlanConfig(max_tokens=8192, max_seqlen=400))
    plan.save(folder / "plan")
    return folder


@pytest.fixture(scope="module", params=["http", "s3", "azure"])
def store(request, folder, tmp_path_factory):
    if request.param == "http":
        opened = servers.http_store(folder)
    elif request.param == "s3":
        opened = servers.s3_store(folder)
    elif servers.has_azurite():
        opened = servers.azure_store(folder, tmp_path_factory.mktemp("azurite"))
    else:
        pytest.skip("azurite is not installed: npm was not there")
    with opened as served:
        yield served


@pytest.fixture(autouse=True)
def afresh(store, tmp_path, monkeypatch):
    """Each test counts for itself, with clients of its own."""
    monkeypatch.setenv(node_cache.FOLDER_VARIABLE, str(tmp_path / "node"))
    for protocol in ("http", "s3", "abfs"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
    _, proxy = store
    proxy.faults.clear()
    proxy.latency = 0.0
    proxy.forget()


def opened(url):
    return open_dataset(url, definition=None if url.endswith(".idx") else DEFINITION)


def taken(dataset, ids=AT_RANDOM):
    return [sample["input_ids"].tolist() for sample in dataset.__getitems__(ids)]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_on_a_server_equals_the_local_one(folder, store, name):
    url, _ = store
    source = open_source(f"{url}/{name}")
    assert source.identity() == open_source(folder / name).identity()
    assert taken(opened(f"{url}/{name}")) == [ROWS[row] for row in AT_RANDOM]


@pytest.mark.parametrize("name", ["p.parquet", "a.arrow", "j.jsonl", "z.jsonl.gz"])
@pytest.mark.parametrize("fault", ["503", "cut", "reset", "slow"])
def test_rows_are_the_same_when_requests_fail(store, name, fault):
    url, proxy = store
    if url.startswith("abfs") and fault == "503" and name != "j.jsonl":
        pytest.skip("Azure's client waits for 15 s before it asks again; once is enough")
    dataset = opened(f"{url}/{name}")
    proxy.faults += [fault] * 2
    assert taken(dataset) == [ROWS[row] for row in AT_RANDOM]
    if name != "z.jsonl.gz":  # which lies on this machine by now
        assert len(proxy.faults) == (1 if (name, fault) == ("p.parquet", "slow") else 0)  # one request in all


def test_opening_survives_failures(store):
    url, proxy = store
    proxy.faults += ["503", "reset"]
    assert len(opened(f"{url}/a.arrow")) == len(ROWS)
    assert proxy.faults == []


@pytest.mark.parametrize("name", ["a.arrow", "j.jsonl", "t.idx"])
def test_a_microbatch_is_asked_for_at_once_and_nothing_beside_it(store, name):
    url, proxy = store
    dataset = opened(f"{url}/{name}")
    taken(dataset, [0])
    proxy.forget()
    proxy.latency = 0.02
    assert taken(dataset) == [ROWS[row] for row in AT_RANDOM]
    tokens = sum(len(ROWS[row]) for row in AT_RANDOM)
    stored = sum(len(json.dumps({"ids": ROWS[row]})) for row in AT_RANDOM)
    assert proxy.num_bytes <= 1.1 * (stored if name == "j.jsonl" else 4 * tokens)
    assert proxy.most_in_flight >= 8


def test_connections_are_used_again(store):
    url, proxy = store
    dataset = opened(f"{url}/j.jsonl")
    taken(dataset)
    proxy.forget()
    for _ in range(5):
        taken(dataset)
    assert proxy.num_connections <= len(AT_RANDOM)
    for row in range(50):
        taken(dataset, [row])
    assert proxy.num_connections <= len(AT_RANDOM) + 1


def test_workers_read_after_their_parent_has(store):
    """A forked worker that took its parent's event loop over would wait for ever."""
    url, _ = store
    plan, dataset = load_plan(f"{url}/plan"), opened(f"{url}/j.jsonl")
    assert taken(dataset, [3]) == [ROWS[3]]
    loader = packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=1, num_workers=2)
    found = {}
    for step in loader:
        for batch in step:
            for sample_id, seqlen, ids in zip(
                batch.sample_ids, batch.seqlens, batch["input_ids"], strict=True
            ):
                found[int(sample_id)] = ids[:seqlen].tolist()
    assert found == {row: ROWS[row] for row in found}
    assert len(found) > 0.9 * len(ROWS)


def test_the_plan_is_copied_once_through_failures(folder, store):
    url, proxy = store
    proxy.faults += ["reset", "cut"]
    plan = load_plan(f"{url}/plan")
    assert plan.fingerprint == load_plan(folder / "plan").fingerprint
    proxy.forget()
    load_plan(f"{url}/plan")
    assert proxy.num_bytes <= (folder / "plan" / "plan.json").stat().st_size


def test_nothing_there(store):
    url, _ = store
    with pytest.raises(SourceError, match=r"none\.parquet: no such file"):
        open_source(f"{url}/none.parquet")
