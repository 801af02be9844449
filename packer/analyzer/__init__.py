"""Measuring data sets: units of work, run anywhere and continued after an interruption; metrics come out."""

from packer.analyzer.analysis import analyze
from packer.analyzer.dataset import analyze_dataset
from packer.analyzer.remeasure import verify_source
from packer.analyzer.result import AnalyzeResult
from packer.analyzer.sample_metrics import sample_metric
from packer.analyzer.suggestion import suggest_plan
from packer.jobs.progress import Progress

__all__ = [
    "AnalyzeResult",
    "Progress",
    "analyze",
    "analyze_dataset",
    "sample_metric",
    "suggest_plan",
    "verify_source",
]
