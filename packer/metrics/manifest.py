"""``manifest.json`` of a metrics directory: what was measured, how, and the fingerprint that plans name."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packer.errors import MetricsError

MANIFEST_NAME = "manifest.json"
BLOCKS_NAME = "blocks.arrow"
MANIFEST_FORMAT = "packer-metrics"
MANIFEST_VERSION = 1
MANIFEST_HASH = "manifest_sha256"
MAX_SKIPPED_SAMPLES = 100


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
class BlockSummary:
    """The blocks of the data set, which ``blocks.arrow`` lists."""

    num_blocks: int
    num_bytes: int
    """Of all blocks together, decoded."""
    max_bytes: int
    """Of the largest one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySummary:
    """A metric that numbers the values of a column: equal values have equal numbers, −1 is none."""

    origin: str
    """The column, or the ``module:function`` that gave it."""
    num_values: int
    """Distinct ones."""
    max_count: int
    """Samples of the most frequent one."""
    num_nulls: int
    """Samples without a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole manifest.

    It holds no host, no time and no path of the data: the same command on the same data gives the same bytes
    anywhere. Only the tokenizer stands in ``definition`` as it was named, beside its hash.
    """

    num_samples: int
    num_nulls: int
    """Samples that are null in the main column: of length 0."""
    num_empties: int
    """Samples that are not null and have no token of their own: of length 0, or of special tokens alone."""
    sources: list[dict[str, Any]]
    """The files in their order, each with its row count and identity."""
    definition: dict[str, Any]
    """What the length of a sample is: columns, tokenizer, special tokens."""
    metrics: dict[str, MetricSummary]
    files: dict[str, FileDigest]
    """By path inside the directory."""
    num_skipped: int = 0
    """Samples that could not be read and were skipped: of length 0, and neither null nor empty."""
    skipped_samples: list[int] = field(default_factory=list)
    """The first `MAX_SKIPPED_SAMPLES` of them, by id."""
    functions: dict[str, str] = field(default_factory=dict)
    """Metrics beyond the definition's, each with the ``module:function`` that gave it."""
    tokens: dict[str, FileDigest] | None = None
    """The token files that were written of the same samples: ``bin`` and ``idx``."""
    keys: dict[str, KeySummary] = field(default_factory=dict)
    """Metrics that are keys, by name."""
    blocks: BlockSummary | None = None
    """None where nothing tells how the samples lie in files."""

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
        content[MANIFEST_HASH] = manifest_hash(content)
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def fingerprint_of(hashes: Mapping[str, str]) -> str:
    """Hash the hashes of the sample_to_metric files, by path; other files are derived from these."""
    named = sorted((path, sha256) for path, sha256 in hashes.items() if "_sample_to_metric." in path)
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def manifest_hash(content: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own hash, over one canonical spelling of its JSON.

    Raises:
        ValueError: it holds what is no JSON, such as NaN.
    """
    rest = {key: value for key, value in content.items() if key != MANIFEST_HASH}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


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
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise MetricsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MetricsError(f"{path} is damaged ({error}); analyze the data set again") from error
    if not isinstance(content, dict) or content.get("format") != MANIFEST_FORMAT:
        raise MetricsError(
            f"{path} is not the manifest of a metrics directory; name the --out of `packer analyze`"
        )
    version = content.get("version")
    if version != MANIFEST_VERSION or isinstance(version, bool):
        raise MetricsError(
            f"{folder} has metrics format version {version}, this packer reads version {MANIFEST_VERSION}; "
            "analyze the data set again with this packer, or use the one that wrote it"
        )
    try:
        intact = content[MANIFEST_HASH] == manifest_hash(content)
        manifest = _parsed(content)
        intact &= content["fingerprint"] == manifest.fingerprint
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise MetricsError(f"{path} is damaged ({error!r}); analyze the data set again") from error
    if not intact:
        raise MetricsError(f"{path} was changed after it was written: its hash differs; analyze again")
    return manifest


def _parsed(content: Mapping[str, Any]) -> Manifest:
    """Return a manifest whose every value is of its kind.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: one is not.
    """
    num_samples, num_nulls, num_empties = (
        _count(content[key]) for key in ("num_samples", "num_nulls", "num_empties")
    )
    for name in content["metrics"]:
        _refuse_other_folders(name, max_parts=1)
    tokens, blocks = content["tokens"], content.get("blocks")
    return Manifest(
        num_samples=num_samples,
        num_nulls=num_nulls,
        num_empties=num_empties,
        sources=[dict(source.items()) for source in content["sources"]],
        definition=dict(content["definition"].items()),
        metrics={name: _summary(summary) for name, summary in content["metrics"].items()},
        files=_digests(content["files"]),
        num_skipped=_count(content.get("num_skipped", 0)),
        skipped_samples=[_count(sample) for sample in content.get("skipped_samples", [])],
        functions={name: str(place) for name, place in content["functions"].items()},
        tokens=None if tokens is None else _digests({name: tokens[name] for name in ("bin", "idx")}),
        keys={name: _key(summary) for name, summary in content.get("keys", {}).items()},
        blocks=None if blocks is None else _blocks(blocks, content["files"]),
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _summary(content: dict[str, Any]) -> MetricSummary:
    if any(type(value) is not int for value in content.values()):
        raise ValueError(f"{content} is no summary")
    return MetricSummary(**content)


def _key(content: dict[str, Any]) -> KeySummary:
    counts = {name: _count(value) for name, value in content.items() if name != "origin"}
    return KeySummary(origin=str(content["origin"]), **counts)


def _blocks(content: dict[str, Any], files: Mapping[str, Any]) -> BlockSummary:
    if BLOCKS_NAME not in files:
        raise KeyError(BLOCKS_NAME)
    return BlockSummary(**{name: _count(content[name]) for name in content})


def _digests(content: dict[str, dict[str, Any]]) -> dict[str, FileDigest]:
    digests = {}
    for name, digest in content.items():
        _refuse_other_folders(name, max_parts=2)
        digests[name] = FileDigest(size=_count(digest["size"]), sha256=str(digest["sha256"]))
    return digests


def _refuse_other_folders(name: str, *, max_parts: int) -> None:
    """Refuse the path of a file that is not in the metrics directory itself."""
    parts = name.split("/")
    if len(parts) > max_parts or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not a name in this folder")
