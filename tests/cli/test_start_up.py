"""What a command imports before it works: no more than it needs."""

import subprocess
import sys
from textwrap import dedent

from tests import plans

HEAVY = {"pandas", "torch", "fsspec", "rich", "asyncio", "ssl", "tokenizers", "transformers", "ray"}


def modules_of(program):
    """Return the packages that a program has imported by its end."""
    program = (
        dedent(program) + "import sys\nprint('MODULES', *{name.partition('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(run.stdout.rpartition("MODULES")[2].split())


def test_planning(tmp_path):
    metrics = plans.write_metric(tmp_path / "metrics", "seqlen", [*range(1, 100)])
    arguments = ["plan", str(metrics), "--out", str(tmp_path / "plan"), "--max-tokens", "99"]
    found = modules_of(f"""
        from numba.core import entrypoints
        entrypoints.init_all = lambda: None  # whatever extensions of numba happen to be installed
        from packer.cli.main import cli
        cli.main({[*arguments, "--max-seqlen", "50", "--too-long", "drop"]}, standalone_mode=False)
    """)
    assert {"pyarrow", "numba", "click"} <= found
    assert not HEAVY & found


def test_reading_a_plan(tmp_path):
    plan, _ = plans.whole_plan()
    plan.save(tmp_path / "plan")
    found = modules_of(f"""
        from packer.plan import load_plan
        plan = load_plan({str(tmp_path / "plan")!r})
        plan.epoch(1).microbatch(3)
        next(plan.dropped())
        list(plan.epoch(0).steps())
    """)
    assert "pyarrow" in found
    assert not (HEAVY | {"numba", "click"}) & found


def test_help_and_wrong_options():
    for arguments in (["plan", "--help"], ["plan", "x", "--out", "y", "--max-tokens", "0"]):
        found = modules_of(f"""
            from packer.cli.main import cli
            import contextlib
            with contextlib.suppress(SystemExit):
                cli.main({arguments})
        """)
        assert not (HEAVY | {"numba"}) & found
