"""JSON Lines: cut at any byte, every row is read once; odd lines give one clear error."""

import gzip
import json
import pickle
import re
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packer
from packer.errors import ColumnError, SourceError
from packer.sources import json_rows, jsonl, open_source
from packer.sources.json_rows import _parse_fast, _parse_slow

IDS = {"ids": pa.list_(pa.int64())}
LINE_ENDS = st.sampled_from(["\n", "\r\n", "\n\n", "\n \r\n"])


@pytest.fixture(autouse=True)
def every_block_is_large(monkeypatch):
    """Small blocks would all go to the slow parser."""
    monkeypatch.setattr(json_rows, "_FAST_BYTES", 0)


def read_all(path, columns, target_bytes):
    source = open_source(path)
    units = source.units(list(columns), target_bytes=target_bytes)
    batches = [batch for unit in units for batch in source.read(unit, columns)]
    return [row for batch in batches for row in batch.to_pylist()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.none() | st.lists(st.integers(0, 2**62)), min_size=1),
    line_end=LINE_ENDS,
    ended=st.booleans(),
    marked=st.booleans(),
    target_bytes=st.integers(1, 200),
)
def test_every_cut_reads_every_row_once(tmp_path_factory, rows, line_end, ended, marked, target_bytes):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    text = line_end.join(json.dumps({"other": "x", "ids": row}) for row in rows) + line_end * ended
    path.write_bytes(b"\xef\xbb\xbf" * marked + text.encode())
    assert read_all(path, IDS, target_bytes) == [{"ids": row} for row in rows]
    source = pickle.loads(pickle.dumps(open_source(path)))
    assert source.num_rows == len(rows)
    taken = source.rows(range(len(rows))[::-1], IDS)
    assert [batch.to_pylist()[0]["ids"] for batch in taken] == rows[::-1]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_equal_the_plain_one(tmp_path, suffix):
    rows = [{"ids": list(range(n % 7))} for n in range(1000)]
    plain = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = gzip.compress(plain) if suffix == "gz" else pa.compress(plain, "zstd", asbytes=True)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(packed + packed)  # members one after the other, as `cat` makes them
    assert read_all(path, IDS, 100) == rows + rows
    source = open_source(path)
    assert source.num_rows == 2000
    assert [batch.to_pylist()[0] for batch in source.rows([1999, 3], IDS)] == [rows[999], rows[3]]


@pytest.mark.parametrize("cut", [5, 100, -3])
def test_a_cut_compressed_file_is_an_error(tmp_path, cut):
    path = tmp_path / "a.jsonl.gz"
    lines = "".join(json.dumps({"ids": [n * 7919 % 10007]}) + "\n" for n in range(5000))
    path.write_bytes(gzip.compress(lines.encode())[:cut])
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz"):
        read_all(path, IDS, 100)


