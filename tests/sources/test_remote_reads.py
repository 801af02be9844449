"""What is fetched of remote files: the bytes that rows need, at once, once, and again on failure."""

import gzip
import json
import pickle
import threading

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer import node_cache
from packer.errors import SourceError
from packer.samples import LengthDefinition, open_dataset
from packer.sources import open_source, remote
from packer.sources.remote import ATTEMPTS, WASTE, RemoteFile, fetch, is_passing, joined
from tests.sources.counted import CountedFileSystem, forget, num_fetched
from tests.sources.test_arrow import write
from tests.sources.test_indexed import write_pair

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(0, 30_000, n).tolist() for n in RNG.integers(50, 400, 4000)]
AT_RANDOM = RNG.permutation(len(ROWS))[:64].tolist()
ROW_BYTES = 8 * sum(len(ROWS[row]) for row in AT_RANDOM)
DEFINITION = LengthDefinition.by_tokens("ids")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    table = pa.table(
        {
            "text": ["beside"] * len(ROWS),
            "ids": pa.array(ROWS, pa.list_(pa.int64())),
            "more": pa.array(ROWS, pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, folder / "p.parquet", row_group_size=500, compression="none", use_dictionary=False)
    write(folder / "a.arrow", table, "file", rows_per_batch=500)
    write(folder / "b.arrows", table, "stream", rows_per_batch=500)
    lines = "".join(json.dumps({"ids": row}) + "\n" for row in ROWS)
    (folder / "j.jsonl").write_text(lines)
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
    write_pair(folder / "t", ROWS, 5, np.dtype(np.int64))
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "memory://counted", recursive=True)
    yield "counted://counted"
    memory.rm("/counted", recursive=True)


@pytest.fixture(autouse=True)
def counting(tmp_path, monkeypatch):
    monkeypatch.setenv(node_cache.FOLDER_VARIABLE, str(tmp_path / "node"))
    forget()
    yield
    forget()


def opened(url):
    definition = None if url.endswith(".idx") else DEFINITION
    return open_dataset(url, definition=definition)


def taken(dataset, ids=AT_RANDOM):
    return [sample["input_ids"].tolist() for sample in dataset.__getitems__(ids)]


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "calls"),
    [("a.arrow", 8, 2), ("b.arrows", 8, 2), ("j.jsonl", 7, 1), ("t.idx", 8, 1)],
)
def test_rows_at_random_fetch_little_more_than_themselves(files, name, bytes_per_token, calls):
    dataset = opened(f"{files}/{name}")
    taken(dataset, [0])
    forget()
    assert taken(dataset) == [ROWS[row] for row in AT_RANDOM]
    assert num_fetched() <= 1.1 * ROW_BYTES / 8 * bytes_per_token
    assert CountedFileSystem.calls == calls


def test_of_parquet_the_chunks_of_the_column_are_fetched_once_a_node(files):
    dataset = opened(f"{files}/p.parquet")
    forget()
    assert taken(dataset) == [ROWS[row] for row in AT_RANDOM]
    assert num_fetched() <= 1.05 * 8 * sum(map(len, ROWS))
    assert CountedFileSystem.calls == 1
    other = opened(f"{files}/p.parquet")
    forget()
    assert taken(other) == [ROWS[row] for row in AT_RANDOM]
    assert num_fetched() == 0


def test_another_content_under_the_same_url_is_fetched(files):
    """A cache that trusted the name would deliver the old rows."""
    memory = fsspec.filesystem("memory")
    memory.cp("/counted/p.parquet", "/counted/changing.parquet")
    assert taken(opened(f"{files}/changing.parquet"), [1]) == [ROWS[1]]
    table = pq.read_table(memory.open("/counted/p.parquet"))
    with memory.open("/counted/changing.parquet", "wb") as file:
        pq.write_table(table[::-1], file, row_group_size=500, compression="none", use_dictionary=False)
    assert taken(opened(f"{files}/changing.parquet"), [1]) == [ROWS[-2]]


def test_a_damaged_block_of_the_cache_is_fetched_anew(files, tmp_path):
    taken(opened(f"{files}/p.parquet"), [0])
    (block,) = [path for path in (tmp_path / "node").iterdir() if not path.name.startswith(".")]
    content = bytearray(block.read_bytes())
    content[1000] ^= 1
    block.write_bytes(content)
    forget()
    assert taken(opened(f"{files}/p.parquet"), [0]) == [ROWS[0]]
    assert num_fetched() > 1000


