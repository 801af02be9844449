"""How large the micro-batches of a plan are: what their tensors take, and what attention over them does."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.plan.rows import MicroBatches


class Extents(NamedTuple):
    """Sizes of M micro-batches, each an int64 array (M,)."""

    num_rows: NDArray[np.int64]
    """B; 1 in the packed layout."""
    seqlen: NDArray[np.int64]
    """S, or T; of pairs of sequences the longer one's."""
    num_samples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    """Real ones."""
    area: NDArray[np.int64]
    """Tokens of the tensors: B·S, or T; of pairs of sequences the sum over both."""
    attention: NDArray[np.int64]
    """B·S², or Σ len² over the samples of a packed row: what ``max_attention`` bounds."""

    @classmethod
    def of(cls, rows: MicroBatches, layout: str) -> "Extents":
        """Measure the rows of one record batch."""
        num_samples = rows.num_samples.astype(np.int64)
        num_rows = np.ones_like(num_samples) if layout == "packed" else num_samples
        # (metrics, M)
        lengths = np.stack([*(rows.padded_seqlens.values() or [rows.padded_seqlen])]).astype(np.int64)
        if layout == "packed":
            attention = np.add.reduceat(rows.seqlens.astype(np.int64) ** 2, rows.offsets[:-1])
        else:
            attention = num_rows * (lengths**2).sum(axis=0)
        return cls(
            num_rows=num_rows,
            seqlen=lengths.max(axis=0),
            num_samples=num_samples,
            tokens=rows.num_tokens.astype(np.int64),
            area=num_rows * lengths.sum(axis=0),
            attention=attention,
        )

    def largest(self) -> int:
        """Return the place of the largest tensor; among equals, of that with the most attention."""
        return int(np.lexsort((self.attention, self.area))[-1])
