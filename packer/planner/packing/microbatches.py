"""What a packing returns: micro-batches as stretches of one array of samples."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.kernels import counting as kernels
from packer.planner.order.orders import by_length
from packer.planner.order.threads import chunk_edges, run_chunks

IntArray = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """M micro-batches of samples, or of pieces of samples, named by their positions in the packer's input."""

    pieces: IntArray
    """(n,) positions, int32 or int64."""
    seqlens: NDArray[np.int32]
    """(n,) their lengths."""
    starts: NDArray[np.int64]
    """(M,) micro-batch m holds ``pieces[starts[m]:starts[m] + sizes[m]]``; stretches need not touch."""
    sizes: NDArray[np.int64]
    """(M,) samples of each micro-batch."""
    leftover: IntArray
    """(K,) positions that no micro-batch could take, for want of company."""
    in_steps: bool = False
    """The micro-batches come in steps that must stay together, all whole but perhaps the last."""
    barriers: tuple[int, ...] = ()
    """Steps before which no later micro-batch may run: those that admit harder samples."""

    stretches: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """(G,) the micro-batch at which each stretch begins; none is dealt to the steps of another stretch."""
    num_dealt: int | None = None
    """Those behind so many stand where they are to run; None where all may be dealt to any step."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What is to be said of the packing, for the plan's summary."""

    def __len__(self) -> int:
        """Return M."""
        return len(self.starts)


def concatenate(parts: list[MicroBatches]) -> MicroBatches:
    """Join micro-batches of the same input; the last part's leftover is what is left over in the end."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.pieces) for part in parts[:-1])])
    return replace(
        parts[0],
        pieces=np.concatenate([part.pieces for part in parts]),
        seqlens=np.concatenate([part.seqlens for part in parts]),
        starts=np.concatenate([part.starts + shift for part, shift in zip(parts, shifts, strict=True)]),
        sizes=np.concatenate([part.sizes for part in parts]),
        leftover=parts[-1].leftover,
    )


def reindex(part: MicroBatches, positions: IntArray) -> MicroBatches:
    """Name the pieces of ``part`` by ``positions``, where it was made from a selection."""
    return replace(part, pieces=positions[part.pieces], leftover=positions[part.leftover])


def mean_pieces(microbatches: MicroBatches, width: int = 1) -> NDArray[np.int64]:
    """Return the mean position of the pieces of each micro-batch, or of each ``width`` of them."""
    means = np.empty(len(microbatches) // width, np.int64)
    run_chunks(
        lambda _, first, last: kernels.mean_pieces(
            microbatches.pieces, microbatches.starts, microbatches.sizes, width, first, last, means
        ),
        chunk_edges(len(means), min_chunk=1 << 14),
    )
    return means


def in_order_of_pieces(microbatches: MicroBatches, width: int) -> MicroBatches:
    """Put micro-batches, or steps of ``width``, into the order of the mean position of their pieces."""
    means = mean_pieces(microbatches, width)
    num_units = len(means)
    # about as many marks as units: what stands closer together keeps its order
    means >>= max(0, int(means.max(initial=0)).bit_length() - num_units.bit_length() - 1)
    order, _, _ = by_length(means)
    # (steps · width,) -> whole steps, and behind them what fills none
    rows = np.arange(num_units * width).reshape(-1, width)[order].reshape(-1)
    rows = np.append(rows, np.arange(num_units * width, len(microbatches)))
    return replace(microbatches, starts=microbatches.starts[rows], sizes=microbatches.sizes[rows])


def positions_of(microbatches: MicroBatches) -> NDArray[np.int64]:
    """Return where in ``pieces`` the samples of all micro-batches are, one micro-batch after the other."""
    begins = np.cumsum(microbatches.sizes) - microbatches.sizes
    positions: NDArray[np.int64] = np.arange(int(microbatches.sizes.sum())) + np.repeat(
        microbatches.starts - begins, microbatches.sizes
    )
    return positions


def compact_owners(owners: IntArray | None) -> tuple[NDArray[np.int32], int]:
    """Number the samples that have several pieces from 0; owners below 0 are of samples that have one.

    Returns:
        (n,) int32 by piece, −1 where it is its sample's only one; empty where no sample is cut. And how many.
    """
    if owners is None:
        return np.empty(0, np.int32), 0
    found, inverse, counts = np.unique(owners, return_inverse=True, return_counts=True)
    is_several = (counts > 1) & (found >= 0)
    numbers = np.where(is_several, np.cumsum(is_several) - 1, -1).astype(np.int32)
    return numbers[inverse], int(np.count_nonzero(is_several))
