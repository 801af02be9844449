"""What a user may name: files, folders, patterns, lists; their order; and what is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.errors import SourceError
from packer.sources import open_source


def write_shards(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [1, 2]}), path)


def names_of(source, folder):
    return [file.removeprefix(f"{folder}/") for file in source.files]


def test_a_folder_and_a_pattern_are_in_natural_order(tmp_path):
    write_shards(
        tmp_path, ["s-10.parquet", "s-2.parquet", "b/s-1.parquet", ".hidden.parquet", "_tmp/x.parquet"]
    )
    (tmp_path / "README.md").write_text("not data")
    ordered = ["b/s-1.parquet", "s-2.parquet", "s-10.parquet"]
    assert names_of(open_source(tmp_path), tmp_path) == ordered
    assert names_of(open_source(f"{tmp_path}/s-*.parquet"), tmp_path) == ordered[1:]
    assert names_of(open_source(f"{tmp_path}/**/s-*.parquet"), tmp_path) == ordered


def test_a_pattern_that_matches_a_folder_and_its_files_opens_each_once(tmp_path):
    write_shards(tmp_path, ["a/b/1.parquet", "a/2.parquet", "3.parquet"])
    for pattern in ("**", "**/*", "*"):
        assert names_of(open_source(f"{tmp_path}/{pattern}"), tmp_path) == [
            "3.parquet",
            "a/2.parquet",
            "a/b/1.parquet",
        ]


def test_linked_folders_are_entered_once(tmp_path):
    write_shards(tmp_path, ["data/1.parquet", "elsewhere/2.parquet"])
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert names_of(open_source(tmp_path / "data"), tmp_path) == ["data/1.parquet", "data/more/2.parquet"]


def test_a_range_in_braces_names_each_file(tmp_path):
    write_shards(tmp_path, [f"s-{number:03}.parquet" for number in range(8, 13)])
    write_shards(tmp_path, ["a/s-1.parquet", "a/s-2.parquet", "b/s-1.parquet", "s-{1..2}.parquet"])
    assert names_of(open_source(f"{tmp_path}/s-{{009..011}}.parquet"), tmp_path) == [
        f"s-{number:03}.parquet" for number in (9, 10, 11)
    ]
    assert names_of(open_source(f"{tmp_path}/a/s-{{1..2}}.parquet"), tmp_path) == [
        "a/s-1.parquet",
        "a/s-2.parquet",
    ]
    assert names_of(open_source(f"{tmp_path}/s-{{1..2}}.parquet"), tmp_path) == ["s-{1..2}.parquet"]
    with pytest.raises(SourceError, match=r"s-013\.parquet: no such file"):
        open_source(f"{tmp_path}/s-{{012..013}}.parquet")


def test_a_list_keeps_its_order(tmp_path):
    write_shards(tmp_path, ["a.parquet", "b.parquet"])
    assert names_of(open_source([tmp_path / "b.parquet", tmp_path / "a.parquet"]), tmp_path) == [
        "b.parquet",
        "a.parquet",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "no such file or directory"),
        (lambda folder: f"{folder}/*.parquet", "the pattern matches no data"),
        (lambda folder: folder, "folder without data files"),
        (lambda folder: [], "no source was named"),
    ],
)
def test_nothing_there(tmp_path, make, message):
    with pytest.raises(SourceError, match=message):
        open_source(make(tmp_path))


def test_an_unreadable_file_among_good_ones_is_named(tmp_path):
    write_shards(tmp_path, ["a.parquet", "c.parquet"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(SourceError, match=r"b\.parquet"):
        open_source(tmp_path)


def test_two_formats_in_a_folder_are_refused(tmp_path):
    write_shards(tmp_path, ["a.parquet"])
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(SourceError, match="several formats"):
        open_source(tmp_path)


def test_an_empty_data_set_is_refused(tmp_path):
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="is empty"):
        open_source(tmp_path)


def write_saved(folder, **state):
    folder.mkdir()
    table = pa.table({"n": [1, 2]})
    for name in ("data-00001.arrow", "data-00000.arrow"):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": "data-00001.arrow"}, {"filename": "data-00000.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files} | state))
    return folder


def test_a_saved_hugging_face_folder_has_the_order_of_its_state(tmp_path):
    folder = write_saved(tmp_path / "d")
    assert names_of(open_source(folder), folder) == ["data-00001.arrow", "data-00000.arrow"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "indices mapping"),
        ({"_data_files": [{"filename": "../../etc/passwd"}]}, "outside its own folder"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "outside its own folder"),
        ({"_data_files": "data"}, "lists no data files"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "no such file"),
    ],
)
def test_a_saved_folder_that_lies_is_refused(tmp_path, state, message):
    with pytest.raises(SourceError, match=message):
        open_source(write_saved(tmp_path / "d", **state))


def test_several_splits_are_refused(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SourceError, match=r"several splits.*train.*test"):
        open_source(tmp_path)


def test_cache_files_beside_data_are_refused(tmp_path):
    folder = write_saved(tmp_path / "d")
    (folder / "state.json").unlink()
    (folder / "data-00000.arrow").rename(folder / "cache-1f.arrow")
    with pytest.raises(SourceError, match="cache files"):
        open_source(folder)


@pytest.mark.parametrize("name", ["x.sqlite", "x.fasta", "x.txt", "x.txt.gz"])
def test_a_text_of_another_format_is_told_what_can_be_done(tmp_path, name):
    (tmp_path / name).write_text(">sp|P1\nMKV,1\n")
    with pytest.raises(SourceError, match=r"no format that packer reads.*analyze_dataset.*--length-column"):
        open_source(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npy", b"\x93NUMPY\1\0", "an array of NumPy.*list column of Parquet"),
        ("x.npz", b"PK\3\4", "an archive of NumPy arrays; write its rows to Parquet"),
        ("x.xlsx", b"PK\3\4", "an Excel sheet; save it as CSV"),
        ("x.zip", b"PK\3\4", "packed by zip.*unpack it"),
        ("x.bin", b"\x80\4", "a pickle, which is never opened"),
        ("x.pt", b"PK\3\4", "a pickle, which is never opened"),
        ("x.hdf5", b"", "of HDF5;.*h5py"),
        ("x", b"\x89HDF\r\n\x1a\n", "of HDF5;.*h5py"),
        ("x.tfrecord", b"\0", "of TFRecord; write its rows to Parquet.*analyze_dataset"),
        ("x.orc", b"ORC", r"of ORC;.*pyarrow\.orc"),
        ("x.db", b"SQLite format 3\0", "a SQLite database"),
        ("x.tar.zst", b"\x28\xb5\x2f\xfd", r"a packed archive.*unpack it to a \.tar"),
        ("x.safetensors", b"\0", "of safetensors"),
    ],
)
def test_what_is_not_read_is_told_what_can_be_done(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=rf"{name} is {message}"):
        open_source(tmp_path / name)