@pytest.mark.parametrize("name", ["j.jsonl", "z.jsonl.gz"])
def test_the_index_of_lines_is_made_once_a_node(files, name):
    dataset = opened(f"{files}/{name}")
    assert taken(dataset, [5]) == [ROWS[5]]
    forget()
    worker = pickle.loads(pickle.dumps(dataset))
    assert taken(worker) == [ROWS[row] for row in AT_RANDOM]
    assert num_fetched() <= 1.1 * ROW_BYTES


def test_without_a_cache_every_row_is_there_all_the_same(files, monkeypatch):
    monkeypatch.setenv(node_cache.LIMIT_VARIABLE, "0")
    for name in ("p.parquet", "j.jsonl", "z.jsonl.gz"):
        assert taken(opened(f"{files}/{name}"), [7, 3]) == [ROWS[7], ROWS[3]]


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1, 2], None, [], [3]] * 9, pa.large_list(pa.uint16())),
        pa.array([[[1], []], [], None, [[2, 3], None]] * 9, pa.list_(pa.list_(pa.int32()))),
        pa.array(["a", None, "", "ü" * 40] * 9),
        pa.array([[{"role": "a", "content": "b"}], [], None, [{"role": None, "content": ""}, None]] * 9),
        pa.array([1.5, None, 2.5] * 12, pa.float32()),
        pa.array([[]] * 36, pa.list_(pa.list_(pa.string()))),
        pa.array([True, None, False] * 12),  # not sliced: bits
        pa.array(["a", "b", None] * 12).dictionary_encode(),
        pa.array([b"12", b"34"] * 18, pa.binary(2)),
    ],
    ids=lambda array: str(array.type)[:30],
)
def test_sliced_rows_equal_those_of_the_whole_batch(tmp_path, array, kind):
    table = pa.table({"views": pa.array([1] * 36), "wanted": array, "behind": array})
    write(tmp_path / "x.arrow", table, kind, rows_per_batch=10)
    fsspec.filesystem("memory").put(str(tmp_path / "x.arrow"), "memory://counted/x.arrow")
    try:
        source, local = open_source("counted://counted/x.arrow"), open_source(tmp_path / "x.arrow")
        ids = [35, 0, 11, 9, 10, 1, 2, 3, 4, 29]
        for batch, same in zip(
            source.rows(ids, {"wanted": None}), local.rows(ids, {"wanted": None}), strict=True
        ):
            batch.validate(full=True)
            assert batch.equals(same)
    finally:
        fsspec.filesystem("memory").rm("/counted/x.arrow")


ranges = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)).map(lambda r: (r[0], r[0] + r[1])))


@given(ranges)
def test_joined_ranges_hold_all_and_waste_little(wanted):
    blocks = joined(wanted)
    asked = {byte for start, stop in wanted for byte in range(start, stop)}
    held = [byte for start, stop in blocks for byte in range(start, stop)]
    assert len(held) == len(set(held))
    assert asked <= set(held)
    assert all(blocks[i][1] < blocks[i + 1][0] for i in range(len(blocks) - 1))
    for start, stop in blocks:
        assert len(asked & set(range(start, stop))) * WASTE >= (stop - start) * (WASTE - 1)


@given(ranges)
def test_fetched_ranges_are_the_bytes(wanted):
    stored = bytes(i % 251 for i in range(600))
    fsspec.filesystem("memory").pipe("memory://counted/plain", stored)
    assert fetch("counted://counted/plain", wanted) == [stored[start:stop] for start, stop in wanted]


class StatusError(Exception):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


PASSING = [
    ConnectionResetError("cut"),
    StatusError(503),
    StatusError(429),
    TimeoutError("slow"),
    lambda piece: piece[:-1],
]


@pytest.mark.parametrize("failure", PASSING, ids=["reset", "503", "429", "slow", "short"])
def test_a_request_that_fails_is_made_again(files, failure):
    dataset = opened(f"{files}/j.jsonl")
    CountedFileSystem.failures += [failure] * (ATTEMPTS - 1)
    assert taken(dataset, [3]) == [ROWS[3]]
    CountedFileSystem.failures += [failure] * ATTEMPTS
    with pytest.raises(SourceError, match=r"j\.jsonl.*cannot be reached \(.*check the network"):
        taken(dataset, [3])


