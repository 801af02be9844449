"""Kills at any moment, several writers, a read-only disk: the target is whole or absent, nothing is lost."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packer
from packer.errors import TargetWriteError
from tests.word_tokenizer import write_tokenizer

NUM_ROWS, ROWS_PER_UNIT = 12_000, 120

# What a child does: it says when it begins, and how many units an earlier run had done.
RUN = """
import sys
import packer, packer.analyzer.work
packer.analyzer.work.UNIT_BYTES = packer.analyzer.work.TEXT_UNIT_BYTES = 1

if __name__ == "__main__":
    folder, kind, workers = sys.argv[1:4]
    options = {"overwrite": "overwrite" in sys.argv, "workers": int(workers), "out": folder + "/m"}
    if kind == "text":
        options |= {"text_column": "text", "tokenizer": folder + "/tokenizer.json"}
        options |= {"write_tokens": folder + "/tokens"}
    else:
        options |= {"tokens_column": "ids", "curriculum_files": True}
    print("begin", flush=True)
    print(packer.analyze(folder + "/data.parquet", **options).num_units_reused, flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    rows = [n * 7919 % 23 for n in range(NUM_ROWS)]
    table = pa.table({"ids": [[1] * n for n in rows], "text": [" ".join(["w3"] * n) for n in rows]})
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=ROWS_PER_UNIT)
    write_tokenizer(tmp_path, 10)
    (tmp_path / "run.py").write_text(RUN)
    return tmp_path


def start(folder: Path, kind: str, workers: int, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, folder / "run.py", folder, kind, str(workers), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Return what was published, and check that a reader takes it."""
    packer.open_metrics(folder / "m").check_files()
    files = [*(folder / "m").rglob("*"), *folder.glob("tokens.*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def check_after_kills(folder: Path, kind: str, workers: int, kills: int, *, overwrite: bool) -> None:
    choice = random.Random(f"{kind} {workers} {overwrite}")
    arguments = ["overwrite"] if overwrite else []
    before = {path.name for path in folder.iterdir()}
    first = start(folder, kind, workers)
    assert first.stdout.readline() == "begin\n"
    began = time.monotonic()
    assert first.communicate()[0] == "0\n"
    seconds = time.monotonic() - began
    whole = contents(folder)
    for _ in range(kills):
        if not overwrite:
            subprocess.run(["rm", "-r", folder / "m", *folder.glob("tokens.*")], check=True)
        run = start(folder, kind, workers, *arguments)
        assert run.stdout.readline() == "begin\n"
        time.sleep(choice.uniform(0, seconds))
        run.kill()
        finished = run.communicate()[0] != ""
        if (folder / "m").exists():
            assert contents(folder).items() >= packer_files(whole).items()
        else:
            assert not finished
        # The next run is not in the way of the killed one's workers, and starts from what that had done.
        again = start(folder, kind, workers, *arguments, *(["overwrite"] if (folder / "m").exists() else []))
        output, errors = again.communicate()
        assert again.returncode == 0, errors
        assert output.startswith("begin\n")
        assert contents(folder) == whole
    left = {path.name for path in folder.iterdir()} - before
    assert left == {"m"} | ({"tokens.bin", "tokens.idx"} if kind == "text" else set())


def packer_files(whole: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in whole.items() if name.startswith("m/")}


@pytest.mark.parametrize(("kind", "workers"), [("tokens", 1), ("text", 2)])
def test_a_killed_run(folder, kind, workers):
    check_after_kills(folder, kind, workers, 1, overwrite=kind == "text")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "workers", "overwrite"),
    [("tokens", 1, True), ("tokens", 2, False), ("text", 1, False), ("text", 2, True)],
)
def test_runs_killed_many_times(folder, kind, workers, overwrite):
    check_after_kills(folder, kind, workers, 5, overwrite=overwrite)


def test_of_several_runs_one_wins(folder):
    runs = [start(folder, "tokens", 1) for _ in range(3)]
    ends = [run.communicate() for run in runs]
    assert sum(run.returncode == 0 for run in runs) == 1
    for run, (_, errors) in zip(runs, ends, strict=True):
        assert run.returncode == 0 or "TargetBusyError" in errors or "TargetExistsError" in errors
    assert packer.open_metrics(folder / "m").num_samples == NUM_ROWS


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_read_only_disk(folder):
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,ro", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    try:
        with pytest.raises(TargetWriteError, match="m: Read-only file system"):
            packer.analyze(folder / "data.parquet", out=disk / "m", tokens_column="ids")
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        packer.analyze(folder / "data.parquet", out=disk / "m", tokens_column="ids")
        assert packer.open_metrics(disk / "m").num_samples == NUM_ROWS
        assert [path.name for path in disk.iterdir()] == ["m"]
    finally:
        subprocess.run(["umount", disk], check=True)
