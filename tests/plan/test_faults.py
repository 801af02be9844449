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
from packer.plan import verify_plan, write_plan
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


@pytest.mark.parametrize("kind", ["plan", "export"])
def test_of_several_writers_one_wins(tmp_path, kind):
    source_of(kind, tmp_path / "out")
    writers = [child(kind, tmp_path / "out") for _ in range(3)]
    ends = [writer.communicate() for writer in writers]
    done = [end for end in ends if end[0] == "begin\ndone\n"]
    assert len(done) == 1
    for _, errors in ends:
        assert not errors or "TargetBusyError" in errors or "TargetExistsError" in errors
    check_whole(kind, tmp_path / "out")


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


# What one of eight processes does: it plans, opens, verifies and plays, and says what it saw.
PLAN_AND_LOAD = """
import hashlib, sys
import numpy as np
from packer.plan import verify_plan
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader

class Tokens:
    def __len__(self):
        return 20_000

    def __getitem__(self, sample_id):
        return {"input_ids": np.full(1 + sample_id * 7919 % 500, sample_id)}

if __name__ == "__main__":
    metrics, out = sys.argv[1:]
    plan = make_plan(metrics, PlanConfig(max_tokens=4096, dp_size=2), out=out)
    verify_plan(plan.path, metrics=metrics)
    seen = hashlib.sha256(plan.fingerprint.encode())
    for batch in PlanLoader(plan, Tokens(), dp_rank=1, dp_size=2, num_workers=2).microbatches():
        seen.update(batch.sample_ids.tobytes() + batch["input_ids"].numpy().tobytes())
    print(seen.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_processes_plan_and_load_at_once(tmp_path):
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", [1 + i * 7919 % 500 for i in range(20_000)])
    # One compile cache for all, and nothing in it.
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    (tmp_path / "run.py").write_text(PLAN_AND_LOAD)
    runs = [
        subprocess.Popen(
            [sys.executable, tmp_path / "run.py", metrics, tmp_path / f"plan-{number}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    ends = [run.communicate() for run in runs]
    assert [errors for _, errors in ends] == [""] * 8
    assert len({seen for seen, _ in ends}) == 1
    assert any((tmp_path / "cache").rglob("*.nbi"))
    contents = [
        {path.relative_to(plan): path.read_bytes() for path in plan.rglob("*") if path.is_file()}
        for plan in sorted(tmp_path.glob("plan-*"))
    ]
    assert len(contents) == 8
    assert all(other == contents[0] for other in contents)
