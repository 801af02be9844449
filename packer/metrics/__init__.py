"""Metrics directories: DeepSpeed's files, a manifest beside them, and one reader for ours and theirs."""

from packer.metrics.directory import Metrics, open_metrics
from packer.metrics.manifest import (
    MANIFEST_NAME,
    MAX_SKIPPED_SAMPLES,
    FileDigest,
    Manifest,
    MetricSummary,
    load_manifest,
    sha256_of,
)
from packer.metrics.writer import HashedFile, write_items, write_sample_to_metric

__all__ = [
    "MANIFEST_NAME",
    "MAX_SKIPPED_SAMPLES",
    "FileDigest",
    "HashedFile",
    "Manifest",
    "MetricSummary",
    "Metrics",
    "load_manifest",
    "open_metrics",
    "sha256_of",
    "write_items",
    "write_sample_to_metric",
]
