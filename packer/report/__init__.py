"""Reports: what a plan does, as numbers and as text for people."""

from packer.report.summary import PlanSummary, summarize
from packer.report.text import summary_lines

__all__ = ["PlanSummary", "summarize", "summary_lines"]
