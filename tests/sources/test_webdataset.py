"""WebDataset archives: what names mean, every dialect of tar, random access, damage."""

import io
import json
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pytest

import packer
from packer.errors import ColumnError, SourceError
from packer.sources import open_source, skipped_rows

IDS, TEXT, N = pa.list_(pa.int64()), pa.string(), pa.int64()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_tar(path, members, dialect=tarfile.PAX_FORMAT, change=None):
    with tarfile.open(path, "w", format=dialect) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content or b"")
            if content is None:
                info.type = tarfile.DIRTYPE
            if change is not None:
                change(info)
            archive.addfile(info, io.BytesIO(content or b""))
    return path


SAMPLES = [
    {"txt": "é\n", "json": {"ids": [1, 2, 3], "n": 5, "meta": {"lang": "de"}}, "npy": [7], "cls": 4},
    {"txt": "", "json": {"ids": [], "n": None}, "npy": [], "cls": -1},
    {"txt": "x" * 2000, "json": {"ids": [4], "cls": 9}, "npy": [8, 9], "cls": 0},
]


def members(prefix="a/b.c/"):
    found = []
    for number, sample in enumerate(SAMPLES * 3):
        found += [
            (f"{prefix}s{number:03}.TXT", sample["txt"].encode()),
            (f"{prefix}s{number:03}.json", json.dumps(sample["json"], indent=1).encode()),
            (f"{prefix}s{number:03}.tokens.npy", npy(np.array(sample["npy"], ">u2"))),
            (f"{prefix}s{number:03}.cls", f"{sample['cls']}\n".encode()),
            (f"{prefix}s{number:03}.jpg", bytes([number]) * 3 * number),
        ]
    return found


COLUMNS = {
    "__key__": None, "txt": TEXT, "ids": IDS, "json.n": N, "tokens.npy": IDS, "cls": N, "meta.lang": TEXT,
    "json.cls": N, "jpg": None,
}  # fmt: skip


def expected(prefix="a/b.c/"):
    return [
        {
            "__key__": f"{prefix}s{number:03}",
            "txt": sample["txt"],
            "ids": sample["json"]["ids"],
            "json.n": sample["json"].get("n"),
            "tokens.npy": sample["npy"],
            "cls": sample["cls"],
            "meta.lang": sample["json"].get("meta", {}).get("lang"),
            "json.cls": sample["json"].get("cls"),
            "jpg": bytes([number]) * 3 * number,
        }
        for number, sample in enumerate(SAMPLES * 3)
    ]


def read_all(source, columns, target_bytes=1):
    units = source.units(list(columns), target_bytes=target_bytes)
    return [row for unit in units for batch in source.read(unit, columns) for row in batch.to_pylist()]


