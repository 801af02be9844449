"""CSV and TSV: quoted line ends, blank lines, encodings, types, damage; split as Python's csv splits."""

import csv
import gzip
import io
import pickle

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import packer
from packer.errors import SourceError
from packer.sources import open_source, skipped_rows
from packer.sources.delimited_rows import split_rows

IDS, TEXT, N = pa.list_(pa.int64()), pa.string(), pa.int64()
COLUMNS = {"ids": IDS, "text": TEXT, "n": N}
ROWS = [
    {"ids": [1, 2, 3], "text": 'two\nlines, "quoted"', "n": 5},
    {"ids": [], "text": "", "n": None},
    {"ids": None, "text": None, "n": -7},
    {"ids": [4], "text": "é", "n": 0},
]


def content(*, delimiter=",", line_end="\n", rows=ROWS):
    def value(of):
        if isinstance(of, str):
            return '"' + of.replace('"', '""') + '"'
        return "" if of is None else f'"{of}"'

    lines = [delimiter.join(["ids", "text", "n"])]
    lines += [delimiter.join(value(row[name]) for name in ("ids", "text", "n")) for row in rows]
    return (line_end.join(lines) + line_end).encode()


def write(path, data):
    path.write_bytes(data)
    return path


def read_all(source, columns=COLUMNS, target_bytes=1):
    units = source.units(list(columns), target_bytes=target_bytes)
    return [row for unit in units for batch in source.read(unit, columns) for row in batch.to_pylist()]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize(
    ("name", "delimiter", "pack"),
    [
        ("x.csv", ",", bytes),
        ("x.csv", ";", bytes),
        ("x.tsv", "\t", bytes),
        ("x.tsv.gz", "\t", gzip.compress),
        ("x.csv.zst", ",", zstandard.ZstdCompressor().compress),
    ],
)
def test_rows_and_units(tmp_path, name, delimiter, line_end, pack):
    path = write(tmp_path / name, pack(b"\xef\xbb\xbf" + content(delimiter=delimiter, line_end=line_end)))
    source = pickle.loads(pickle.dumps(open_source(path)))
    units = source.units(list(COLUMNS), target_bytes=1)
    assert len(units) == (4 if pack is bytes else 1)
    if pack is bytes:
        assert [(unit.first_row, unit.num_rows) for unit in units] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert read_all(source) == ROWS
    assert [batch.to_pylist()[0] for batch in source.rows([3, 0], COLUMNS)] == [ROWS[3], ROWS[0]]
    assert read_all(source, {"n": None}) == [{"n": "5"}, {"n": None}, {"n": "-7"}, {"n": "0"}]


letters = st.text(alphabet='a,"\r\n\té', max_size=6)


@given(st.lists(st.lists(letters, min_size=2, max_size=2), min_size=1, max_size=6), st.integers(1, 9))
def test_values_written_by_csv_come_back_whatever_the_blocks(rows, block_bytes):
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    data = file.getvalue().encode()
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    found = list(split_rows(blocks, ",", owner="x", max_row_bytes=1000))
    assert b"".join(part.content for part in found) == data
    lines = [part.row(row).decode() for part in found for row in range(len(part.starts))]
    assert [next(csv.reader(io.StringIO(line, newline=""))) for line in lines] == rows


