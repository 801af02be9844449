"""Kills, full disks, read-only places, several writers: the target is whole or absent, and a rerun works."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packer.errors import TargetExistsError, TargetWriteError
from packer.plan import load_plan, verify_plan, write_plan
from packer.plan.export import MARKER, export_plan
from tests import plans

NUM_ROWS, NUM_EPOCHS = 150_000, 2

# What a child does: says when it begins, writes, says when it is done.
WRITE = {
    "plan": """
        facts, epochs = plans.many_rows({num_rows}, {num_epochs})
        print("begin", flush=True)
        write_plan(sys.argv[1], facts, epochs, dropped=plans.drops(), overwrite=len(sys.argv) > 2)
    """,
    "export": """
        plan = load_plan(sys.argv[1] + "-source")
        print("begin", flush=True)
        export_plan(plan, sys.argv[1], to="npz", overwrite=len(sys.argv) > 2)
    """,
}


def child(kind: str, out: Path, *arguments: str) -> subprocess.Popen:
    code = "\n".join(
        [
            "import sys",
            "from packer.plan import load_plan, write_plan",
            "from packer.plan.export import export_plan",
            "from tests import plans",
            *(line.strip() for line in WRITE[kind].splitlines()),
            'print("done", flush=True)',
        ]
    ).format(num_rows=NUM_ROWS, num_epochs=NUM_EPOCHS)
    command = [sys.executable, "-c", code, str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def source_of(kind: str, out: Path) -> None:
    if kind == "export":
        write_plan(f"{out}-source", *plans.many_rows(NUM_ROWS, NUM_EPOCHS), dropped=plans.drops())


def check_whole(kind: str, out: Path) -> None:
    if kind == "plan":
        verify_plan(out)
    else:
        assert (out / MARKER).is_file()
        assert len(list(out.glob("*.npz"))) == NUM_EPOCHS + 1


def write_after_kills(kind: str, out: Path, kills: int, *, overwrite: bool) -> None:
    """Kill a writer at random moments; after each kill the target is whole or as it was before."""
    choice = random.Random(kind)
    source_of(kind, out)
    start = time.monotonic()
    process = child(kind, out)
    assert process.stdout.readline() == "begin\n"
    start = time.monotonic()
    process.communicate()
    seconds = time.monotonic() - start
    check_whole(kind, out)
    if not overwrite:
        subprocess.run(["rm", "-r", str(out)], check=True)
    for _ in range(kills):
        process = child(kind, out, *(["--overwrite"] if overwrite else []))
        assert process.stdout.readline() == "begin\n"
        time.sleep(choice.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        finished = process.communicate()[0] == "done\n"
        if out.exists():
            check_whole(kind, out)
            if not overwrite:
                subprocess.run(["rm", "-r", str(out)], check=True)
        else:
            # Between the two renames of a replacement the old one stands aside; the next run puts it back.
            assert not finished
    process = child(kind, out, *(["--overwrite"] if overwrite else []))
    assert process.communicate()[0] == "begin\ndone\n"
    check_whole(kind, out)
    left = {path.name for path in out.parent.iterdir()} - {out.name, f"{out.name}-source"}
    assert not left


@pytest.mark.parametrize("kind", ["plan", "export"])
def test_killed_writers(tmp_path, kind):
    write_after_kills(kind, tmp_path / "out", 2, overwrite=kind == "plan")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["plan", "export"])
def test_writers_killed_many_times(tmp_path, kind, overwrite):
    write_after_kills(kind, tmp_path / "out", 40, overwrite=overwrite)


def test_of_several_writers_one_wins(tmp_path):
    writers = [child("plan", tmp_path / "out") for _ in range(3)]
    ends = [writer.communicate() for writer in writers]
    done = [end for end in ends if end[0] == "begin\ndone\n"]
    assert len(done) == 1
    for _, errors in ends:
        assert not errors or "TargetBusyError" in errors or "TargetExistsError" in errors
    check_whole("plan", tmp_path / "out")


@pytest.fixture
def disk(tmp_path):
    """Yield a file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", ["plan", "export"])
def test_a_full_disk_and_a_read_only_one(disk, tmp_path, kind):
    made = plans.many_rows(NUM_ROWS, NUM_EPOCHS)
    plan = write_plan(tmp_path / "source", *made, dropped=plans.drops())

    def write():
        if kind == "plan":
            write_plan(disk / "out", *made, dropped=plans.drops())
        else:
            export_plan(plan, disk / "out", to="parquet")

    with pytest.raises(TargetWriteError, match=r"out: .*No space left on device"):
        for attempt in range(8 if kind == "export" else 1):  # Parquet is small: fill the disk with it
            write()
            (disk / "out").rename(disk / f"out-{attempt}")
    assert not (disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(TargetWriteError, match="Read-only file system"):
        write()
    subprocess.run(["mount", "-o", "remount,rw,size=100m", str(disk)], check=True)
    write()
    if kind == "plan":
        verify_plan(disk / "out")
    with pytest.raises(TargetExistsError):
        write()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_processes_plan_and_read_at_once(tmp_path):
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", [1 + i * 7919 % 500 for i in range(20_000)])
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "packer", "plan", str(metrics), "--max-tokens", "2048", "--dp-size", "4"]
    planners = [
        subprocess.Popen([*command, "--out", str(tmp_path / f"plan-{number}")], env=environment)
        for number in range(8)
    ]
    assert [planner.wait() for planner in planners] == [0] * 8
    assert len({load_plan(tmp_path / f"plan-{number}").fingerprint for number in range(8)}) == 1
    readers = [
        subprocess.Popen([sys.executable, "-m", "packer", "verify", str(tmp_path / "plan-0")])
        for _ in range(8)
    ]
    assert [reader.wait() for reader in readers] == [0] * 8
