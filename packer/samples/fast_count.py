"""Counting texts with gigatoken, many times faster than ``tokenizers``, and never trusted without proof.

Of every group of texts a part, spread evenly, is counted by ``tokenizers`` as well. One difference ends the
run: the lengths of a plan must be the lengths that training meets.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, MissingExtraError
from packer.samples.ragged import RowError

PROVEN_SHARE = 16
"""One byte of text in this many is counted twice."""


class ProvenCounter:
    """Counts of gigatoken, held against those of a tokenizer of ``tokenizers``."""

    def __init__(self, content: str, exact: Any, *, special_tokens: bool) -> None:
        """Open gigatoken on a ``tokenizer.json``.

        Args:
            content: what the file holds.
            exact: the same tokenizer, without truncation and padding.
            special_tokens: whether the exact one adds special tokens.

        Raises:
            ConfigError: gigatoken cannot read this tokenizer.
            MissingExtraError: gigatoken is not installed.
        """
        try:
            import gigatoken
        except ImportError as error:
            raise MissingExtraError(
                "counter 'gigatoken' is not installed; install 'microbatch-packer[fast]', or count with "
                "tokenizers"
            ) from error
        try:
            self._fast = gigatoken.Tokenizer.from_json(content)
        except Exception as error:  # the library raises what it likes
            raise ConfigError(
                f"gigatoken cannot read this tokenizer ({error}); count with tokenizers instead"
            ) from error
        self._exact = exact
        self._special_tokens = special_tokens
        self._num_added = exact.num_special_tokens_to_add(is_pair=False) if special_tokens else 0

    def count(self, texts: list[str], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """(texts,) number of tokens of each text.

        Args:
            texts: a group of texts.
            rows: (texts,) their rows, for the message.

        Raises:
            RowError: the two libraries disagree.
        """
        import awkward

        counts = np.asarray(awkward.num(self._fast.encode_batch(texts)), np.int64) + self._num_added
        proven = _spread([len(text) for text in texts])
        encodings = self._exact.encode_batch_fast(
            [texts[at] for at in proven], add_special_tokens=self._special_tokens
        )
        for at, encoding in zip(proven, encodings, strict=True):
            if counts[at] != len(encoding):
                raise RowError(
                    int(rows[at]),
                    f"gigatoken counts {counts[at]} tokens where tokenizers counts {len(encoding)}; "
                    "run again with the counter 'tokenizers'",
                )
        return counts


def _spread(sizes: list[int]) -> list[int]:
    """Return positions of texts, evenly spread, that hold about one part in `PROVEN_SHARE`; at least one."""
    # (texts + 1,) characters before each
    before = np.cumsum([0, *sizes])
    stride = PROVEN_SHARE * max(int(before[-1]) // max(len(sizes), 1), 1)
    marks = np.arange(stride // 2, max(int(before[-1]), stride // 2 + 1), stride)
    texts = np.searchsorted(before, marks, side="right") - 1
    positions: list[int] = np.unique(np.minimum(texts, len(sizes) - 1)).tolist()
    return positions
