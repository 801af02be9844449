"""The tokens of a text, kept as a Megatron ``.bin/.idx`` pair, since it was tokenized to be measured."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, MetricsError, TargetExistsError, TargetWriteError
from packer.metrics import MANIFEST_NAME, FileDigest, HashedFile, load_manifest, sha256_of
from packer.mmididx import MEGATRON_DTYPES, read_index, write_index
from packer.publish import exclusive_lock
from packer.samples import LengthDefinition
from packer.samples.definition import tokenizer_of

_SUFFIXES = ("bin", "idx")
_UINT16_IDS = 65_500  # Megatron's own bound


class TokenFiles:
    """``PREFIX.bin`` and ``PREFIX.idx``, written under other names and renamed when both are whole."""

    def __init__(self, prefix: str | os.PathLike[str], definition: LengthDefinition) -> None:
        """Choose the type of the ids by the vocabulary: uint16 or int32, as Megatron does.

        Raises:
            ConfigError: the lengths are not those of a tokenized text.
        """
        if not definition.is_tokenized:
            raise ConfigError(
                "--write-tokens keeps the tokens of a text; it needs --text-column or --messages-column"
            )
        if definition.is_pair:
            raise ConfigError("--write-tokens keeps one sequence a sample, not pairs; leave it out")
        self._shown = os.fspath(prefix)
        self.prefix = Path(os.path.abspath(prefix))
        small = tokenizer_of(definition).vocab_size < _UINT16_IDS
        self.dtype: np.dtype[np.integer] = np.dtype(np.uint16) if small else np.dtype(np.int32)

    @contextmanager
    def reserved(self, folder: Path, *, overwrite: bool) -> Iterator[None]:
        """Hold the names against other runs; what was not published is removed in the end.

        Args:
            folder: the unpublished metrics directory; its manifest is written before the tokens are named.
            overwrite: replace an existing pair.

        Raises:
            TargetExistsError: there is a file that may not be replaced.
            TargetBusyError: another run writes the same files.
        """
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(self.prefix):
                self._check_free(folder, overwrite)
                try:
                    yield
                finally:
                    for suffix in _SUFFIXES:
                        self._staged(suffix).unlink(missing_ok=True)
        except BaseException:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
            raise

    def _check_free(self, folder: Path, overwrite: bool) -> None:
        left = _tokens_of_killed_run(folder)
        for suffix in _SUFFIXES:
            path = self._path(suffix)
            if not os.path.lexists(path):
                continue
            if left is not None and path.is_file() and sha256_of(path) == left[suffix].sha256:
                continue
            if not overwrite:
                raise TargetExistsError(
                    f"{self._shown}.{suffix} exists already; choose another --write-tokens or add --overwrite"
                )
            if suffix == "idx":
                read_index(path, error=TargetExistsError)  # what is no index is nothing to replace

    def write(
        self, token_ids: Iterable[NDArray[np.integer]], sizes: NDArray[np.integer]
    ) -> dict[str, FileDigest]:
        """Write both files under their temporary names; every sample is a document.

        Args:
            token_ids: the ids of all samples end to end, in pieces.
            sizes: (samples,) how many each sample has.
        """
        try:
            with HashedFile(self._staged("bin")) as data:
                for piece in token_ids:
                    data.write(piece.astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
            code = next(code for code, dtype in MEGATRON_DTYPES.items() if dtype == self.dtype)
            with HashedFile(self._staged("idx")) as index:
                write_index(
                    index.write, sizes, dtype_code=code, item_bytes=self.dtype.itemsize, document_index=None
                )
        except OSError as error:
            raise self._unwritable(error) from error
        return {"bin": data.digest, "idx": index.digest}

    def publish(self) -> None:
        """Flush both files to disk and give them their names, the index last."""
        try:
            for suffix in _SUFFIXES:
                with self._staged(suffix).open("rb") as staged:
                    os.fsync(staged.fileno())
            for suffix in _SUFFIXES:
                self._staged(suffix).replace(self._path(suffix))
        except OSError as error:
            raise self._unwritable(error) from error

    def _path(self, suffix: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.{suffix}")

    def _staged(self, suffix: str) -> Path:
        return self.prefix.with_name(f".{self.prefix.name}.{suffix}.partial")

    def _unwritable(self, error: OSError) -> TargetWriteError:
        return TargetWriteError(
            f"cannot write {self._shown}.bin: {error.strerror}; make room or choose another --write-tokens"
        )


def _tokens_of_killed_run(folder: Path) -> dict[str, FileDigest] | None:
    if not (folder / MANIFEST_NAME).is_file():
        return None
    try:
        return load_manifest(folder).tokens
    except MetricsError:  # killed while it was written
        return None