@pytest.mark.parametrize("dialect", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./", "a/b.c/", "ü/" + "long/" * 25])
def test_rows_and_units(tmp_path, dialect, prefix):
    path = write_tar(tmp_path / "x.tar", members(prefix), dialect)
    source = pickle.loads(pickle.dumps(open_source(path)))
    units = source.units(list(COLUMNS), target_bytes=1)
    assert [(unit.first_row, unit.num_rows) for unit in units] == [(row, 1) for row in range(9)]
    assert read_all(source, COLUMNS) == expected(prefix)
    assert read_all(source, COLUMNS, 1 << 20) == expected(prefix)
    assert [batch.to_pylist()[0] for batch in source.rows([8, 0], COLUMNS)] == [
        expected(prefix)[8],
        expected(prefix)[0],
    ]


def test_what_belongs_to_no_sample_is_passed_over(tmp_path):
    others = [("README", b"x"), ("d", None), (".hidden", b"x"), ("__meta__/a.txt", b"x")]
    listed = members("")
    path = write_tar(tmp_path / "x.tar", [*others, *listed[:5], *others, *listed[5:], *others])
    assert read_all(open_source(path), COLUMNS) == expected("")


def test_a_sample_without_a_member_has_a_null(tmp_path):
    path = write_tar(
        tmp_path / "x.tar", [("0.txt", b"a"), ("1.json", b'{"n": 1}'), ("2.npy", npy(np.arange(2)))]
    )
    assert read_all(open_source(path), {"txt": None, "n": N, "npy": None}) == [
        {"txt": "a", "n": None, "npy": None},
        {"txt": None, "n": 1, "npy": None},
        {"txt": None, "n": None, "npy": [0, 1]},
    ]


def test_a_key_that_two_members_have_is_named_by_its_path(tmp_path):
    path = write_tar(tmp_path / "x.tar", [("0.json", b'{"n": 1, "m": 3}'), ("0.more.json", b'{"n": 2}')])
    source = open_source(path)
    with pytest.raises(ColumnError, match="no column 'n'"):
        read_all(source, {"n": N})
    assert read_all(source, {"json.n": N, "more.json.n": N, "m": N}) == [
        {"json.n": 1, "more.json.n": 2, "m": 3}
    ]


def test_features_keep_their_shape(tmp_path):
    frames = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write_tar(tmp_path / "x.tar", [("0.npy", npy(frames)), ("1.npy", npy(frames[:1]))])
    [batch] = open_source(path).read(open_source(path).units(["npy"])[0], {"npy": None})
    assert batch["npy"].type.value_type == pa.list_(pa.float32(), 4)
    assert batch["npy"].to_pylist() == [frames.tolist(), frames[:1].tolist()]


def test_a_pickle_is_never_opened(tmp_path):
    path = write_tar(tmp_path / "x.tar", [("0.pyd", pickle.dumps([1]))])
    with pytest.raises(ColumnError, match="'pyd' is of type binary; name a list of integers"):
        packer.analyze(path, out=tmp_path / "metrics", tokens_column="pyd")
    path = write_tar(tmp_path / "y.tar", [("0.npy", npy(np.array([{}], object)))])
    with pytest.raises(SourceError, match=r"y\.tar, row 0: column 'npy': no array in \.npy format"):
        packer.analyze(path, out=tmp_path / "metrics", tokens_column="npy")


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (b"[1, 2", {"json": IDS}, "column 'json' holds"),
        (b'{"n": 1', {"n": N}, "no JSON object"),
        (b"5.5", {"cls": N}, "holds b'5.5' where an integer was expected"),
        (b"9" * 20, {"cls": N}, "where an integer was expected"),
        (b"\xff", {"txt": TEXT}, "is no UTF-8 text"),
        (npy(np.arange(3))[:-1], {"npy": IDS}, "no array in"),
        (npy(np.array(3)), {"npy": IDS}, r"int64 of shape \(\) is no list of numbers"),
        (npy(np.ones((2, 3))), {"npy": None}, r"the shape \(2, 3\), and those before it \(\) behind"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_may_be_skipped(tmp_path, content, column, message):
    [name] = column
    extension = {"n": "json"}.get(name, name)
    good = {
        "json": b'{"n": 7}' if name == "n" else b"[7]",
        "cls": b"7",
        "txt": b"7",
        "npy": npy(np.array([7])),
    }
    listed = [good[extension], content, good[extension]]
    path = write_tar(tmp_path / "x.tar", [(f"{at}.{extension}", value) for at, value in enumerate(listed)])
    source = open_source(path)
    with pytest.raises(SourceError, match=rf"x\.tar, row 1: .*{message}"):
        read_all(source, column, 1 << 20)
    if "shape" not in message or "()" in message:
        [batch] = source.tolerating("skip").read(source.units([name])[0], column)
        assert (skipped_rows(batch), batch[name].null_count) == ([1], 1)
        assert batch[name][0] == batch[name][2]


def test_an_archive_that_is_cut_is_one_clear_error(tmp_path):
    content = write_tar(tmp_path / "good.tar", members(), tarfile.GNU_FORMAT).read_bytes()
    end = len(content.rstrip(b"\0"))
    path = tmp_path / "x.tar"
    for size in [*range(0, end, 512), *range(300, end, 4096), end + 512]:
        path.write_bytes(content[:size])
        with pytest.raises(SourceError, match=r"x\.tar"):
            _ = open_source(path).num_rows
    with pytest.raises(SourceError, match=r"x\.tar lacks the blocks that end an archive"):
        packer.analyze(path, out=tmp_path / "metrics", tokens_column="ids")
    assert not (tmp_path / "metrics").exists()


def test_a_damaged_header_does_not_end_the_archive_in_silence(tmp_path):
    path = write_tar(tmp_path / "x.tar", members())
    content = bytearray(path.read_bytes())
    content[content.index(b"a/b.c/s004.TXT")] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(SourceError, match=r"x\.tar, byte \d+: a header whose checksum is wrong; fetch"):
        packer.analyze(path, out=tmp_path / "metrics", tokens_column="ids")


def test_a_name_without_its_member_is_no_end(tmp_path):
    path = write_tar(tmp_path / "x.tar", [("0.txt", b"a"), ("l" * 120 + ".txt", b"b")], tarfile.GNU_FORMAT)
    content = bytearray(path.read_bytes())
    content[4 * 512 : 6 * 512] = bytes(2 * 512)
    path.write_bytes(bytes(content))
    with pytest.raises(SourceError, match=r"x\.tar, byte 1024: a header that belongs to no member"):
        open_source(path)


def _become(kind, target=""):
    def change(info):
        info.type, info.linkname, info.size = kind, target, 0

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _become(tarfile.SYMTYPE, "y"),
            "member '0.txt' is a symbolic link; write the archive with tar --deref",
        ),
        (_become(tarfile.LNKTYPE, "y"), "member '0.txt' is a hard link"),
        (_become(tarfile.FIFOTYPE), "member '0.txt' is of kind b'6', no file"),
    ],
)
def test_what_is_no_file_is_named(tmp_path, change, message):
    with pytest.raises(SourceError, match=message):
        open_source(write_tar(tmp_path / "x.tar", [("0.txt", b"")], change=change))


