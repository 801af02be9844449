"""Hundreds of files do not run out of descriptors; where something else has, the message says so."""

import gzip
import json
import os
import resource
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import SourceError, TargetWriteError
from packer.metrics import open_metrics
from packer.publish import published_directory
from packer.sources import line_index, open_source
from tests.sources.test_arrow import write
from tests.sources.test_indexed import write_pair

FILES = 300


@contextmanager
def descriptors(number):
    """Let this process open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def write_files(folder, kind):
    for number in range(FILES):
        ids = [[number], [number, 1]]
        if kind == "indexed":
            write_pair(folder / f"{number}", ids, 8, np.dtype(np.uint16))
        elif kind == "jsonl.gz":
            text = "".join(json.dumps({"input_ids": row}) + "\n" for row in ids)
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 1))
        elif kind == "arrow":
            write(folder / f"{number}.arrow", pa.table({"input_ids": ids}), "file", rows_per_batch=1)
        else:
            pq.write_table(pa.table({"input_ids": ids}), folder / f"{number}.parquet")


@pytest.mark.parametrize("kind", ["indexed", "jsonl.gz", "arrow", "parquet"])
def test_more_files_than_descriptors(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(line_index, "_HELD_BYTES", 0)  # as where every file is large
    (tmp_path / "data").mkdir()
    write_files(tmp_path / "data", kind)
    column = None if kind == "indexed" else "input_ids"
    with descriptors(230):
        packer.analyze(tmp_path / "data", out=tmp_path / "m", tokens_column=column)
        dataset = packer.open_dataset(tmp_path / "data", metrics=tmp_path / "m")
        ids = [sample["input_ids"].tolist() for sample in dataset]
    assert open_metrics(tmp_path / "m").metric("seqlen").tolist() == [1, 2] * FILES
    assert ids == [row for number in range(FILES) for row in ([number], [number, 1])]


def test_an_exhausted_process_is_told_so(tmp_path):
    write_pair(tmp_path / "t", [[1]], 8, np.dtype(np.uint16))
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n')
    taken = []
    with descriptors(64):
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            for name in ("t.idx", "x.jsonl"):
                with pytest.raises(SourceError, match=r"too many files are open; .*ulimit -n"):
                    open_source(tmp_path / name)
            with (
                pytest.raises(TargetWriteError, match=r"too many files are open; .*ulimit -n"),
                published_directory(tmp_path / "m", marker="x"),
            ):
                pass
        finally:
            for descriptor in taken:
                os.close(descriptor)
