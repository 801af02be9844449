"""What this user may not read or write: one line that names it, exit 1, nothing left; and then it works."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.analyzer import analyze
from packer.planner import PlanConfig, make_plan

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user, and is refused nothing"
)

NOBODY = 65534
# The interpreter may lie where nobody may read: all that is needed is imported, and was used, before.
AS_NOBODY = """
import os, sys
from cli.main import cli

def run(arguments):
    try:
        cli(arguments)
    except SystemExit as end:
        return end.code or 0
    return 0

if __name__ == "__main__":
    warm_up, *arguments = sys.argv[1:]
    where = arguments.index("--out") if "--out" in arguments else None
    if where is not None:
        assert run([*arguments[: where + 1], warm_up, *arguments[where + 2 :]]) == 0
    else:
        assert run(arguments) == 0
    print("--", file=sys.stderr, flush=True)
    os.setgroups([])
    os.setegid(int(os.environ["NOBODY"]))
    os.seteuid(int(os.environ["NOBODY"]))
    sys.exit(run(arguments))
"""


@pytest.fixture
def folder():
    # Not pytest's own folder: that is for one user alone.
    with tempfile.TemporaryDirectory(prefix="packer-") as place:
        made = Path(place)
        made.chmod(0o755)
        if not all(above.stat().st_mode & 0o001 for above in made.parents):
            pytest.skip(f"another user may not enter {made.parent}")
        pq.write_table(pa.table({"ids": [[1] * (n % 9) for n in range(200)]}), made / "data.parquet")
        analyze(made / "data.parquet", out=made / "metrics", tokens_column="ids")
        make_plan(made / "metrics", PlanConfig(max_tokens=64), out=made / "plan")
        (made / "place").mkdir(mode=0o755)
        (made / "run.py").write_text(AS_NOBODY)
        yield made


COMMANDS = {
    "analyze": ["analyze", "data.parquet", "--tokens-column", "ids"],
    "plan": ["plan", "metrics", "--max-tokens", "64"],
    "export": ["export", "plan", "--to", "npz"],
}
READ = {
    "analyze": "data.parquet",
    "plan": "metrics/seqlen/seqlen_sample_to_metric.bin",
    "export": "plan/dropped.arrow",
}


def as_nobody(folder: Path, *arguments: str) -> tuple[int, str]:
    environment = os.environ | {"NOBODY": str(NOBODY), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, folder / "run.py", folder / "warm-up", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "--\n" in ended.stderr, ended.stderr
    subprocess.run(["rm", "-rf", folder / "warm-up"], check=True)
    return ended.returncode, ended.stderr.partition("--\n")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_may_not_be_written(folder, command):
    arguments = [*COMMANDS[command], "--out", "place/out"]
    code, errors = as_nobody(folder, *arguments)
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith("Error: ")
    assert "place" in errors
    assert "ermission denied" in errors
    assert not list((folder / "place").iterdir())
    (folder / "place").chmod(0o777)
    assert as_nobody(folder, *arguments) == (0, "")
    assert [path.name for path in (folder / "place").iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_may_not_be_read(folder, command):
    (folder / "place").chmod(0o777)
    path = folder / READ[command]
    path.chmod(0o600)
    os.chown(path, NOBODY - 1, NOBODY - 1)
    arguments = [*COMMANDS[command], "--out", "place/out"]
    code, errors = as_nobody(folder, *arguments)
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith("Error: ")
    assert path.name in errors
    assert "ermission denied" in errors
    assert not list((folder / "place").iterdir())
    path.chmod(0o644)
    assert as_nobody(folder, *arguments) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["analyze", "plan"])
def test_a_folder_that_may_not_be_entered(folder, command):
    (folder / "place").chmod(0o777)
    path = folder / {"analyze": "data", "plan": "metrics"}[command]
    path.mkdir(exist_ok=True)
    path.chmod(0o700)
    arguments = ["analyze", "data", "--tokens-column", "ids"] if command == "analyze" else COMMANDS[command]
    if command == "analyze":
        (folder / "data.parquet").rename(path / "x.parquet")
    code, errors = as_nobody(folder, *arguments, "--out", "place/out")
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith(f"Error: {path.name}")
    assert "permission denied" in errors
    assert not list((folder / "place").iterdir())
