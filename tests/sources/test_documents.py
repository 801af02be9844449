"""``.bin/.idx`` by document: every shape of a document index, on disk and remote, against joined lists."""

import pickle
from itertools import chain, pairwise

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packer
from packer.analyzer.remeasure import verify_source
from packer.errors import ConfigError, SourceError
from packer.sources import by_document, open_source
from tests.sources.test_indexed import write_pair

U16 = np.dtype(np.uint16)


def joined(sequences, edges):
    return [list(chain.from_iterable(sequences[a:b])) for a, b in pairwise(edges)]


def read_all(source, target_bytes=1):
    columns = {"input_ids": None}
    units = source.units(list(columns), target_bytes=target_bytes)
    return [
        row
        for unit in units
        for batch in source.read(unit, columns)
        for row in batch["input_ids"].to_pylist()
    ]


SEQUENCES = [[1, 2], [], [3], [4, 5, 6], [], [7]]
EDGES = [0, 0, 2, 4, 4, 6, 6]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8),
    st.lists(st.integers(0, 8), max_size=6),
    st.permutations(range(8)),
    st.booleans(),
)
def test_documents_are_their_sequences_end_to_end(tmp_path_factory, sequences, cuts, order, moved):
    edges = [0, *sorted(min(cut, len(sequences)) for cut in cuts), len(sequences)]
    folder = tmp_path_factory.mktemp("pair")
    pointers = None
    stored = sequences
    if moved:  # the sequences of a document lie apart
        order = [at for at in order if at < len(sequences)]
        stored = [sequences[at] for at in order]
        sizes = np.array([0, *(2 * len(row) for row in stored)])
        pointers = np.zeros(len(sequences), np.int64)
        pointers[order] = np.cumsum(sizes)[:-1]
    index = write_pair(folder / "t", sequences, 8, U16, documents=edges, pointers=pointers)
    index.with_suffix(".bin").write_bytes(b"".join(np.array(row, U16).tobytes() for row in stored))
    if not sequences:
        return
    source = pickle.loads(pickle.dumps(by_document(open_source(index))))
    expected = joined(sequences, edges)
    assert source.num_rows == len(expected)
    for target_bytes in (1, 24, 1 << 20):
        assert read_all(source, target_bytes) == expected
    rows = list(reversed(range(len(expected))))
    taken = [batch["input_ids"].to_pylist()[0] for batch in source.rows(rows, {"input_ids": None})]
    assert taken == expected[::-1]


@pytest.mark.parametrize("place", ["local", "remote"])
def test_from_analysis_to_training(tmp_path, place):
    path = str(write_pair(tmp_path / "t", SEQUENCES, 8, U16, documents=EDGES).with_suffix(""))
    if place == "remote":
        memory = fsspec.filesystem("memory")
        for suffix in (".bin", ".idx"):
            memory.put(path + suffix, f"/documents/t{suffix}")
        path = "memory://documents/t.idx"
    packer.analyze(path, out=tmp_path / "m", documents=True)
    metrics = packer.open_metrics(tmp_path / "m")
    expected = joined(SEQUENCES, EDGES)
    assert metrics.metric("seqlen").tolist() == [len(row) for row in expected]
    assert metrics.definition["documents"] is True
    for dataset in (packer.open_dataset(path, metrics=metrics), packer.open_dataset(path, documents=True)):
        assert [sample["input_ids"].tolist() for sample in dataset] == expected
        assert dataset.read_slice(2, 1, 3)["input_ids"].tolist() == expected[2][1:3]
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=8))
    assert verify_source(plan, path) == len(expected)
    with pytest.raises(IndexError):
        dataset[9]


@pytest.mark.parametrize(
    ("edges", "found"),
    [([0], "goes from 0 to 0"), ([0, 4], "goes from 0 to 4"), ([1, 6], "goes from 1 to 6"), ([], "is empty"),
     ([0, 5, 3, 6], "goes from 0 to 6"), ([0, 9, 6], "goes from 0 to 6")],
)  # fmt: skip
def test_an_index_that_does_not_tell_the_documents_is_refused(tmp_path, edges, found):
    path = write_pair(tmp_path / "t", SEQUENCES, 8, U16, documents=edges)
    with pytest.raises(
        SourceError, match=rf"t\.idx: its document index {found}, and there are 6 seq.*--docu"
    ):
        packer.analyze(path, out=tmp_path / "m", documents=True)
    packer.analyze(path, out=tmp_path / "m")


def test_documents_of_another_format_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"ids": [1]}\n')
    with pytest.raises(ConfigError, match=r"--documents are those of \.bin/\.idx"):
        packer.analyze(tmp_path / "x.jsonl", out=tmp_path / "m", tokens_column="ids", documents=True)
    path = write_pair(tmp_path / "t", SEQUENCES, 8, U16, documents=EDGES)
    packer.analyze(path, out=tmp_path / "m")
    with pytest.raises(ConfigError, match="was taken of sequences, not of documents"):
        packer.open_dataset(path, metrics=tmp_path / "m", documents=True)
    with pytest.raises(ConfigError, match=r"x\.jsonl is no \.bin/\.idx pair, which alone has documents"):
        by_document(open_source(tmp_path / "x.jsonl"))
