"""Damaged data sets: some here, hundreds of each format among the slow tests, ten thousand by script."""

import pytest

from tests.fuzz.children import fuzz
from tests.fuzz.fuzz_sources import SUBJECTS

MODULE = "tests.fuzz.fuzz_sources"
ABORT_OF_PYARROW = "level histogram size mismatch"
"""pyarrow 26 ends the process where size statistics of a Parquet footer are damaged: an exception leaves
``RowGroupMetaData.column``. Three in ten thousand inputs; no other way leads to a column's place and size."""
ABORT_OF_LANCE = ": exit -6 "
"""Lance 14 ends the process where an error, or a panic, arises behind the C interface of its batches."""
MOVED_MESSAGES = ": messages: lengths {"
OF_CHATS = [name for name in SUBJECTS if name.endswith("of chats")]
OTHERS = [name for name in SUBJECTS if name not in (*OF_CHATS, "lance")]


@pytest.mark.parametrize("subject", ["parquet", "jsonl.gz", "mds", "csv", "webdataset"])
def test_some(subject):
    failures, outcomes = fuzz(MODULE, subject, 60, seed=0)
    assert not failures
    assert outcomes["SourceError"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("subject", OTHERS)
def test_hundreds(subject):
    failures, outcomes = fuzz(MODULE, subject, 600, seed=100_000)
    assert not [failure for failure in failures if ABORT_OF_PYARROW not in failure]
    assert outcomes["SourceError"] > 0
    assert outcomes["read"] > 0


@pytest.mark.frameworks
@pytest.mark.parametrize("subject", OF_CHATS)
def test_chats(subject):
    failures, _ = fuzz(MODULE, subject, 100, seed=100_000)
    # Without a checksum a damaged offset moves a message from one chat to the next: nobody can tell.
    is_checked = not subject.startswith(("arrow", "hugging face"))
    assert not [failure for failure in failures if is_checked or MOVED_MESSAGES not in failure]


@pytest.mark.frameworks
def test_lance():
    pytest.importorskip("lance")
    failures, outcomes = fuzz(MODULE, "lance", 100, seed=100_000)
    assert not [failure for failure in failures if ABORT_OF_LANCE not in failure]
    assert outcomes["read"] > 0
