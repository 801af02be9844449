"""What is drawn on a screen fits it, narrow or wide."""

import io

import pytest
from rich.console import Console

from packer.plan import plan_in_memory
from packer.report import overview, step_picture
from packer.report.screen import BAR_WIDTH, SPARK_WIDTH
from tests import plans


def drawn(what, width):
    """Return the lines of something rich on a screen of this width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_sparklines_are_as_wide_as_there_is_room(width):
    lengths = [100 + 10 * (step % 7) for step in range(300)]
    rows = [plans.Row(pieces=[(at, length)]) for at, length in enumerate(lengths)]
    plan = plan_in_memory(plans.facts(lengths, max_tokens=200), [plans.epoch(rows)], dropped=plans.drops())
    lines = drawn(overview(plan), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "\n".join(lines)
    (tokens,) = (line for line in lines if line.startswith(" tokens"))
    sparks = sum(character in "▁▂▃▄▅▆▇█" for character in tokens)
    assert sparks == SPARK_WIDTH if width == 120 else 12 <= sparks <= SPARK_WIDTH


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("kind", ["keep", "fill"])
def test_bars_are_drawn_to_one_scale(width, kind):
    plan, _ = plans.copying_plan(kind)
    lines = drawn(step_picture(plan, 0, 1), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "\n".join(lines)
    bars = [line.count("█") for line in lines[3:]]
    assert bars[0] == bars[1] >= 2
    assert lines[-1].rstrip().endswith({"keep": "filler, masked", "fill": "repeat"}[kind])
    if width == 120:
        assert bars[0] == BAR_WIDTH


@pytest.mark.parametrize("width", [80, 120])
def test_padding_shows_on_any_screen(width):
    plan, _ = plans.whole_plan()
    lines = drawn(step_picture(plan, 0, 1), width)
    assert all("░" in line for line in lines[3:])
    lengths = [line.count("█") + line.count("░") for line in lines[3:]]
    assert lengths[0] > lengths[1]  # 2 × 7 and 2 × 6