@given(st.text(alphabet='a,"\n', max_size=24), st.integers(1, 9))
def test_rows_end_where_a_plain_reading_ends_them(text, block_bytes):
    data = text.encode()
    state, rows, row = "begin", [], ""
    for letter in text:
        if letter == "\n" and state != "open":
            rows, row, state = [*rows, row], "", "begin"
            continue
        row += letter
        if state == "open":
            state = "closed" if letter == '"' else "open"
        elif letter == '"' and state in ("begin", "closed"):
            state = "open"
        else:
            state = "begin" if letter == "," else "within"
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    if state == "open":
        with pytest.raises(SourceError, match="never closed"):
            list(split_rows(blocks, ",", owner="x", max_row_bytes=1000))
        return
    found = list(split_rows(blocks, ",", owner="x", max_row_bytes=1000))
    lines = [part.row(number).decode() for part in found for number in range(len(part.starts))]
    assert lines == [line for line in [*rows, row] if line]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'ids,n\n"[1]",1\n"[2],2\n', r"x\.csv: the quote at byte 14 is never closed"),
        (b"ids,n\n[1],1\n[2]\n", r"x\.csv, row 1: 1 values where the header names 2; correct the row"),
        (b'ids,n\n[1],1\n"[2, 3.5]",2\n', r'row 1: column \'ids\' holds "\[2, 3\.5\]" where a list of int'),
        (b"ids,n\n[1],1\n{},2\n", r"row 1: column 'ids' holds"),
        (b"ids,n\n[1],1\n[1e400],2\n", r"row 1: column 'ids' holds"),
        (b"ids,n\n[1],1\n[99999999999999999999],2\n", r"row 1: column 'ids' holds"),
        (b"ids,n\n[1],1\n[true],2\n", r"row 1: column 'ids' holds"),
        (b"ids\xff,n\n[1],1\n", "header is not UTF-8; convert the file: iconv"),
        (b"ids,n\r[1],1\r", r"x\.csv: a bare carriage return at byte 5; convert the line ends"),
        ("ids,n\n1,1\n".encode("utf-16"), r"x\.csv is UTF-16"),
    ],
)
def test_what_is_wrong_is_one_clear_error(tmp_path, data, message):
    path = write(tmp_path / "x.csv", data)
    with pytest.raises(SourceError, match=message):
        packer.analyze(path, out=tmp_path / "metrics", tokens_column="ids")
    assert not (tmp_path / "metrics").exists()


@pytest.mark.parametrize(
    ("value", "message"), [(b"5.0", 'holds "5.0" where an integer'), (b"\xff", "is not UTF-8; convert")]
)
def test_a_value_of_another_type_is_named_and_may_be_skipped(tmp_path, value, message):
    path = write(tmp_path / "x.csv", b"n\n1\n" + value + b"\n3\n")
    source = open_source(path)
    with pytest.raises(SourceError, match=rf"x\.csv, row 1: column 'n' {message}"):
        read_all(source, {"n": N if value == b"5.0" else TEXT})
    packer.analyze(path, out=tmp_path / "metrics", length_column="n", on_error="skip")
    metrics = packer.open_metrics(tmp_path / "metrics")
    assert (metrics.metric("seqlen").tolist(), metrics.manifest.skipped_samples) == ([1, 0, 3], [1])


def test_every_wrong_row_is_skipped_and_no_other(tmp_path):
    lines = [f"{row},x" if row % 3 else f"{row}" for row in range(20)]
    source = open_source(write(tmp_path / "x.csv", "\n".join(["n,t", *lines, ""]).encode())).tolerating(
        "skip"
    )
    [unit] = source.units(["n"])
    [batch] = source.read(unit, {"n": N})
    assert skipped_rows(batch) == list(range(0, 20, 3))
    assert batch["n"].to_pylist() == [row if row % 3 else None for row in range(20)]


def test_a_cut_compressed_file_is_one_clear_error(tmp_path):
    packed = gzip.compress(content(rows=ROWS * 50))
    for size in (len(packed) // 2, len(packed) - 5):
        path = write(tmp_path / "x.csv.gz", packed[:size])
        with pytest.raises(SourceError, match=r"x\.csv\.gz"):
            packer.analyze(path, out=tmp_path / "metrics", overwrite=True, tokens_column="ids")


def test_texts_give_the_same_with_workers(tmp_path):
    path = write(tmp_path / "x.csv", content(rows=ROWS * 30))
    for workers in (1, 2):
        packer.analyze(path, out=tmp_path / f"m{workers}", tokens_column="ids", workers=workers)
    one, two = (packer.open_metrics(tmp_path / f"m{workers}") for workers in (1, 2))
    assert one.metric("seqlen").tolist() == [3, 0, 0, 1] * 30
    assert one.fingerprint == two.fingerprint
    dataset = packer.open_dataset(path, metrics=tmp_path / "m2")
    assert [sample["input_ids"].tolist() for sample in dataset.__getitems__([119, 4])] == [[4], [1, 2, 3]]


def test_a_header_alone_is_an_empty_data_set(tmp_path):
    for data in (b"", b"n,t\n", b"n,t\n\r\n\n"):
        with pytest.raises(SourceError, match="is empty"):
            open_source(write(tmp_path / "x.csv", data))
