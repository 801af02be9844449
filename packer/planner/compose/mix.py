"""The mix of an epoch: its classes of length, and how much more its steps differ in them than random ones."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packer.kernels import mix as kernels
from packer.planner.order.orders import histogram
from packer.planner.order.threads import chunk_edges, run_chunks
from packer.planner.packing.microbatches import IntArray

_NO_SOURCES = np.empty(0, np.int32)
_NO_FILLERS = np.empty(0, np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """The lengths of all samples, cut into K classes of about equal numbers of tokens."""

    lengths: NDArray[np.int64]
    """(L,) distinct lengths, rising."""
    counts: NDArray[np.int64]
    """(L,) samples of each."""
    bounds: NDArray[np.int64]
    """(K,) the longest length of each class."""
    tokens: NDArray[np.int64]
    """(K,) of each class."""

    @classmethod
    def of(cls, seqlens: IntArray) -> "Mix":
        """Return the mix of the samples that an epoch is made of."""
        lengths, counts = histogram(seqlens)
        bounds, tokens = kernels.length_classes(lengths, counts)
        return cls(lengths=lengths, counts=counts, bounds=bounds, tokens=tokens)

    def of_microbatches(
        self, seqlens: IntArray, starts: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return (m, K) tokens by class of micro-batches ``seqlens[starts[m]:starts[m] + sizes[m]]``."""
        out = np.empty((len(starts), len(self.bounds)), np.int64)
        kernels.tokens_by_class(seqlens, _NO_SOURCES, self.bounds, starts, sizes, 0, len(starts), out)
        return out

    def random_spread(self, num_steps: int) -> float:
        """Return Σ_k (p_tk − p_k)², on average, of ``num_steps`` steps of random samples."""
        return kernels.random_spread(self.lengths, self.counts, self.bounds, num_steps)


def design_effect(
    seqlens: IntArray, offsets: NDArray[np.int64], is_filler: NDArray[np.bool_], step_size: int
) -> float | None:
    """Return the design effect of the steps in length: 1 if they differ as random samples would.

    Args:
        seqlens: (P,) int32, row by row.
        offsets: (R + 1,) row r holds ``seqlens[offsets[r]:offsets[r + 1]]``.
        is_filler: (R,) rows that are left out.
        step_size: E, rows of a step.

    Returns:
        None for samples of one class, or fewer than two steps.
    """
    num_steps = (len(offsets) - 1) // step_size
    fillers = is_filler if is_filler.any() else _NO_FILLERS
    lengths, counts = histogram(seqlens)
    if len(fillers):
        # they are in the last step
        sizes = np.diff(offsets[-step_size - 1 :])
        filling = seqlens[offsets[-step_size - 1] :][np.repeat(is_filler[-step_size:], sizes)]
        distinct, copies = np.unique(filling, return_counts=True)
        counts[np.searchsorted(lengths, distinct)] -= copies
    bounds, _ = kernels.length_classes(lengths[counts > 0], counts[counts > 0])
    num_classes = len(bounds)
    edges = chunk_edges(num_steps, min_chunk=1 << 10)
    chunks = len(edges) - 1
    tokens = np.zeros((chunks, num_classes), np.int64)
    squares = np.zeros((chunks, num_classes, 2), np.uint64)
    concentration = np.zeros((chunks, 2), np.uint64)
    run_chunks(
        lambda chunk, first, stop: kernels.sum_steps(
            seqlens,
            _NO_SOURCES,
            bounds,
            offsets,
            fillers,
            step_size,
            first,
            stop,
            tokens[chunk],
            squares[chunk],
            concentration[chunk],
        ),
        edges,
    )
    return kernels.design_effect(
        tokens.sum(axis=0), squares.sum(axis=0), concentration.sum(axis=0), num_steps
    )