BOMB = """
import resource, sys
from packer.errors import SourceError
from packer.samples import LengthDefinition, open_dataset
from packer.sources import open_source

open_source(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    source = open_source(sys.argv[2])
    rows = sum(batch.num_rows for unit in source.units() for batch in source.read(unit, {"n": None}))
    print(rows, source.num_rows)
except SourceError as error:
    print(str(error).replace(sys.argv[2], "FILE"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"n": "' + b"x" * (100 << 20), "FILE: a line is longer than 67108864 bytes"),
        (
            b'{"n": 1}\n' * 10_000 + b'{"n": "' + b"x" * (100 << 20),
            "FILE: a line is longer than 67108864 bytes",
        ),
        (b'{"n": 1}' + b"\n" * (40 << 20), "1 1"),
    ],
    ids=["one line", "a line behind others", "blank lines"],
)
def test_what_a_small_file_unpacks_to_does_not_fill_the_memory(tmp_path, suffix, line, said):
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(gzip.compress(line, 1) if suffix == "gz" else pa.compress(line, "zstd", asbytes=True))
    assert path.stat().st_size < 4 << 20
    (tmp_path / "small.jsonl").write_text('{"n": 1}')
    command = [sys.executable, "-c", BOMB, tmp_path / "small.jsonl", path]
    shown, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown.startswith(said)
    assert int(grown) < 256  # MiB


def test_blank_lines_of_every_kind_are_no_rows_whatever_the_blocks(tmp_path, monkeypatch):
    lines = [b"", b" ", b"\t \r", b'{"n": 1}', b' {"n": 2} ', b"   ", b'\t{"n": 3}\r', b" " * 20, b""]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines * 3))
    for size in range(1, 60):
        monkeypatch.setattr(jsonl, "BLOCK_BYTES", size)
        source = open_source(path)
        assert source.num_rows == 9
        assert [batch["n"][0].as_py() for batch in source.rows(range(9), {"n": pa.int64()})] == [1, 2, 3] * 3
        assert [row["n"] for row in read_all(path, {"n": pa.int64()}, 30)] == [1, 2, 3] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1000])
def test_a_byte_order_mark_alone_on_its_line_is_no_row(tmp_path, monkeypatch, size):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", size)
    path = tmp_path / "a.jsonl"
    for mark in (b"\xef\xbb\xbf\n", b"\xef\xbb\xbf \r\n\n", b"\xef\xbb\xbf"):
        path.write_bytes(mark + b'{"n": 1}\n')
        source = open_source(path)
        assert source.num_rows == 1
        assert source.rows([0], {"n": pa.int64()})[0].to_pylist() == [{"n": 1}]
        assert read_all(path, {"n": pa.int64()}, 100) == [{"n": 1}]


@pytest.mark.parametrize("rows", [1, 3000])  # read by the exact parser, and by pyarrow's
@pytest.mark.parametrize("ids", ["[1, 2.5]", "[1e-1]", "[2, 1e300]", "2.5"])
def test_a_fraction_is_no_token(tmp_path, rows, ids):
    column, data_type = ("ids", pa.list_(pa.int64())) if ids.startswith("[") else ("n", pa.int64())
    path = tmp_path / "a.jsonl"
    whole = "[1, 2.0]" if column == "ids" else "7"
    path.write_text(f'{{"{column}": {whole}}}\n' * rows + f'{{"{column}": {ids}}}\n')
    with pytest.raises(SourceError, match=f"row {rows}: column '{column}' holds"):
        read_all(path, {column: data_type}, 1 << 20)
    with pytest.raises(SourceError, match=f"row {rows}: column '{column}' holds"):
        open_source(path).rows([rows], {column: data_type})


def test_lines_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    rows = [{"ids": list(range(n))} for n in (300, 0, 1, 500, 2)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_all(path, IDS, 90) == rows
    assert open_source(path).num_rows == 5


def test_a_bad_value_names_file_row_and_value(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"ids": [1]}\n' * 30 + '\n{"ids": "x"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl, row 30: column 'ids' holds string \"x\" where a list"):
        read_all(path, IDS, 50)


def test_nested_keys_and_keys_with_dots(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"sample": {"ids": [1, 2]}, "a.b": 5}\n{"sample": null, "a.b": 6}\n{"a.b": 7}\n')
    columns = {"sample.ids": pa.list_(pa.int64()), "a.b": pa.int64()}
    assert read_all(path, columns, 1000) == [
        {"sample.ids": [1, 2], "a.b": 5},
        {"sample.ids": None, "a.b": 6},
        {"sample.ids": None, "a.b": 7},
    ]
    with pytest.raises(ColumnError, match=r"no column 'sample\.id'; .*sample\.ids, a\.b"):
        read_all(path, {"sample.id": None}, 1000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "ids": st.none() | st.lists(st.integers(-(2**63), 2**63 - 1) | st.none()),
                "text": st.none() | st.text(),
                "n": st.none() | st.integers(-(2**63), 2**63 - 1),
                "x": st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False), st.lists),
            },
        ),
        min_size=1,
    )
)
def test_both_parsers_agree(rows):
    lines = [json.dumps(row).encode() for row in rows]
    types = {"ids": pa.list_(pa.int64()), "text": pa.string(), "n": pa.int64()}
    paths = {column: [column] for column in types}
    try:
        slow = _parse_slow(lines, paths, types)
    except SourceError:  # a lone surrogate is no text
        assert _parse_fast(lines, paths, types) is None
    else:
        fast = _parse_fast(lines, paths, types)
        assert fast is not None
        assert fast.equals(slow)


def test_utf16_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"ids": [1]}\n', encoding="utf-16")
    with pytest.raises(SourceError, match="UTF-16"):
        open_source(path)


@pytest.mark.parametrize("first", [0x50, 0x5F])
def test_zstd_with_frames_to_skip_as_pzstd_writes_it(tmp_path, first):
    frames = [pa.compress(f'{{"n": {n}}}\n'.encode(), "zstd", asbytes=True) for n in range(3)]
    size = (4).to_bytes(4, "little")
    skipped = bytes([first]) + b"\x2a\x4d\x18" + size
    content = b"".join(skipped + len(frame).to_bytes(4, "little") + frame for frame in frames)
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    rows = read_all(tmp_path / "a.jsonl.zst", {"n": pa.int64()}, 1 << 20)
    assert rows == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("empty", [b"", b"\n \n", gzip.compress(b"")])
def test_an_empty_shard_ends_no_folder(tmp_path, empty):
    suffix = ".jsonl.gz" if empty.startswith(b"\x1f") else ".jsonl"
    (tmp_path / "part-0.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / f"part-1{suffix}").write_bytes(empty)
    (tmp_path / "part-2.jsonl").write_text('{"n": 3}\n')
    packer.analyze(tmp_path, out=tmp_path / "metrics", length_column="n")
    assert packer.open_metrics(tmp_path / "metrics").metric("seqlen").tolist() == [1, 2, 3]
    assert [batch["n"][0].as_py() for batch in open_source(tmp_path).rows([2, 0], {"n": pa.int64()})] == [
        3,
        1,
    ]


def test_rows_without_keys_are_rows(tmp_path):
    (tmp_path / "part-0.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "part-1.jsonl").write_text("{}\n")
    with pytest.raises(ColumnError, match=r"part-1\.jsonl has no column 'n'; it has no columns at all"):
        packer.analyze(tmp_path, out=tmp_path / "metrics", length_column="n")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ('[{"n": 1}, {"n": 2}]', "jq -c '.[]' FILE"),
        ('[{"n": 1},\n {"n": 2}]', "jq -c '.[]' FILE"),
        (json.dumps([{"n": 1}], indent=2), "jq -c '.[]' FILE"),
        (json.dumps({"n": 1, "m": 2}, indent=2), "jq -c . FILE"),
        ('{"n": 1,\n"m": 2}', "jq -c . FILE"),
    ],
)
def test_json_that_is_no_json_lines_names_the_command(tmp_path, text, command):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SourceError, match=r"a\.json, row 0: .*" + re.escape(f"convert it: {command}")):
        open_source(tmp_path / "a.json")


def test_a_cut_line_at_the_start_of_a_unit_is_no_file_of_another_kind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' * 9 + '{"n": 2,\n')
    with pytest.raises(SourceError, match=r"a\.jsonl, row 9: no JSON object on one line"):
        read_all(path, {"n": pa.int64()}, 1)
