"""Five million tokens of three real sources: planned by the command line, checked by a program of its own."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.launches import EXAMPLES, run

CHECK = EXAMPLES / "check_mixture.py"


def check(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, CHECK, folder], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example's folder, and what it printed of its first steps."""
    out = tmp_path_factory.mktemp("mixture")
    return out, run(EXAMPLES / "mixture.py", "--out", out, "--steps", "2", "--device", "cpu")


@pytest.mark.slow
def test_shares_total_and_passes_hold_by_a_program_that_shares_no_code(made: tuple[Path, str]) -> None:
    out, _ = made
    done = check(out / "plan")
    assert done.returncode == 0, done.stderr
    for name, share in (("peps", 50), ("code", 30), ("instructions", 20)):
        assert f"{name}: {share}% in every 100 steps" in done.stdout
    passes = {source["name"]: source["passes"] for source in _header(out / "plan")["sources"]}
    assert min(passes.values()) > 1
    assert max(passes.values()) > 2


@pytest.mark.slow
def test_the_loss_of_each_source_is_told(made: tuple[Path, str]) -> None:
    _, shown = made
    line = next(line for line in shown.splitlines() if line.startswith("step 0,"))
    losses = dict(part.split() for part in line.split(": ", 1)[1].split(", "))
    assert list(losses) == ["peps", "code", "instructions"]
    assert all(8 < float(loss) < 9 for loss in losses.values()), "about ln 4096 before anything is learnt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h["phases"][0]["shares"].update(peps=0.48), "its share is 0.48"),
        (lambda h: h["config"].update(total_tokens=5_100_000), "asked 5100000"),
        (lambda h: h["sources"][0].update(num_passes=2), "peps: used 3 times in 2 passes"),
        (lambda h: h["sources"][1].update(num_samples=180), "ValueError|AssertionError"),
    ],
)
def test_the_program_refuses_other_shares_totals_and_passes(made, tmp_path: Path, edit, message: str) -> None:
    header = _header(made[0] / "plan")
    edit(header)
    (tmp_path / "plan.json").write_text(json.dumps(header))
    (tmp_path / "epoch-00000").symlink_to(made[0] / "plan" / "epoch-00000")
    done = check(tmp_path)
    assert done.returncode == 1
    assert any(part in done.stderr for part in message.split("|"))


def test_the_program_reads_with_pyarrow_alone() -> None:
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(CHECK.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"pyarrow"}


def _header(folder: Path) -> dict:
    return json.loads((folder / "plan.json").read_text(encoding="utf-8"))
