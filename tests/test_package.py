"""The package as a whole: what is installed, and what an import or a help text costs."""

import subprocess
import sys
import tomllib
from pathlib import Path

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
