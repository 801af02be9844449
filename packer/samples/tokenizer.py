"""Text to tokens through the ``tokenizers`` library: counts for analysis, ids for training, the same ones.

Truncation and padding that a ``tokenizer.json`` brings along are switched off, whatever it says: a file saved
with ``max_length: 128`` would make every length 128.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from numpy.typing import NDArray

from packer.arrays import to_numpy
from packer.errors import ConfigError, MissingExtraError
from packer.machine import num_cores
from packer.samples.fast_count import ProvenCounter
from packer.samples.ragged import RowError, valid_rows

Counter = Literal["tokenizers", "gigatoken"]

Value = TypeVar("Value")

CHUNK_BYTES = 256 << 10
"""Text that one core makes Python strings of, and tokenizes, at a time."""
GROUP_BYTES = 4 << 20
"""The same for gigatoken, which has threads of its own."""


class TextTokenizer:
    """A tokenizer without truncation and padding, with its hash."""

    def __init__(
        self,
        tokenizer: Any,
        sha256: str,
        *,
        name: str,
        special_tokens: bool,
        counter: Counter = "tokenizers",
        end_token: str | None = None,
    ) -> None:
        """Take a tokenizer, which is ours to change.

        Args:
            tokenizer: of the ``tokenizers`` library.
            sha256: hash that tells it from others.
            name: file or name, for messages.
            special_tokens: add what its post-processor adds.
            counter: what `count` counts with.
            end_token: the token that ends a text (EOS), where its settings name one.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._name = name
        self._special_tokens = special_tokens
        self._counter = (
            ProvenCounter(tokenizer.to_str(), tokenizer, special_tokens=special_tokens)
            if counter == "gigatoken"
            else None
        )
        self.sha256 = sha256
        self.end_token = end_token

    @property
    def num_added(self) -> int:
        """Special tokens that an empty text is given."""
        return int(self._tokenizer.num_special_tokens_to_add(False)) if self._special_tokens else 0

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; every id is smaller."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def ends_texts(self) -> bool:
        """Whether the tokenizer itself adds the end token to every text."""
        if self.end_token is None or not self._special_tokens:
            return False
        end = self._tokenizer.token_to_id(self.end_token)
        ids = self._tokenizer.encode("").ids
        return bool(ids) and bool(ids[-1] == end)

    def count(self, texts: pa.Array) -> NDArray[np.int64]:
        """(rows,) number of tokens of each text, 0 for nulls.

        Raises:
            RowError: a row is not UTF-8.
        """
        counts = np.zeros(len(texts), np.int64)
        if self._counter is not None:
            for rows in _cut(texts, GROUP_BYTES):
                counts[rows] = self._counter.count(_strings(texts, rows), rows)
        else:
            for rows, lengths in self._map_chunks(_lengths, texts):
                counts[rows] = lengths
        return counts

    def encode(self, texts: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all texts end to end, and (rows,) how many each has, 0 for nulls.

        Raises:
            RowError: a row is not UTF-8.
        """
        counts = np.zeros(len(texts), np.int64)
        pieces: list[NDArray[np.int32]] = []
        for rows, ids in self._map_chunks(_ids, texts):
            counts[rows] = [len(row) for row in ids]
            pieces += ids
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32), counts

    def _map_chunks(
        self, take: Callable[[list[Any]], list[Value]], texts: pa.Array
    ) -> Iterator[tuple[NDArray[np.int64], list[Value]]]:
        """Yield the rows of each chunk of texts and what ``take`` takes out of their encodings, in order.

        Encodings take 120 bytes a token, so only one chunk a core is there at a time; and no core waits for
        another before the last chunk, as the cores of one large batch do. A second chunk a core would gain
        little, and make the peak of memory a matter of chance.
        """

        def encode(rows: NDArray[np.int64]) -> list[Value]:
            strings = _strings(texts, rows)
            try:
                # The fast variant leaves out the offsets.
                return take(
                    self._tokenizer.encode_batch_fast(strings, add_special_tokens=self._special_tokens)
                )
            except BaseException as error:
                if not is_failure(error):
                    raise
                raise ConfigError(
                    f"tokenizer {self._name} cannot encode a text ({error}); it is damaged, save it again"
                ) from error

        chunks = _cut(texts, CHUNK_BYTES)
        num_threads = _num_threads()
        if len(chunks) < 2 or num_threads == 1:
            yield from zip(chunks, map(encode, chunks), strict=True)
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                yield from zip(chunks, pool.map(encode, chunks), strict=True)


def _lengths(encodings: list[Any]) -> list[int]:
    return [len(encoding) for encoding in encodings]


def _ids(encodings: list[Any]) -> list[NDArray[np.int32]]:
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _num_threads() -> int:
    """Return how many texts are tokenized at once: what the library itself would use."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "off", "no", "n", "f", "0"):
        return 1
    limit = os.environ.get("RAYON_NUM_THREADS", "")
    return int(limit) if limit.isdecimal() and int(limit) else num_cores()


def _cut(texts: pa.Array, num_bytes: int) -> list[NDArray[np.int64]]:
    """Cut the rows that are not null into runs of about ``num_bytes`` of text."""
    if pat.is_null(texts.type):
        return []
    if pat.is_dictionary(texts.type) and texts.dictionary.null_count:
        texts = texts.dictionary_decode()  # a text may be null in either place
    valid = np.flatnonzero(valid_rows(texts))
    # (valid rows,) which multiple of num_bytes the middle of each text falls into
    sizes = _text_bytes(texts)[valid].astype(np.int64)
    piece = (np.cumsum(sizes) - sizes // 2) // num_bytes
    return [rows for rows in np.split(valid, np.flatnonzero(np.diff(piece)) + 1) if len(rows)]


def _strings(texts: pa.Array, rows: NDArray[np.int64]) -> list[str]:
    """Return the texts of some rows, none of which is null."""
    try:
        run = texts.slice(int(rows[0]), int(rows[-1] - rows[0]) + 1).to_pylist()
    except UnicodeDecodeError as error:
        bad = next(int(row) for row in rows if not is_unicode(texts[int(row)]))
        raise RowError(bad, f"the text is not UTF-8 ({error.reason}); correct it") from error
    return [text for text in run if text is not None]


def _text_bytes(texts: pa.Array) -> NDArray[np.integer]:
    """(rows,) bytes of each text; of a null anything."""
    if pat.is_dictionary(texts.type):
        sizes = np.append(_text_bytes(texts.dictionary), 0)
        taken: NDArray[np.integer] = sizes[np.where(valid_rows(texts), to_numpy(texts.indices), -1)]
        return taken
    if pat.is_string_view(texts.type):
        texts = texts.cast(pa.large_string())
    return to_numpy(pc.binary_length(texts))


def is_unicode(text: pa.Scalar) -> bool:
    """Whether a text is the UTF-8 that it says it is."""
    try:
        text.as_py()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=4)
def open_tokenizer(reference: str, *, special_tokens: bool, counter: Counter = "tokenizers") -> TextTokenizer:
    """Open a ``tokenizer.json``, a folder that holds one, or a name that transformers knows offline.

    Raises:
        ConfigError: there is none, or it cannot be read.
        MissingExtraError: ``tokenizers`` (or transformers, for a name) is not installed.
    """
    file = tokenizer_file(reference)
    if file is None:
        return _from_name(reference, special_tokens, counter)
    tokenizers = _import_tokenizers()
    with open(file, "rb") as opened:
        content = opened.read()
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigError(
            f"{file} is no tokenizer that tokenizers can read ({error}); save it again"
        ) from error
    sha256 = hashlib.sha256(content).hexdigest()
    return TextTokenizer(
        tokenizer,
        sha256,
        name=file,
        special_tokens=special_tokens,
        counter=counter,
        end_token=_end_token_beside(file),
    )


def _end_token_beside(file: str) -> str | None:
    """Return the EOS token that the settings beside a ``tokenizer.json`` name; it does not say so itself."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            with open(os.path.join(os.path.dirname(file), name), "rb") as opened:
                token = json.load(opened)["eos_token"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return None


def tokenizer_file(reference: str) -> str | None:
    """Return the ``tokenizer.json`` that a path names; None where the reference is no path.

    Raises:
        ConfigError: a folder without a ``tokenizer.json``, or a path to nothing.
    """
    if os.path.isfile(reference):
        return reference
    inside = os.path.join(reference, "tokenizer.json")
    if os.path.isfile(inside):
        return inside
    if os.path.isdir(reference):
        raise ConfigError(
            f"{reference} holds no tokenizer.json; name the file, or save a fast tokenizer there"
        )
    if reference.endswith(".json") or os.path.isabs(reference) or reference.startswith("."):
        raise ConfigError(f"tokenizer {reference}: no such file or directory; check the path")
    return None


def _from_name(name: str, special_tokens: bool, counter: Counter) -> TextTokenizer:
    _import_tokenizers()
    loaded = load_transformers_tokenizer(name)
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if tokenizer is None or not hasattr(tokenizer, "encode_batch_fast"):
        raise ConfigError(f"tokenizer {name!r} has no fast form; save a tokenizer.json and name that file")
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())  # our own, so that others' settings stay theirs
    sha256 = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    return TextTokenizer(
        tokenizer,
        sha256,
        name=name,
        special_tokens=special_tokens,
        counter=counter,
        end_token=loaded.eos_token,
    )


def load_transformers_tokenizer(reference: str) -> Any:
    """Return what ``AutoTokenizer`` makes of a folder or name: from this machine, running no code of theirs.

    Raises:
        ConfigError: transformers does not know it offline.
        MissingExtraError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f"tokenizer {reference!r} needs transformers; install 'microbatch-packer[chat]', or name a "
            "tokenizer.json"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(reference, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # of damaged files, nearly any
        if not is_failure(error):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"tokenizer {reference!r} is no file or folder here, and transformers has none of that name "
            f"offline ({first_line}); name a tokenizer.json"
        ) from error


def is_failure(error: BaseException) -> bool:
    """Whether a library failed; its part in Rust panics with what is no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            "text columns need the tokenizers library; install 'microbatch-packer[text]'"
        ) from error
    return tokenizers
