"""The mix of an epoch: its classes of length, and how much more its steps differ in them than random ones."""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from packer.kernels import mix as kernels
from packer.kernels.deal import SCALE_BITS
from packer.planner.order.orders import histogram
from packer.planner.order.threads import chunk_edges, run_chunks
from packer.planner.packing.microbatches import IntArray

_MOST_SCALE = 512

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
    by_source: NDArray[np.int64]
    """(3, S) what ``sum_sources`` adds up; (3, 0) where there is one source."""

    @classmethod
    def of(cls, seqlens: IntArray, sources: IntArray | None = None, num_sources: int = 0) -> "Mix":
        """Return the mix of the samples that an epoch, or a phase of it, is made of.

        Args:
            seqlens: (P,) of each sample.
            sources: (P,) the source of each; None where there is one.
            num_sources: S.
        """
        lengths, counts = histogram(seqlens)
        bounds, tokens = kernels.length_classes(lengths, counts)
        by_source = np.zeros((3, 0), np.int64)
        if sources is not None:
            by_source = _sums_by_source(seqlens, sources, num_sources)
        return cls(
            lengths=lengths,
            counts=counts,
            bounds=bounds,
            tokens=tokens,
            by_source=by_source,
        )

    @property
    def has_classes(self) -> bool:
        """Whether samples differ in length or in source."""
        return len(self.bounds) > 1 or int(np.count_nonzero(self.by_source[0])) > 1

    @property
    def targets(self) -> NDArray[np.int64]:
        """(K + S,) tokens by class: the lengths', and beside them the sources'."""
        return np.concatenate([self.tokens, self.by_source[0]])

    @property
    def scales(self) -> NDArray[np.int64]:
        """(K + S,) how much a deviation of each class counts: a small source's more than a large one's.

        By 1 / √share, as in Pearson's χ², so that a source of a hundredth is held to its share as well as one
        of a half; a class of lengths, which has about a sixteenth, counts a quarter of that.
        """
        whole = int(self.by_source[0].sum())
        of_sources = [isqrt(whole * 256 // max(1, tokens)) for tokens in self.by_source[0].tolist()]
        scales = np.full(len(self.tokens) + len(of_sources), 1 << SCALE_BITS, np.int64)
        scales[len(self.tokens) :] = np.minimum(of_sources, _MOST_SCALE)
        return scales

    def of_microbatches(
        self,
        seqlens: IntArray,
        sources: IntArray | None,
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return (m, K + S) tokens by class of micro-batches ``seqlens[starts[m]:starts[m] + sizes[m]]``."""
        out = np.empty((len(starts), len(self.bounds)), np.int64)
        kernels.tokens_by_class(seqlens, _NO_SOURCES, self.bounds, starts, sizes, 0, len(starts), out)
        if sources is None:
            return out
        by_source = np.empty((len(starts), self.by_source.shape[1]), np.int64)
        kernels.tokens_by_class(seqlens, sources, self.bounds[-1:], starts, sizes, 0, len(starts), by_source)
        return np.concatenate([out, by_source], axis=1)

    def random_spread(self, num_steps: int) -> float:
        """Return Σ_k (p_tk − p_k)², on average, of ``num_steps`` steps of random samples.

        With sources their classes count beside those of lengths, and both shares are of twice the tokens.
        """
        spread = kernels.random_spread(self.lengths, self.counts, self.bounds, num_steps)
        if not self.by_source.shape[1]:
            return spread
        return (spread + kernels.spread_of(self.by_source, num_steps)) / 4


def _sums_by_source(seqlens: IntArray, sources: IntArray, num_sources: int) -> NDArray[np.int64]:
    """Return (3, S) sums of each source."""
    edges = chunk_edges(len(seqlens))
    sums = np.zeros((len(edges) - 1, 3, num_sources), np.int64)
    run_chunks(
        lambda chunk, first, stop: kernels.sum_sources(seqlens, sources, first, stop, sums[chunk]), edges
    )
    total: NDArray[np.int64] = sums.sum(axis=0)
    return total


def design_effect(
    seqlens: IntArray,
    sources: IntArray | None,
    num_sources: int,
    offsets: NDArray[np.int64],
    is_filler: NDArray[np.bool_],
    step_size: int,
    phases: NDArray[np.int64],
) -> dict[str, float | None]:
    """Return the design effect of the steps in length and in source: 1 if they differ as random ones would.

    Args:
        seqlens: (P,) int32, row by row.
        sources: (P,) the source of each; None where there is one.
        num_sources: S.
        offsets: (R + 1,) row r holds ``seqlens[offsets[r]:offsets[r + 1]]``.
        is_filler: (R,) rows that are left out.
        step_size: E, rows of a step.
        phases: (H,) the first step of every phase, each of which has a mix of its own.

    Returns:
        By ``seqlens`` and ``source``: None for samples of one class, or fewer than two steps.
    """
    num_steps = (len(offsets) - 1) // step_size
    ends = np.append(phases[1:], num_steps)
    spans = [(int(first), int(end)) for first, end in zip(phases, ends, strict=True) if first < end]
    fillers = is_filler if is_filler.any() else _NO_FILLERS
    lengths, counts = histogram(seqlens)
    if len(fillers):
        # they are in the last step
        sizes = np.diff(offsets[-step_size - 1 :])
        filling = seqlens[offsets[-step_size - 1] :][np.repeat(is_filler[-step_size:], sizes)]
        distinct, copies = np.unique(filling, return_counts=True)
        counts[np.searchsorted(lengths, distinct)] -= copies
    bounds, _ = kernels.length_classes(lengths[counts > 0], counts[counts > 0])

    def effect(of_samples: IntArray, bounds: NDArray[np.int64], num_classes: int) -> float | None:
        return kernels.design_effect(
            [
                _sum_span(seqlens, of_samples, bounds, num_classes, offsets, fillers, step_size, first, end)
                for first, end in spans
            ]
        )

    by_source = None if sources is None else effect(sources, bounds[-1:], num_sources)
    return {"seqlen": effect(_NO_SOURCES, bounds, len(bounds)), "source": by_source}


def _sum_span(
    seqlens: IntArray,
    sources: IntArray,
    bounds: NDArray[np.int64],
    num_classes: int,
    offsets: NDArray[np.int64],
    fillers: NDArray[np.bool_],
    step_size: int,
    first_step: int,
    end_step: int,
) -> kernels.StepSums:
    """Add up what the design effect needs of steps of one mix, in threads."""
    edges = first_step + chunk_edges(end_step - first_step, min_chunk=1 << 10)
    chunks = len(edges) - 1
    tokens = np.zeros((chunks, num_classes), np.int64)
    squares = np.zeros((chunks, num_classes, 2), np.uint64)
    concentration = np.zeros((chunks, 2), np.uint64)
    run_chunks(
        lambda chunk, first, stop: kernels.sum_steps(
            seqlens,
            sources,
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
    return kernels.StepSums(
        tokens=tokens.sum(axis=0),
        squares=squares.sum(axis=0),
        concentration=concentration.sum(axis=0),
        num_steps=end_step - first_step,
    )
