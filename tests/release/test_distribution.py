"""The distribution: what is built, checked, and installed where the repository is not."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(900)]


def run(*command, cwd, env=None):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, cwd=cwd, env=env
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def build(*options, cwd):
    return run(sys.executable, "-m", "build", "--no-isolation", *options, ".", cwd=cwd)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build both distributions from what git would hand out: a checkout, not this folder's leftovers."""
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    said = run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ".", cwd=checkout
    )
    assert "Deprecat" not in said
    return folder / "dist"


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=built)
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "packer").rglob("*.py")}
    sources |= {f"packer/cli/{path.name}" for path in (ROOT / "cli").glob("*.py")}
    sources |= {"packer/py.typed", "packer/report/page.html", "packer/report/page.js"}
    assert inside == sources


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        tmp_path / "dist",
        ".",
        cwd=folder,
    )
    (again,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_a_stranger_installs_it_and_takes_the_three_steps(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
        f"{wheel}[text,train]",
        cwd=tmp_path,
    )
    home = tmp_path / "work"
    shutil.copytree(ROOT / "examples" / "data", home / "examples" / "data")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    env["PATH"] = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
    assert "Commands" in run(environment / "bin" / "packer", "--help", cwd=home, env=env)
    assert "in order" in run(environment / "bin" / "packer", "doctor", cwd=home, env=env)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = readme[readme.index("**1. Measure**") :]
    fences = re.findall(r"^```(bash|python)\n(.*?)^```$", steps, re.DOTALL | re.MULTILINE)
    first_python = next(at for at, (language, _) in enumerate(fences) if language == "python")
    for language, text in fences[: first_python + 1]:
        if language == "bash":
            run("bash", "-euo", "pipefail", "-c", text, cwd=home, env=env)
        else:
            (home / "train.py").write_text(text)
            run(python, "-W", "error::DeprecationWarning:packer", "train.py", cwd=home, env=env)
    assert "cli" not in run(
        python, "-c", "import importlib.util as u; print(u.find_spec('cli') and 'cli')", cwd=home, env=env
    )
