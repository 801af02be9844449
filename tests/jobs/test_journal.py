"""The journal keeps what was finished through kills, and nothing of another job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.jobs.journal import Journal

JOB = {"sources": ["a"], "version": 1}
payloads = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 2**40)), st.binary(max_size=200), max_size=8
)


@given(payloads, payloads)
def test_payloads_come_back_now_and_later(tmp_path_factory, first, second):
    path = tmp_path_factory.mktemp("journal") / "journal"
    expected = {}
    for batch in (first, second):
        with Journal(path, JOB) as journal:
            assert len(journal) == len(expected)
            for unit, payload in batch.items():
                journal.append(*unit, payload)
            expected |= batch
            assert {unit: bytes(journal.payload(*unit)) for unit in expected} == expected
            assert all(unit in journal for unit in expected)
            assert (9, 9) not in journal


def test_the_journal_of_another_job_is_thrown_away(tmp_path):
    with Journal(tmp_path / "journal", JOB) as journal:
        journal.append(0, 0, b"old")
    with Journal(tmp_path / "journal", JOB | {"version": 2}) as journal:
        assert len(journal) == 0
    with Journal(tmp_path / "journal", JOB) as journal:
        assert len(journal) == 0


@pytest.fixture(scope="module")
def three_units(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "journal"
    with Journal(path, JOB) as journal:
        for number in range(3):
            journal.append(0, number, bytes([number + 1]) * 70)
    return path.read_bytes()


@given(st.data())
def test_a_torn_journal_keeps_its_intact_beginning(tmp_path_factory, three_units, data):
    path = tmp_path_factory.getbasetemp() / "torn"
    torn = bytearray(three_units[: data.draw(st.integers(0, len(three_units)))])
    if torn and data.draw(st.booleans()):
        torn[data.draw(st.integers(0, len(torn) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(torn)
    with Journal(path, JOB) as journal:
        for number in range(3):
            if (0, number) in journal:
                assert bytes(journal.payload(0, number)) == bytes([number + 1]) * 70
        journal.append(0, 7, b"more")
    with Journal(path, JOB) as journal:
        assert bytes(journal.payload(0, 7)) == b"more"


def test_only_what_was_torn_is_lost(tmp_path, three_units):
    (tmp_path / "torn").write_bytes(three_units[:-100])
    with Journal(tmp_path / "torn", JOB) as journal:
        assert [number for number in range(3) if (0, number) in journal] == [0, 1]
