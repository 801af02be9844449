"""Reports: what a plan does, as numbers, as text, on a screen and as a page for a browser.

What draws on a screen is imported when it is first used: numbers and text need no rich.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from packer.report.calibration import write_calibration_html
from packer.report.html import html_page, write_html
from packer.report.summary import PlanSummary, summarize
from packer.report.survey import Survey, step_rows, survey
from packer.report.text import summary_lines

if TYPE_CHECKING:
    from packer.report.comparison import Comparison as Comparison
    from packer.report.comparison import compare as compare
    from packer.report.comparison import side_by_side as side_by_side
    from packer.report.screen import overview as overview
    from packer.report.screen import step_picture as step_picture

_DRAWN = {
    "Comparison": "comparison",
    "compare": "comparison",
    "side_by_side": "comparison",
    "overview": "screen",
    "step_picture": "screen",
}

__all__ = [
    "Comparison",
    "PlanSummary",
    "Survey",
    "compare",
    "html_page",
    "overview",
    "side_by_side",
    "step_picture",
    "step_rows",
    "summarize",
    "summary_lines",
    "survey",
    "write_calibration_html",
    "write_html",
]


def __getattr__(name: str) -> object:
    """Import what draws on a screen on first use."""
    if name not in _DRAWN:
        raise AttributeError(f"module 'packer.report' has no attribute {name!r}")
    value = getattr(import_module(f"packer.report.{_DRAWN[name]}"), name)
    globals()[name] = value
    return value