def test_two_members_of_one_name_are_refused(tmp_path):
    path = write_tar(tmp_path / "x.tar", [("0.txt", b"a"), ("0.TXT", b"b")])
    with pytest.raises(SourceError, match=r"sample '0' has two members \.txt"):
        open_source(path)


def test_joined_archives_are_refused(tmp_path):
    content = write_tar(tmp_path / "x.tar", [("0.txt", b"a")]).read_bytes()
    (tmp_path / "x.tar").write_bytes(content + content)
    with pytest.raises(
        SourceError, match=r"goes on behind the end of its archive, at byte 1024; .*--concatenate"
    ):
        packer.analyze(tmp_path / "x.tar", out=tmp_path / "metrics", tokens_column="txt")


def test_a_packed_archive_is_refused_with_the_cure(tmp_path):
    for mode in ("gz", "bz2", "xz"):
        with tarfile.open(tmp_path / f"x.tar.{mode}", f"w:{mode}") as archive:
            archive.add(__file__, "0.txt")
        with pytest.raises(
            SourceError, match=rf"x\.tar\.{mode} is a packed archive, .*; unpack it to a \.tar"
        ):
            open_source(tmp_path / f"x.tar.{mode}")


def test_shards_train_the_same_with_workers(tmp_path):
    for number in (1, 2, 10):
        write_tar(tmp_path / f"s-{number}.tar", members(f"{number}-"))
    for workers in (1, 2):
        packer.analyze(
            f"{tmp_path}/s-*.tar", out=tmp_path / f"m{workers}", tokens_column="tokens.npy", workers=workers
        )
    one, two = (packer.open_metrics(tmp_path / f"m{workers}") for workers in (1, 2))
    assert one.metric("seqlen").tolist() == [1, 0, 2] * 9
    assert one.fingerprint == two.fingerprint
    dataset = packer.open_dataset(f"{tmp_path}/s-*.tar", metrics=tmp_path / "m2")
    assert [sample["input_ids"].tolist() for sample in dataset.__getitems__([26, 0])] == [[8, 9], [7]]


@packer.sample_metric(columns=["wav"])
def seconds_of_wav(batch):
    return np.array([len(sound) // 100 for sound in batch["wav"].to_pylist()])


def test_recordings_from_analysis_to_batches(tmp_path):
    lengths = [5, 3, 8, 2]
    frames = [np.full((n, 4), n, np.float16) for n in lengths]
    listed = [
        member
        for row, n in enumerate(lengths)
        for member in (
            (f"{row}.mel.npy", npy(frames[row])),
            (f"{row}.wav", bytes(250 * n)),
            (f"{row}.json", json.dumps({"ids": [row] * n}).encode()),
        )
    ]
    path = write_tar(tmp_path / "x.tar", listed)
    packer.analyze(path, out=tmp_path / "m", features_column="mel.npy", metrics=[seconds_of_wav])
    metrics = packer.open_metrics(tmp_path / "m")
    assert metrics.metric("seqlen").tolist() == lengths
    assert metrics.metric("seconds_of_wav").tolist() == [12, 7, 20, 5]
    dataset = packer.open_dataset(path, metrics=metrics, fields=["ids"])
    plan = packer.make_plan(metrics, packer.PlanConfig(max_tokens=10, layout="packed"))
    seen = []
    for step in packer.PlanLoader(plan, dataset, dp_rank=0, dp_size=1):
        for batch in step:
            expected = np.concatenate([frames[at] for at in batch.sample_ids])
            assert np.array_equal(batch["mel"][0, : batch.num_tokens], expected)
            seen += batch["ids"][0, : batch.num_tokens].tolist()
    assert sorted(seen) == [row for row, n in enumerate(lengths) for _ in range(n)]
