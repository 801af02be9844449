"""``packer doctor``: an installation that is in order, and ones that are not."""

import json
from importlib import metadata

import pytest
from click.testing import CliRunner
from packer.cli.main import cli

import packer
from packer import doctor


def run(*options):
    return CliRunner().invoke(cli, ["doctor", *options])


def test_an_installation_in_order():
    result = run()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"packer {packer.__version__}, Python 3.")
    assert any(line.split()[:2] == ["numpy", metadata.version("numpy")] for line in lines)
    assert any("kernels checked" in line and "in order" in line for line in lines)
    assert any("files checked" in line and "in order" in line for line in lines)


def test_for_machines():
    said = json.loads(run("--json").stdout)
    assert said["is_well"] is True
    assert {check["name"] for check in said["checks"]} == {"kernels", "files"}


def test_a_plan_that_is_another_than_elsewhere(monkeypatch):
    monkeypatch.setitem(doctor.HASHES, "mixed", "0" * 64)
    result = run()
    assert result.exit_code == 1
    assert "WRONG: the plan of mixed is" in result.stdout


def test_files_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    result = run()
    assert result.exit_code == 1
    assert "WRONG: FileNotFoundError" in result.stdout


@pytest.mark.parametrize(
    ("installed", "mark"), [("1.26.4", "too old"), (None, "missing"), ("2.0.0", None), ("10.0rc1", None)]
)
def test_versions_are_compared_as_numbers(monkeypatch, installed, mark):
    real = metadata.version

    def version(name):
        if name != "numpy":
            return real(name)
        if installed is None:
            raise metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(doctor.metadata, "version", version)
    numpy = next(package for package in doctor._packages() if package.name == "numpy")
    assert numpy.is_right is (mark is None)


def test_a_cache_that_cannot_be_written_is_told(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    diagnosis = doctor.Diagnosis(
        packer="1",
        python="3",
        platform="x",
        cores=1,
        cache_folder=doctor._cache()[0],
        cache_is_kept=doctor._cache()[1],
        packages=(),
        checks=(),
    )
    assert "compiled anew" in "\n".join(doctor.diagnosis_lines(diagnosis))
