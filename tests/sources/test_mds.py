"""MDS folders, read without streaming: columns of every encoding that holds tokens, texts or numbers."""

import json
import pickle

import numpy as np
import pytest

from packer.errors import ColumnError, SourceError
from packer.sources import open_source

ROWS = [
    {"ids": np.array([1, 2, 3], np.int32), "any": np.array([7], np.uint16), "text": "é", "n": 5},
    {"ids": np.array([4], np.int32), "any": np.arange(300, dtype=np.int64), "text": "", "n": -1},
]


def encode_array(array, *, with_dtype):
    codes = {"uint16": 16, "int64": 65}
    dtype = bytes([codes[array.dtype.name]]) if with_dtype else b""
    length = np.uint16(len(array)).tobytes() if len(array) > 255 else np.uint8(len(array)).tobytes()
    return dtype + bytes([1 << 2 | len(length) - 1]) + length + array.tobytes()


def encode_row(row):
    varying = [
        encode_array(row["ids"], with_dtype=False),
        encode_array(row["any"], with_dtype=True),
        row["text"].encode(),
        pickle.dumps("never opened"),
    ]
    return b"".join(np.uint32(len(part)).tobytes() for part in varying) + b"".join(
        [varying[0], varying[1], varying[2], np.int64(row["n"]).tobytes(), varying[3]]
    )


def write_folder(folder, *, rows=ROWS, **changes):
    folder.mkdir(exist_ok=True)
    shards = []
    for number in range(2):
        samples = [encode_row(row) for row in rows]
        bounds = 4 * (len(samples) + 2) + 10 + np.cumsum([0] + [len(sample) for sample in samples])
        content = np.uint32(len(samples)).tobytes() + bounds.astype("<u4").tobytes() + b"{" + b" " * 8 + b"}"
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(content + b"".join(samples))
        shards.append(
            {
                "column_names": ["ids", "any", "text", "n", "object"],
                "column_encodings": ["ndarray:int32", "ndarray", "str", "int", "pkl"],
                "column_sizes": [None, None, None, 8, None],
                "format": "mds",
                "version": 2,
                "samples": len(samples),
                "raw_data": {"basename": name},
                "zip_data": None,
            }
            | changes
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def test_rows_and_units(tmp_path):
    source = pickle.loads(pickle.dumps(open_source(write_folder(tmp_path / "m"))))
    columns = dict.fromkeys(["ids", "any", "text", "n"])
    units = source.units(list(columns), target_bytes=1)
    assert (len(units), source.num_rows) == (4, 4)
    read = [row for unit in units for batch in source.read(unit, columns) for row in batch.to_pylist()]
    expected = [
        {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in row.items()}
        for row in ROWS + ROWS
    ]
    assert read == expected
    assert [batch.to_pylist()[0] for batch in source.rows([3, 0], columns)] == [expected[3], expected[0]]


def test_a_pickled_column_is_not_there(tmp_path):
    source = open_source(write_folder(tmp_path / "m"))
    with pytest.raises(ColumnError, match=r"no column 'object'; .*ids, any, text, n"):
        list(source.read(source.units()[0], {"object": None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "shard 0 is not described as in MDS version 2"),
        ({"column_sizes": [None]}, "shard 0 is not described as in MDS version 2"),
        ({"raw_data": {"basename": "../shard.00000.mds"}}, "outside its own folder"),
        (
            {"raw_data": {"basename": "gone.mds"}, "zip_data": {"basename": "gone.mds.zstd"}},
            "only compressed",
        ),
        ({"samples": 7}, "does not hold the 7 samples"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, changes, message):
    with pytest.raises(SourceError, match=message):
        open_source(write_folder(tmp_path / "m", **changes))


def test_a_cut_shard_is_refused(tmp_path):
    shard = write_folder(tmp_path / "m") / "shard.00001.mds"
    content = shard.read_bytes()
    for size in range(0, len(content), 7):
        shard.write_bytes(content[:size])
        with pytest.raises(SourceError, match=r"shard\.00001\.mds"):
            open_source(tmp_path / "m")


def test_columns_that_do_not_fill_a_sample_are_an_error(tmp_path):
    shard = write_folder(tmp_path / "m") / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[26] += 1  # size of the first column of the first sample
    shard.write_bytes(bytes(content))
    source = open_source(tmp_path / "m")
    with pytest.raises(SourceError, match=r"shard\.00000\.mds, row 0"):
        source.rows([0], {"ids": None})