@pytest.mark.parametrize("failure", [PermissionError("no"), StatusError(403), ValueError("odd")])
def test_a_request_that_will_never_succeed_is_made_once(files, failure):
    dataset = opened(f"{files}/j.jsonl")
    forget()
    CountedFileSystem.failures += [failure] * ATTEMPTS
    with pytest.raises(SourceError, match=r"j\.jsonl"):
        taken(dataset, [3])
    assert len(CountedFileSystem.requests) == 1


def test_waiting_grows(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_DELAY_SECONDS", 0.2)
    waited = []
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    with pytest.raises(ConnectionError):
        remote.attempted(lambda: (_ for _ in ()).throw(ConnectionError("x")))
    assert len(waited) == ATTEMPTS - 1
    assert all(0.1 * 2**n <= seconds <= 0.2 * 2**n for n, seconds in enumerate(waited))


def test_a_server_without_ranges_is_refused(files):
    dataset = opened(f"{files}/j.jsonl")
    CountedFileSystem.failures.append(lambda piece: piece + b"all the rest")
    with pytest.raises(SourceError, match="sends the whole file where a part is asked for; name a copy"):
        taken(dataset, [3])


def test_what_a_server_that_is_down_says_of_a_file_is_not_believed():
    """The HTTP client says "no such file" for every status that is an error."""
    wrong = FileNotFoundError("x")
    wrong.__cause__ = StatusError(503)
    assert is_passing(wrong)
    wrong.__cause__ = StatusError(404)
    assert not is_passing(wrong)
    assert not is_passing(FileNotFoundError("x"))


def test_a_remote_file_reads_like_any_other(files):
    stored = fsspec.filesystem("memory").cat_file("/counted/j.jsonl")
    file = RemoteFile(f"{files}/j.jsonl", len(stored))
    assert file.read(10) == stored[:10]
    assert file.seek(-7, 2) == len(stored) - 7
    assert file.read(100) == stored[-7:]
    assert file.read() == b""
    file.hold([(100, 300), (len(stored) - 10, len(stored) + 10)])
    forget()
    file.seek(120)
    assert file.read(80) == stored[120:200]
    file.seek(-3, 2)
    assert file.readall() == stored[-3:]
    assert num_fetched() == 0
    file.drop()
    file.seek(0)
    assert file.read() == stored


def test_rows_of_several_files_are_asked_for_together(files):
    """One file after the other would take as many round trips as there are files."""
    memory = fsspec.filesystem("memory")
    for number in range(4):
        memory.cp("/counted/j.jsonl", f"/counted/many/{number}.jsonl")
    dataset = opened(f"{files}/many")
    waiting = threading.Barrier(4, timeout=10)  # passed only if four requests are under way at once
    CountedFileSystem.failures += [lambda piece: (waiting.wait(), piece)[1]] * 4
    ids = [0, len(ROWS) + 5, 3 * len(ROWS) + 1, 2 * len(ROWS)]
    assert taken(dataset, ids) == [ROWS[0], ROWS[5], ROWS[1], ROWS[0]]


def test_a_mapped_arrow_file_takes_no_cache_and_is_validated_once(tmp_path, monkeypatch):
    """Its pages are the system's to keep, and a full look at a batch takes long."""
    table = pa.table({"ids": pa.array(ROWS, pa.list_(pa.int64()))})
    write(tmp_path / "x.arrow", table, "file", rows_per_batch=100)
    validated = []
    from packer.sources.arrow import ArrowPart

    original = ArrowPart._checked
    monkeypatch.setattr(
        ArrowPart,
        "_checked",
        lambda self, batch, columns, *, at_random: (
            validated.append(at_random) or original(self, batch, columns, at_random=at_random)
        ),
    )
    whole = open_dataset(tmp_path / "x.arrow", definition=DEFINITION, cache_bytes=1 << 20)
    every = list(range(0, len(ROWS), 100))
    assert taken(whole, every) == [ROWS[row] for row in every]
    assert taken(whole, every) == [ROWS[row] for row in every]
    assert validated == [True] * 40  # 7 MB of values: all are held in 1 MB
    validated.clear()
    small = open_dataset(tmp_path / "x.arrow", definition=DEFINITION, cache_bytes=0)
    taken(small, every)
    taken(small, every)
    assert validated == [True] * 40 + [False] * 40
