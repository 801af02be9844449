"""Reports: what a plan does, as numbers, as text and as a page for a browser."""

from packer.report.comparison import Comparison, compare, side_by_side
from packer.report.html import html_page, write_html
from packer.report.overview import overview, step_picture
from packer.report.summary import PlanSummary, summarize
from packer.report.survey import Survey, step_rows, survey
from packer.report.text import summary_lines

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
    "write_html",
]
