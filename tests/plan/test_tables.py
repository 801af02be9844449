"""Files that are on their way to the disk while they are written."""

import os

import pytest

from packer.plan.tables import FolderTarget


@pytest.mark.parametrize("every", [1, 1000, 1 << 20])
def test_what_is_written_early_is_what_was_written(tmp_path, monkeypatch, every):
    monkeypatch.setattr("packer.plan.tables._EagerFile._EVERY", every)
    chunks = [os.urandom(size) for size in (0, 1, 999, 1000, 1001, 70_000)]
    with FolderTarget(tmp_path).open("below/file") as stream:
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        assert (tmp_path / "below/file").read_bytes() == b"".join(chunks)
    assert (tmp_path / "below/file").read_bytes() == b"".join(chunks)
