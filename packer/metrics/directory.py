"""A metrics directory, ours or DeepSpeed's: one integer per sample and metric, memory-mapped."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import MetricsError
from packer.metrics.blocks import Blocks, read_blocks
from packer.metrics.manifest import (
    BLOCKS_NAME,
    MANIFEST_NAME,
    Manifest,
    fingerprint_of,
    load_manifest,
    sha256_of,
)
from packer.mmididx import DEEPSPEED_DTYPES, MEGATRON_DTYPES, IndexFile, read_index
from packer.wording import counted

_CHUNK_ITEMS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The metrics of one data set; open it with ``open_metrics``. Pickles as little more than its path."""

    path: Path
    num_samples: int
    dtypes: dict[str, np.dtype[np.integer]]
    """Element type by metric."""
    manifest: Manifest | None
    """None where another tool wrote the directory."""
    warnings: tuple[str, ...]
    """What a user should know before a plan is made of this."""

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics there are."""
        return tuple(self.dtypes)

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Identity of each source file, in order; empty without a manifest."""
        return self.manifest.sources if self.manifest else []

    @property
    def definition(self) -> dict[str, Any]:
        """What the length of a sample is; empty without a manifest."""
        return self.manifest.definition if self.manifest else {}

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the sample_to_metric files; without a manifest it is computed on first use."""
        return self.manifest.fingerprint if self.manifest else fingerprint_of(self._hashes())

    def __repr__(self) -> str:
        origin = "" if self.manifest else ", without a manifest"
        samples = counted(self.num_samples, "sample")
        return f"Metrics({self.path}, {samples}, {', '.join(self.names)}{origin})"

    def metric(self, name: str) -> NDArray[np.integer]:
        """Map one metric: (num_samples,) integers of the type it was stored in.

        Raises:
            MetricsError: there is no such metric, or it cannot be read.
        """
        if name not in self.dtypes:
            raise MetricsError(
                f"{self.path} holds no metric {name!r}; it holds {', '.join(self.names)}. "
                "Analyze again with the columns that this metric needs"
            )
        if self.num_samples == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtypes[name])
        path = _prefix(self.path, name, "bin")
        try:
            return np.memmap(path, dtype=self.dtypes[name], mode="r", shape=(self.num_samples,))
        except (OSError, ValueError) as error:  # ValueError: shorter than when the directory was opened
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise MetricsError(f"cannot read {path}: {reason}") from error

    @cached_property
    def blocks(self) -> Blocks | None:
        """How the samples lie in files; None where nothing tells: another tool, or an older packer, measured.

        Raises:
            MetricsError: the file that lists them is missing or damaged.
        """
        if self.manifest is None or self.manifest.blocks is None:
            return None
        return read_blocks(self.path, self.manifest.files[BLOCKS_NAME], self.num_samples)

    def check_files(self) -> None:
        """Compare every file with the hash in the manifest; reads them all.

        Raises:
            MetricsError: a file is not what was written, by name.
        """
        if self.manifest is None:
            return
        for name, digest in self.manifest.files.items():
            if sha256_of(self.path / name) != digest.sha256:
                raise MetricsError(f"{self.path / name} is not the file that was written; analyze again")

    def _hashes(self) -> dict[str, str]:
        paths = [_prefix(self.path, name, suffix) for name in self.names for suffix in ("bin", "idx")]
        return {path.relative_to(self.path).as_posix(): sha256_of(path) for path in paths}


def open_metrics(path: str | os.PathLike[str]) -> Metrics:
    """Open a metrics directory that ``packer analyze`` or DeepSpeed's ``DataAnalyzer`` wrote.

    With a manifest this takes a moment at any size; without one, the index files are read and checked.

    Raises:
        MetricsError: no such directory; or a file of it is missing, truncated, foreign or of another version.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            raise MetricsError(f"{path} is not a directory; name the --out of `packer analyze`")
        if not (path / MANIFEST_NAME).is_file():
            return _open_foreign(path)
        manifest = load_manifest(path)
        dtypes = {name: _open_own(path, name, manifest) for name in manifest.metrics}
    except OSError as error:
        raise MetricsError(
            f"{path}: {str(error.strerror).lower()} ({error.filename}); make it readable for this user"
        ) from error
    return Metrics(path=path, num_samples=manifest.num_samples, dtypes=dtypes, manifest=manifest, warnings=())


