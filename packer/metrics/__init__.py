"""Metrics directories: DeepSpeed's files, a manifest beside them, and one reader for ours and theirs."""

from packer.metrics.blocks import Blocks, read_blocks, write_blocks
from packer.metrics.directory import Metrics, open_metrics
from packer.metrics.manifest import (
    BLOCKS_NAME,
    MANIFEST_NAME,
    MAX_SKIPPED_SAMPLES,
    BlockSummary,
    FileDigest,
    KeySummary,
    Manifest,
    MetricSummary,
    load_manifest,
    sha256_of,
)
from packer.metrics.writer import HashedFile, write_items, write_sample_to_metric

__all__ = [
    "BLOCKS_NAME",
    "MANIFEST_NAME",
    "MAX_SKIPPED_SAMPLES",
    "BlockSummary",
    "Blocks",
    "FileDigest",
    "HashedFile",
    "KeySummary",
    "Manifest",
    "MetricSummary",
    "Metrics",
    "load_manifest",
    "open_metrics",
    "read_blocks",
    "sha256_of",
    "write_blocks",
    "write_items",
    "write_sample_to_metric",
]
