"""The package as a whole: what is installed, and what an import or a help text costs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np

import packer

ROOT = Path(__file__).parent.parent
HEAVY = ("numba", "numpy", "pyarrow", "torch", "rich", "transformers")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_folder_of_the_package_is_installed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "packer").rglob("__init__.py")}
    assert listed == found | {"packer.cli"}


def test_help_imports_nothing_heavy() -> None:
    loaded = run_python(
        "import sys; from packer.cli.main import cli; cli.main(['--help'], standalone_mode=False);"
        f"print('LOADED', [name for name in {HEAVY} if name in sys.modules])"
    )
    assert loaded.endswith("LOADED []\n")


def test_analysis_and_planning_import_no_torch() -> None:
    run_python(
        "import sys; sys.modules['torch'] = None\n"
        "import packer.analyzer, packer.metrics, packer.plan, packer.planner, packer.report, packer.samples\n"
        "import packer.cli.analyze, packer.cli.plan, packer.cli.verify"
    )


def test_every_public_name_resolves() -> None:
    assert [name for name in packer.__all__ if getattr(packer, name, None) is None] == []


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(packer, "no_such_name")


ELSEWHERE = """
import os
import sys

sys.modules["fcntl"] = None  # as on Windows
for name in ("sched_getaffinity", "posix_fadvise", "statvfs"):  # as there, and on macOS
    delattr(os, name)

import numpy as np
import packer
from packer.errors import TargetWriteError


class Samples:
    def __len__(self):
        return 16

    def __getitem__(self, sample_id):
        return {"input_ids": np.full(4, sample_id)}


if __name__ == "__main__":  # workers are spawned
    plan = packer.load_plan(sys.argv[1])
    for step in packer.PlanLoader(plan, Samples(), num_workers=1, multiprocessing_context="spawn"):
        for batch in step:
            assert (batch["input_ids"][:, 0].numpy() == batch.sample_ids).all()
    config = packer.PlanConfig(max_tokens=8)
    packer.make_plan(np.full(8, 4), config)
    for write in (plan.save, lambda target: packer.make_plan([4], config, out=target)):
        try:
            write(sys.argv[2])
        except TargetWriteError as error:
            print(error, os.path.exists(sys.argv[2]))
"""


def test_plans_are_read_and_played_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A stand-in for Windows: what it lacks of POSIX is taken away."""
    packer.make_plan(np.full(16, 4), packer.PlanConfig(max_tokens=8), out=tmp_path / "plan")
    script = tmp_path / "script.py"
    script.write_text(ELSEWHERE)
    command = [sys.executable, str(script), str(tmp_path / "plan"), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("no locks that would keep two writers apart.* False\n", done.stdout)) == 2
