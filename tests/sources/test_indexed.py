"""``.bin/.idx`` pairs of both dialects: sequences, not documents; damage is refused."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import SourceError
from packer.mmididx import DEEPSPEED_DTYPES, MEGATRON_DTYPES
from packer.samples import default_definition, measure_unit, open_dataset
from packer.sources import open_source

DIALECTS = [
    *((code, dtype) for code, dtype in DEEPSPEED_DTYPES.items()),
    *((code, dtype) for code, dtype in MEGATRON_DTYPES.items() if code > 5),
    (7, np.dtype(np.float64)),  # fairseq
]


def write_pair(prefix, sequences, code, dtype, *, documents=None, pointers=None, modes=b""):
    arrays = [np.array(sequence, dtype) for sequence in sequences]
    sizes = np.array([len(array) for array in arrays], np.int64)
    if pointers is None:
        pointers = np.cumsum(sizes * dtype.itemsize) - sizes * dtype.itemsize
    documents = documents if documents is not None else [0, len(arrays)]
    prefix.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    prefix.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(arrays), len(documents))
        + sizes.astype("<i4").tobytes()
        + np.asarray(pointers, "<i8").tobytes()
        + np.asarray(documents, "<i8").tobytes()
        + modes
    )
    return prefix.with_suffix(".idx")


def lengths_of(source, target_bytes):
    definition = default_definition(source)
    units = source.units(list(definition.read_columns), target_bytes=target_bytes)
    return [n for unit in units for m in measure_unit(source, unit, definition) for n in m.lengths["seqlen"]]


@pytest.mark.parametrize(("code", "dtype"), DIALECTS)
def test_every_dtype_of_every_dialect(tmp_path, code, dtype):
    sequences = [[1, 2, 3], [], [4], [100] * 7, []]
    index = write_pair(tmp_path / "t", sequences, code, dtype, documents=[0, 2, 5])
    for name in (index, index.with_suffix(".bin"), index.with_suffix("")):
        source = open_source(name)
        assert lengths_of(source, 24) == [3, 0, 1, 7, 0]
        dataset = pickle.loads(pickle.dumps(open_dataset(name)))
        assert [sample["input_ids"].tolist() for sample in dataset] == sequences
        assert dataset[0]["input_ids"].dtype == dtype


@given(st.lists(st.lists(st.integers(0, 2**16 - 1)), min_size=1), st.integers(1, 100))
def test_lengths_equal_ids(tmp_path_factory, sequences, target_bytes):
    index = write_pair(
        tmp_path_factory.mktemp("pair") / "t", sequences, 8, np.dtype(np.uint16), modes=b"\0" * len(sequences)
    )
    assert lengths_of(open_source(index), target_bytes) == [len(sequence) for sequence in sequences]
    dataset = open_dataset(index)
    assert [sample["input_ids"].tolist() for sample in dataset.__getitems__(range(len(dataset)))] == sequences


def test_sequences_may_lie_in_any_order(tmp_path):
    index = write_pair(tmp_path / "t", [[1, 2], [3]], 4, np.dtype(np.int32), pointers=[4, 0])
    assert [sample["input_ids"].tolist() for sample in open_dataset(index)] == [[2, 3], [1]]


@pytest.mark.parametrize("pointers", [[0, 12], [0, -4], [0, 2], [2**62, 0]])
def test_a_pointer_out_of_the_file_is_refused(tmp_path, pointers):
    index = write_pair(tmp_path / "t", [[1, 2], [3]], 4, np.dtype(np.int32), pointers=pointers)
    with pytest.raises(SourceError, match=r"t\.idx, sequence [01]: .*damaged"):
        open_source(index)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_cut_pair_is_refused(tmp_path, suffix):
    index = write_pair(tmp_path / "t", [[1, 2], [3]] * 20, 4, np.dtype(np.int32))
    content = index.with_suffix(suffix).read_bytes()
    for size in range(1, len(content)):
        index.with_suffix(suffix).write_bytes(content[:size])
        with pytest.raises(SourceError, match=r"t\."):
            open_source(index)


def test_a_missing_bin_is_named(tmp_path):
    index = write_pair(tmp_path / "t", [[1]], 4, np.dtype(np.int32))
    index.with_suffix(".bin").unlink()
    with pytest.raises(SourceError, match=r"has no t\.bin beside it"):
        open_source(index)


def test_a_pattern_that_matches_both_files_opens_one_pair(tmp_path):
    for name in ("t10", "t9"):
        write_pair(tmp_path / name, [[1], [2, 3]], 4, np.dtype(np.int32))
    for named in (f"{tmp_path}/t*", tmp_path):
        assert [file.rsplit("/")[-1] for file in open_source(named).files] == ["t9.idx", "t10.idx"]
