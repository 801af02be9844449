"""``manifest.json`` of a metrics directory: what was measured, how, and the fingerprint that plans name."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packer.errors import MetricsError

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "packer-metrics"
MANIFEST_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """What a file of the directory must be."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSummary:
    """One metric over all samples; null ones count as 0."""

    min: int
    median: int
    """The lower one, where two samples share the middle."""
    p99: int
    """The smallest value that at least 99% of the samples do not exceed."""
    max: int
    total: int
    """Exact at any size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole manifest. It holds no path, host or time: the same data give the same bytes anywhere."""

    num_samples: int
    num_nulls: int
    """Samples that are null in the main column: of length 0."""
    num_empties: int
    """Samples of length 0 that are not null."""
    sources: list[dict[str, Any]]
    """The files in their order, each with its row count and identity."""
    definition: dict[str, Any]
    """What the length of a sample is: columns, tokenizer, special tokens."""
    metrics: dict[str, MetricSummary]
    files: dict[str, FileDigest]
    """By path inside the directory."""
    functions: dict[str, str] = field(default_factory=dict)
    """Metrics beyond the definition's, each with the ``module:function`` that gave it."""
    tokens: dict[str, FileDigest] | None = None
    """The token files that were written of the same samples: ``bin`` and ``idx``."""

    @property
    def fingerprint(self) -> str:
        """Hash over the sample_to_metric files; every plan names the one that it was made from."""
        return fingerprint_of({name: digest.sha256 for name, digest in self.files.items()})

    def save(self, folder: Path) -> None:
        """Write ``manifest.json``."""
        content = {
            "format": MANIFEST_FORMAT,
            "version": MANIFEST_VERSION,
            **asdict(self),
            "fingerprint": self.fingerprint,
        }
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def fingerprint_of(hashes: Mapping[str, str]) -> str:
    """Hash the hashes of the sample_to_metric files, by path; other files are derived from these."""
    named = sorted((path, sha256) for path, sha256 in hashes.items() if "_sample_to_metric." in path)
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file.

    Raises:
        MetricsError: it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise MetricsError(f"cannot read {path}: {error.strerror}") from error


def load_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json`` and refuse what this version does not understand.

    Raises:
        MetricsError: damaged, foreign, of another version, or edited after it was written.
    """
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MetricsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MetricsError(f"{path} is damaged ({error}); analyze the data set again") from error
    if not isinstance(content, dict) or content.get("format") != MANIFEST_FORMAT:
        raise MetricsError(
            f"{path} is not the manifest of a metrics directory; name the --out of `packer analyze`"
        )
    version = content.get("version")
    if version != MANIFEST_VERSION:
        raise MetricsError(
            f"{folder} has metrics format version {version}, this packer reads version {MANIFEST_VERSION}; "
            "analyze the data set again with this packer, or use the one that wrote it"
        )
    try:
        manifest = Manifest(
            num_samples=int(content["num_samples"]),
            num_nulls=int(content["num_nulls"]),
            num_empties=int(content["num_empties"]),
            sources=list(content["sources"]),
            definition=dict(content["definition"]),
            metrics={name: MetricSummary(**summary) for name, summary in content["metrics"].items()},
            files=_digests(content["files"]),
            functions=dict(content["functions"]),
            tokens=None if content["tokens"] is None else _digests(content["tokens"]),
        )
        intact = content["fingerprint"] == manifest.fingerprint
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MetricsError(f"{path} is damaged ({error!r}); analyze the data set again") from error
    if not intact:
        raise MetricsError(f"{path} was edited: its fingerprint is not that of its files; analyze again")
    return manifest


def _digests(content: dict[str, dict[str, Any]]) -> dict[str, FileDigest]:
    return {name: FileDigest(**digest) for name, digest in content.items()}
