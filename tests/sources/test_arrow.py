"""Arrow IPC of both formats: found batches equal pyarrow's, damage is an error that names the batch."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from packer.errors import SourceError
from packer.samples import LengthDefinition, check_definition, measure_unit, open_dataset
from packer.sources import open_source

COLUMNS = {"ids": None}
FORMATS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


def write(path, table, kind, *, rows_per_batch=7, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, FORMATS[kind](file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def table_of(num_rows):
    ids = [None if n % 5 == 4 else list(range(n % 11)) for n in range(num_rows)]
    return pa.table({"other": ["x" * 50] * num_rows, "ids": ids})


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_units_and_rows_equal_the_table(tmp_path, kind, compression):
    table = table_of(100)
    source = open_source(write(tmp_path / "a.arrow", table, kind, compression=compression))
    units = source.units(["ids"], target_bytes=1)
    assert (len(units), source.num_rows) == (15, 100)
    read = [row for unit in units for batch in source.read(unit, COLUMNS) for row in batch["ids"].to_pylist()]
    assert read == table["ids"].to_pylist()
    ids = np.random.default_rng(0).permutation(100)
    copied = pickle.loads(pickle.dumps(source))
    assert [batch["ids"][0].as_py() for batch in copied.rows(ids, COLUMNS)] == table["ids"].take(
        ids
    ).to_pylist()


@pytest.mark.parametrize("kind", FORMATS)
def test_dictionaries(tmp_path, kind):
    texts = pa.chunked_array(
        [pa.array(["a", "bb", "a"]).dictionary_encode(), pa.array(["ccc", None]).dictionary_encode()]
    )
    source = open_source(write(tmp_path / "a.arrow", pa.table({"text": texts}).unify_dictionaries(), kind))
    columns = {"text": None}
    read = [
        t
        for unit in source.units()
        for batch in source.read(unit, columns)
        for t in batch["text"].to_pylist()
    ]
    assert read == ["a", "bb", "a", "ccc", None]
    assert [batch["text"][0].as_py() for batch in source.rows([3, 0], columns)] == ["ccc", "a"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_at_any_byte_is_an_error_or_whole(tmp_path, kind):
    table = table_of(60)
    path = write(tmp_path / "a.arrow", table, kind)
    content = path.read_bytes()
    for size in range(0, len(content), 13):
        path.write_bytes(content[:size])
        try:
            source = open_source(path)
            rows = [
                row for unit in source.units() for batch in source.read(unit, COLUMNS) for row in batch["ids"]
            ]
        except SourceError:
            pass
        else:  # a stream may end between two batches
            assert kind == "stream"
            assert [row.as_py() for row in rows] == table["ids"].to_pylist()[: len(rows)]
            assert len(rows) % 7 == 0 or len(rows) == 60


@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_bytes_are_an_error_or_lengths_that_ids_have(tmp_path, kind):
    path = write(tmp_path / "a.arrow", table_of(60), kind)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    definition = LengthDefinition.by_tokens("ids")
    outcomes = []
    for _ in range(150):
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            source = open_source(path)
            check_definition(source, definition)
            measured = [m for unit in source.units() for m in measure_unit(source, unit, definition)]
            lengths = [length for m in measured for length in m.lengths["seqlen"].tolist()]
            dataset = open_dataset(path, definition=definition)
            assert [len(sample["input_ids"]) for sample in dataset] == lengths
            outcomes.append("lengths")
        except SourceError:
            outcomes.append("error")
    assert set(outcomes) == {"lengths", "error"}


@pytest.mark.parametrize("kind", FORMATS)
def test_eight_bytes_of_zeros_are_an_error_or_what_a_full_check_lets_pass(tmp_path, kind):
    path = write(tmp_path / "a.arrow", table_of(30), kind)
    content = path.read_bytes()
    definition = LengthDefinition.by_tokens("ids")
    outcomes = []
    for at in range(0, len(content), 8):
        path.write_bytes(content[:at] + bytes(8) + content[at + 8 :])
        try:
            source = open_source(path)
            check_definition(source, definition)
            parts = [m for unit in source.units() for m in measure_unit(source, unit, definition)]
        except SourceError:
            outcomes.append("error")
            continue
        opened = pa.ipc.open_file if kind == "file" else pa.ipc.open_stream
        table = opened(pa.py_buffer(path.read_bytes())).read_all().select(["ids"])
        table.validate(full=True)
        assert [n for m in parts for n in m.lengths["seqlen"].tolist()] == [
            len(ids or []) for ids in table["ids"].to_pylist()
        ]
        assert table.num_rows == 30  # no end in the middle
        outcomes.append("lengths")
    assert set(outcomes) == {"lengths", "error"}


def test_an_indices_mapping_is_refused(tmp_path):
    table = pa.table({"indices": pa.array([2, 0, 1], pa.uint64())})
    with pytest.raises(SourceError, match="indices mapping"):
        open_source(write(tmp_path / "cache-1.arrow", table, "stream"))
