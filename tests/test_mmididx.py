"""The index codec against a reader that goes field by field, and against files that are not what they say."""

import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import MetricsError, SourceError
from packer.metrics import write_items
from packer.mmididx import DEEPSPEED_DTYPES, MEGATRON_DTYPES, read_index, write_index
from tests import naive

dtype_codes = st.sampled_from(sorted(DEEPSPEED_DTYPES))


@given(dtype_codes, st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=30), st.booleans())
def test_items_come_back(tmp_path_factory, code, items, one_document):
    folder = tmp_path_factory.mktemp("items")
    dtype = DEEPSPEED_DTYPES[code]
    documents = np.array([0, len(items)] if one_document else range(len(items) + 1))
    digests = write_items(
        folder / "x",
        (np.array(item, dtype=np.int64) for item in items),
        np.array([len(i) for i in items]),
        dtype,
        documents,
    )

    assert naive.read_items(folder / "x", DEEPSPEED_DTYPES) == items
    index = read_index(folder / "x.idx")
    assert index.dtype_code == code
    assert index.sizes.tolist() == [len(item) for item in items]
    assert index.pointers.tolist() == [
        dtype.itemsize * sum(len(i) for i in items[:n]) for n in range(len(items))
    ]
    assert index.document_index.tolist() == documents.tolist()
    assert {name: digest.size for name, digest in digests.items()} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }


def test_each_item_is_a_document_across_chunks(monkeypatch):
    monkeypatch.setattr("packer.mmididx._CHUNK_ITEMS", 4)
    for num_items in (0, 3, 4, 5, 8, 11):
        sizes = np.arange(num_items)
        chunked, whole = io.BytesIO(), io.BytesIO()
        write_index(chunked.write, sizes, dtype_code=4, item_bytes=4, document_index=None)
        monkeypatch.setattr("packer.mmididx._CHUNK_ITEMS", 1000)
        write_index(whole.write, sizes, dtype_code=4, item_bytes=4, document_index=np.arange(num_items + 1))
        monkeypatch.setattr("packer.mmididx._CHUNK_ITEMS", 4)
        assert chunked.getvalue() == whole.getvalue()


def test_pointers_beyond_32_bits(tmp_path):
    sizes = np.full(5, 2**31 - 1)
    with (tmp_path / "x.idx").open("wb") as stream:
        write_index(stream.write, sizes, dtype_code=5, item_bytes=8, document_index=None)
    assert read_index(tmp_path / "x.idx").pointers.tolist() == [n * 8 * (2**31 - 1) for n in range(5)]


def test_dialects_agree_on_the_first_five_codes():
    shared = {code for code in MEGATRON_DTYPES if MEGATRON_DTYPES[code] == DEEPSPEED_DTYPES[code]}
    assert shared == {1, 2, 3, 4, 5}


@pytest.fixture(scope="module")
def good_index():
    stream = io.BytesIO()
    write_index(stream.write, np.ones(40), dtype_code=4, item_bytes=4, document_index=np.array([0, 40]))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b"", "is no MMIDIDX index"),
        (lambda b: b"PAR1" + b[4:], "is no MMIDIDX index"),
        (lambda b: b[:5], "truncated: 5 bytes"),
        (lambda b: b[:33], "truncated: 33 bytes"),
        (lambda b: b[:-1], "is truncated"),
        (lambda b: b + b"x", "belong to nothing"),
        (lambda b: b[:9] + b"\x02" + b[10:], "format version 2; this packer reads version 1"),
        (lambda b: b[:17] + b"\x00" + b[18:], "dtype code 0"),
        (lambda b: b[:18] + b"\xff" * 8 + b[26:], "18446744073709551615 items"),
        (lambda b: b[:26] + b"\xff" * 8 + b[34:], "18446744073709551615 document entries"),
    ],
)
def test_damage_is_named(tmp_path, good_index, damage, message):
    path = tmp_path / "x.idx"
    path.write_bytes(damage(good_index))
    with pytest.raises(SourceError, match=message):
        read_index(path)
    with pytest.raises(MetricsError, match=message):
        read_index(path, error=MetricsError)


def test_a_missing_index_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"cannot read index .*gone\.idx: No such file"):
        read_index(tmp_path / "gone.idx")


def test_modes_of_megatron_are_passed_over(tmp_path, good_index):
    path = tmp_path / "x.idx"
    path.write_bytes(good_index + bytes(40))
    assert read_index(path).sizes.tolist() == [1] * 40


@given(st.data())
def test_any_change_gives_the_index_or_an_error(tmp_path_factory, good_index, data):
    changed = bytearray(good_index)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.idx"
    path.write_bytes(
        changed[: data.draw(st.integers(0, len(changed)))] if data.draw(st.booleans()) else changed
    )
    tracemalloc.start()
    try:
        index = read_index(path)
    except SourceError:
        pass
    else:
        assert 12 * len(index.sizes) + 8 * len(index.document_index) + 34 <= len(good_index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
