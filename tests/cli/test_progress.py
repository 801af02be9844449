"""How far a piece of work is, on a terminal and off it."""

import io
import sys
from time import monotonic, sleep

import pytest

from cli import progress as module
from cli.analyze import _show as show_analysis
from cli.plan import _show as show_plan
from cli.progress import ProgressDisplay, compact
from packer.analyzer import Progress
from packer.planner import PlanProgress
from packer.planner.progress import Phase


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only element is the time."""
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def test_times_are_counted_on_where_the_work_is_silent(clock):
    display = ProgressDisplay("checking")
    assert display.line() == "checking: 0%, 0:00 passed"
    clock[0] += 30
    display.count(25, 100)
    assert display.line() == "checking: 25%, 0:30 passed, 1:30 left"
    clock[0] += 60
    assert display.line() == "checking: 25%, 1:30 passed, 0:30 left"
    clock[0] += 3600
    assert display.line() == "checking: 25%, 1:01:30 passed, 0:00 left"


def test_an_analysis_tells_its_rates(clock):
    display = ProgressDisplay("reading")
    clock[0] += 60
    show_analysis(
        display,
        Progress(
            stage="measuring",
            fraction=0.3,
            num_rows=60_000,
            num_tokens=15_000_000,
            seconds=60.0,
            seconds_left=140.0,
        ),
    )
    assert display.line() == "measuring: 30%, 1.0k rows/s, 250k tokens/s, 1:00 passed, 2:20 left"


def test_a_plan_tells_its_phase_and_epoch(clock):
    display = ProgressDisplay("opening")
    state = {"num_samples": 100_000_000, "num_epochs": 3, "fraction": 0.4, "seconds": 60.0}
    show_plan(display, PlanProgress(phase=Phase.PACK, epoch=1, seconds_left=90.0, **state))
    assert display.line() == "packing epoch 2 of 3: 40%, 100M samples, 0:00 passed, 1:30 left"
    show_plan(display, PlanProgress(phase=Phase.FLUSH, epoch=None, seconds_left=None, **state))
    assert display.line().startswith("flushing to disk: 40%")


def test_off_a_terminal_a_line_comes_from_time_to_time(monkeypatch, capsys):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.01)
    lines = ""
    with ProgressDisplay("packing") as display:
        display.show(0.5, left=7.0, detail="5k samples")
        give_up_at = monotonic() + 60
        while lines.count("\n") < 2 and monotonic() < give_up_at:
            sleep(0.01)
            lines += capsys.readouterr().err
    assert lines.startswith("packing: 50%, 5k samples, 0:00 passed, 0:07 left\n")
    assert lines.count("\n") >= 2


def test_short_work_is_silent_off_a_terminal(capsys):
    with ProgressDisplay("packing") as display:
        display.count(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("stage", "detail", "left", "times"),
    [
        ("laying out epoch 12 of 12", "1.5G samples", 3725.0, "0:00 passed, 1:02:05 left"),
        ("measuring", "99.9k rows/s, 99.9M tokens/s", 750.0, "0:00 passed, 12:30 left"),
    ],
)
def test_on_a_terminal_a_bar_fits_and_vanishes(monkeypatch, width, stage, detail, left, times):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay("opening") as display:
        display.show(0.45, stage=stage, left=left, detail=detail)
        display._bar.refresh()
    shown = terminal.getvalue()
    assert all(piece in shown for piece in (stage, "45%", detail, times))
    assert shown.endswith("\x1b[2K")  # the line is cleared


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (812.4, "812"), (9_432, "9.4k"), (183e6, "183M"), (2.5e9, "2.5G"), (7e12, "7.0T")],
)
def test_compact_numbers(number, text):
    assert compact(number) == text
