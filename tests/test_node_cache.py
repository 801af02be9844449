"""The cache of a node: made once, whole or not at all, bounded, and nobody's but the user's own."""

import os
import subprocess
import sys
import threading
import time

import pytest

from packer import node_cache
from packer.errors import ConfigError, SourceError
from packer.node_cache import NodeCache, key_of

KEY, OTHER = key_of("a"), key_of("b")


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock-"))


@pytest.fixture
def cache(tmp_path):
    return NodeCache(tmp_path / "node", 32 << 10)


def test_an_entry_is_made_once_by_all_who_want_it(cache):
    made = []

    def make(path):
        made.append(path)
        time.sleep(0.05)  # long enough for the others to come
        path.write_bytes(b"x")

    threads = [threading.Thread(target=cache.made, args=(KEY, make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert cache.made(KEY, make).read_bytes() == b"x"


def test_what_fails_leaves_nothing(cache, tmp_path):
    def fail(path):
        path.write_bytes(b"half")
        raise SourceError("damaged")

    with pytest.raises(SourceError):
        cache.made(KEY, fail)
    assert entries(tmp_path / "node") == []
    assert cache.made(KEY, lambda path: path.write_bytes(b"whole") and None).read_bytes() == b"whole"


def test_an_error_of_what_is_read_is_not_taken_for_one_of_the_cache(cache, tmp_path):
    with pytest.raises(FileNotFoundError):
        cache.made(KEY, lambda path: path.write_bytes((tmp_path / "none").read_bytes()))


def test_a_file_larger_than_the_limit_is_not_kept(cache, tmp_path):
    assert cache.made(KEY, lambda path: path.write_bytes(bytes(64 << 10)) and None) is None
    assert entries(tmp_path / "node") == []


def test_blocks_go_by_their_use(cache, tmp_path):
    for number in range(40):
        cache.keep_block(key_of(number), bytes(1020))
        if number >= 3:
            assert cache.block(key_of(3)) is not None  # used all the time
        if number != 3:
            os.utime(tmp_path / "node" / key_of(number), ns=(number, number))
    assert sum(path.stat().st_size for path in (tmp_path / "node").iterdir()) <= 33 << 10
    assert cache.block(key_of(0)) is None
    assert cache.block(key_of(3)) == bytes(1020)
    assert cache.block(key_of(39)) == bytes(1020)


def test_what_is_held_stays(cache, tmp_path):
    path = cache.made(KEY, lambda path: path.mkdir() or ((path / "x").write_bytes(bytes(8 << 10)) and None))
    os.utime(path, ns=(0, 0))
    node_cache.hold(path)
    for number in range(40):
        cache.keep_block(key_of(number), bytes(1020))
    assert (path / "x").exists()


def test_what_a_killed_process_left_is_swept_away(cache, tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    left = tmp_path / "node" / f".{KEY}.{int(ended.stdout)}.partial"
    mine = tmp_path / "node" / f".{key_of(0)}.{os.getpid()}.partial"
    assert cache.limit  # which makes the folder
    for partial in (left, mine):
        partial.write_bytes(b"half")
    cache.keep_block(OTHER, bytes(1020))
    cache.keep_block(KEY, bytes(1020))
    assert not left.exists()
    assert mine.exists()


@pytest.mark.parametrize("fault", ["writable by others", "a file", "switched off"])
def test_a_folder_that_cannot_be_trusted_keeps_nothing(tmp_path, fault):
    folder = tmp_path / "node"
    if fault == "writable by others":
        folder.mkdir()
        folder.chmod(0o777)
    elif fault == "a file":
        folder.write_bytes(b"")
    cache = NodeCache(folder, 0 if fault == "switched off" else 1 << 20)
    cache.keep_block(KEY, b"x")
    assert cache.block(KEY) is None
    assert cache.made(KEY, lambda path: path.write_bytes(b"x") and None) is None
    assert cache.limit == 0


def test_a_limit_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv(node_cache.LIMIT_VARIABLE, "4GB")
    with pytest.raises(
        ConfigError, match="PACKER_CACHE_BYTES is '4GB'; give a number of bytes, 0 for no cache"
    ):
        node_cache.node_cache()
