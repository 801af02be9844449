"""Writing metric files: DeepSpeed's ``.bin`` and ``.idx``, hashed on their way to the disk."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from packer.metrics.manifest import FileDigest
from packer.mmididx import DEEPSPEED_DTYPES, write_index

_CODES = {dtype: code for code, dtype in DEEPSPEED_DTYPES.items()}


class HashedFile:
    """A new file that knows the digest of what was written into it."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._hash = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._stream.write(data)
        self._hash.update(data)
        self._size += len(data)

    @property
    def digest(self) -> FileDigest:
        """Size and hash of what was written so far."""
        return FileDigest(size=self._size, sha256=self._hash.hexdigest())


def write_items(
    prefix: Path,
    values: Iterable[NDArray[np.integer]],
    sizes: NDArray[np.integer],
    dtype: np.dtype[np.integer],
    document_index: NDArray[np.int64],
) -> dict[str, FileDigest]:
    """Write ``PREFIX.bin`` and ``PREFIX.idx`` in DeepSpeed's dialect.

    Args:
        prefix: path without the suffixes; its folder exists.
        values: pieces of the ``.bin`` file in order, each of which fits ``dtype``.
        sizes: (N,) values of each item.
        dtype: one of DeepSpeed's.
        document_index: item numbers at which documents begin and end.

    Returns:
        the digest of each file, by its name.
    """
    paths = {suffix: prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "idx")}
    with HashedFile(paths["bin"]) as data:
        for piece in values:
            data.write(piece.astype(dtype.newbyteorder("<"), copy=False).tobytes())
    with HashedFile(paths["idx"]) as index:
        write_index(
            index.write,
            sizes,
            dtype_code=_CODES[dtype],
            item_bytes=dtype.itemsize,
            document_index=document_index,
        )
    return {paths["bin"].name: data.digest, paths["idx"].name: index.digest}


def write_sample_to_metric(
    folder: Path,
    name: str,
    values: Iterable[NDArray[np.integer]],
    num_samples: int,
    dtype: np.dtype[np.integer],
) -> dict[str, FileDigest]:
    """Write ``NAME/NAME_sample_to_metric.bin`` and ``.idx``: one value per sample, in one document.

    Args:
        folder: the metrics directory.
        name: the metric.
        values: the metric of each sample, in pieces.
        num_samples: how many values there are altogether.
        dtype: int32, or int64 where a value needs it.

    Returns:
        the digest of each file, by its path inside ``folder``.
    """
    (folder / name).mkdir(exist_ok=True)
    digests = write_items(
        folder / name / f"{name}_sample_to_metric",
        values,
        np.broadcast_to(np.int32(1), num_samples),
        dtype,
        np.array([0, num_samples], dtype=np.int64),
    )
    return {f"{name}/{file_name}": digest for file_name, digest in digests.items()}