def _open_own(path: Path, name: str, manifest: Manifest) -> np.dtype[np.integer]:
    for suffix in ("bin", "idx"):
        file = _prefix(path, name, suffix)
        digest = manifest.files.get(file.relative_to(path).as_posix())
        if digest is None or not file.is_file() or file.stat().st_size != digest.size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
            expected = f"{digest.size} bytes" if digest else "nothing"
            raise MetricsError(f"{file} is {found}, the manifest says {expected}; analyze the data set again")
    index = read_index(_prefix(path, name, "idx"), error=MetricsError)
    return _checked_dtype(path, name, index, manifest.num_samples)


def _open_foreign(path: Path) -> Metrics:
    names = sorted(p.name for p in path.iterdir() if _prefix(path, p.name, "idx").is_file())
    if not names:
        raise MetricsError(
            f"{path} holds no metrics: neither {MANIFEST_NAME} nor NAME/NAME_sample_to_metric.idx; "
            "name the --out of `packer analyze`, or the save_path of DeepSpeed's DataAnalyzer"
        )
    indexes = {name: read_index(_prefix(path, name, "idx"), error=MetricsError) for name in names}
    counts = {name: len(index.sizes) for name, index in indexes.items()}
    num_samples = counts[names[0]]
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise MetricsError(f"the metrics in {path} are of different data sets, by their samples: {listed}")
    dtypes = {name: _checked_dtype(path, name, index, num_samples) for name, index in indexes.items()}
    for name, index in indexes.items():
        _check_one_value_per_item(_prefix(path, name, "idx"), index, dtypes[name].itemsize)
    warning = (
        f"{path} has no {MANIFEST_NAME} (another tool wrote it): what was measured is not known, so neither "
        "can it be checked against the data set, nor can open_dataset take the columns from it"
    )
    return Metrics(path=path, num_samples=num_samples, dtypes=dtypes, manifest=None, warnings=(warning,))


def _checked_dtype(path: Path, name: str, index: IndexFile, num_samples: int) -> np.dtype[np.integer]:
    """Return the element type, once index, data file and number of samples agree on it."""
    index_path, data_path = _prefix(path, name, "idx"), _prefix(path, name, "bin")
    if len(index.sizes) != num_samples:
        raise MetricsError(
            f"{index_path} has {len(index.sizes)} values, {MANIFEST_NAME} says {num_samples} samples; "
            "analyze the data set again"
        )
    dtype = DEEPSPEED_DTYPES[index.dtype_code]
    try:
        data_bytes = data_path.stat().st_size
    except OSError as error:
        raise MetricsError(
            f"{index_path} has no readable {data_path.name} beside it: {error.strerror}"
        ) from error
    if data_bytes == num_samples * dtype.itemsize:
        return dtype
    megatron = MEGATRON_DTYPES[index.dtype_code]
    if megatron != dtype and data_bytes == num_samples * megatron.itemsize:
        raise MetricsError(
            f"{index_path} is in Megatron's dialect, where code {index.dtype_code} means {megatron}; "
            "metrics are read in DeepSpeed's only. If this is a token file, give it to `packer analyze`"
        )
    raise MetricsError(
        f"{data_path} has {data_bytes} bytes, its index says {num_samples} values of {dtype}: "
        f"{num_samples * dtype.itemsize} bytes; one of the two is truncated or foreign"
    )


def _check_one_value_per_item(path: Path, index: IndexFile, item_bytes: int) -> None:
    for start in range(0, len(index.sizes), _CHUNK_ITEMS):
        sizes = index.sizes[start : start + _CHUNK_ITEMS]
        pointers = index.pointers[start : start + _CHUNK_ITEMS]
        in_place = np.arange(start, start + len(sizes), dtype=np.int64) * item_bytes
        wrong = np.flatnonzero((sizes != 1) | (pointers != in_place))
        if wrong.size:
            item = int(wrong[0])
            raise MetricsError(
                f"{path} is no index of one value per sample: item {start + item} has {sizes[item]} values "
                f"at byte {pointers[item]}; metrics need exactly one, in order"
            )


def _prefix(path: Path, name: str, suffix: str) -> Path:
    return path / name / f"{name}_sample_to_metric.{suffix}"
