"""Orders of samples: as they stand, by length, or at random; each a pure function of its key."""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.errors import PlanError
from packer.kernels import counting, rng
from packer.planner.order.threads import chunk_edges, run_chunks

IntArray = NDArray[Any]
MAX_PIECES = 2**32
"""Samples, or pieces of samples, of one plan: their positions fit 32 bits beside their lengths."""

_BUCKET = 1 << 16  # entries of a bucket, about: they are shuffled inside a cache
_MAX_BUCKETS = 1 << 12


class Purpose(IntEnum):
    """What a random stream is for. Plans depend on the numbers."""

    SAMPLES = 1
    REMAINDER = 5
    BALANCE = 6
    POOL = 7
    SUBSTREAM = 8
    DEALING = 9
    STREAMS = 10
    REPEATS = 11
    BLOCKS = 12


def key_for(seed: int, epoch: int, purpose: Purpose) -> np.uint64:
    """Return the key of one random stream."""
    return np.uint64(rng.derive_key(np.uint64(seed), np.uint64(epoch), np.uint64(purpose)))


def subkey(key: np.uint64, index: int) -> np.uint64:
    """Return the key of the ``index``-th stream below ``key``."""
    return np.uint64(rng.derive_key(key, np.uint64(index), np.uint64(Purpose.SUBSTREAM)))


def id_dtype(num_pieces: int) -> type[np.int32] | type[np.int64]:
    """Return the narrowest type that counts pieces."""
    if num_pieces > MAX_PIECES:
        raise PlanError(
            f"{num_pieces} samples are over the {MAX_PIECES} of one plan; plan parts with --sample-ids"
        )
    return np.int32 if num_pieces <= 2**31 else np.int64


def permutation(size: int, key: np.uint64) -> IntArray:
    """Return the integers of [0, size) in random order: scattered into buckets, then shuffled inside them.

    Every permutation is equally likely (Rao 1961, Sandelius 1962), and no pass jumps about in memory.
    """
    out = np.empty(size, id_dtype(size))
    shift, edges = _bucket_shift(size), chunk_edges(size)
    if shift is None:
        out[:] = np.arange(size)
        rng.shuffle(out, 0, size, key)
        return out
    offsets, cursors = _count(
        lambda start, stop, counts: rng.count_buckets(start, stop, shift, key, counts), shift, edges
    )
    run_chunks(lambda c, start, stop: rng.scatter_buckets(start, stop, shift, key, cursors[c], out), edges)
    _shuffle_segments(out, offsets, key)
    return out


def shuffled_entries(lengths: IntArray, key: np.uint64) -> NDArray[np.int64]:
    """Return every sample's ``length << 32 | index`` in random order."""
    size = len(lengths)
    id_dtype(size)
    out = np.empty(size, np.int64)
    shift, edges = _bucket_shift(size), chunk_edges(size)
    if shift is None:
        out[:] = lengths
        out <<= 32
        out |= np.arange(size)
        rng.shuffle(out, 0, size, key)
        return out
    offsets, cursors = _count(
        lambda start, stop, counts: rng.count_buckets(start, stop, shift, key, counts), shift, edges
    )
    run_chunks(
        lambda c, start, stop: rng.scatter_entries(lengths, start, stop, shift, key, cursors[c], out), edges
    )
    _shuffle_segments(out, offsets, key)
    return out


def entries_in_order(lengths: IntArray) -> NDArray[np.int64]:
    """Return every sample's ``length << 32 | index``, as they stand."""
    id_dtype(len(lengths))
    entries = np.empty(len(lengths), np.int64)
    run_chunks(
        lambda _, first, last: counting.join_entries(lengths, first, last, entries),
        chunk_edges(len(lengths)),
    )
    return entries


def take(values: IntArray, order: IntArray) -> IntArray:
    """Return ``values[order]``: numbers, or rows of them."""
    out = np.empty((len(order), *values.shape[1:]), values.dtype)
    width = values.shape[1] if values.ndim > 1 else 1
    source, target = values.reshape(len(values), width), out.reshape(len(order), width)
    run_chunks(
        lambda _, first, last: counting.take_blocks(source, order, first, last, target),
        chunk_edges(len(order)),
    )
    return out


def split_entries(entries: NDArray[np.int64]) -> tuple[IntArray, NDArray[np.int32]]:
    """Return the samples, and the lengths, of entries."""
    samples = np.empty(len(entries), id_dtype(len(entries)))
    lengths = np.empty(len(entries), np.int32)
    run_chunks(
        lambda _, first, last: counting.split_entries(entries, first, last, samples, lengths),
        chunk_edges(len(entries)),
    )
    return samples, lengths


def histogram(lengths: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (L,) distinct lengths, rising, and the (L,) samples of each."""
    if _is_sparse(lengths):
        distinct, counts = np.unique(lengths, return_counts=True)
        return distinct.astype(np.int64), counts.astype(np.int64)
    totals = _count_lengths(lengths, chunk_edges(len(lengths))).sum(axis=0)
    distinct = np.flatnonzero(totals)
    return distinct, totals[distinct]


def by_length(lengths: IntArray) -> tuple[IntArray, NDArray[np.int64], NDArray[np.int64]]:
    """Sort samples by length, keeping the order of equal ones.

    Returns:
        (n,) samples; (L,) int64 distinct lengths, rising; (L + 1,) int64 offsets of each length's samples.
    """
    size = len(lengths)
    if _is_sparse(lengths):
        order = np.argsort(lengths, kind="stable").astype(id_dtype(size))
        distinct, counts = histogram(lengths)
        return order, distinct, _offsets(counts)
    edges = chunk_edges(size)
    offsets, cursors = _cursors(_count_lengths(lengths, edges))
    order = np.empty(size, id_dtype(size))
    run_chunks(
        lambda c, start, stop: counting.scatter_by_length(lengths, start, stop, cursors[c], order), edges
    )
    distinct = np.flatnonzero(np.diff(offsets))
    return order, distinct, np.append(offsets[distinct], size)


def _is_sparse(lengths: IntArray) -> bool:
    """Say whether a table of all lengths would be far larger than the data."""
    return len(lengths) == 0 or int(lengths.max()) > max(1 << 22, 4 * len(lengths))


def _count_lengths(lengths: IntArray, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.zeros((len(edges) - 1, int(lengths.max()) + 1), np.int64)
    run_chunks(lambda c, start, stop: counting.count_lengths(lengths, start, stop, counts[c]), edges)
    return counts


def shuffle_within(values: IntArray, offsets: NDArray[np.int64], key: np.uint64) -> None:
    """Shuffle each segment ``values[offsets[s]:offsets[s + 1]]`` in place."""
    _shuffle_segments(values, offsets, key)


def _bucket_shift(size: int) -> np.uint64 | None:
    """Return by how much a 64-bit draw is shifted to name its bucket; None for a single bucket."""
    buckets = min(_MAX_BUCKETS, size // _BUCKET)
    return np.uint64(64 - buckets.bit_length()) if buckets else None


def _count(count: Any, shift: np.uint64, edges: NDArray[np.int64]) -> tuple[Any, Any]:
    counts = np.zeros((len(edges) - 1, 1 << (64 - int(shift))), np.int64)
    run_chunks(lambda c, start, stop: count(start, stop, counts[c]), edges)
    return _cursors(counts)


def _cursors(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offsets of the buckets, and where each chunk begins to write in each bucket."""
    # (chunks, buckets); in a bucket the chunks follow each other, so they leave no trace in the result
    offsets = _offsets(counts.sum(axis=0))
    return offsets, offsets[:-1] + np.cumsum(counts, axis=0) - counts


def _offsets(counts: IntArray) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _shuffle_segments(values: IntArray, offsets: NDArray[np.int64], key: np.uint64) -> None:
    edges = _even_segments(offsets)
    run_chunks(lambda _, first, last: rng.shuffle_segments(values, offsets, first, last, key), edges)


def _even_segments(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut segments into chunks that hold about as many values each."""
    marks = chunk_edges(int(offsets[-1]))
    edges = np.searchsorted(offsets, marks)
    edges[0], edges[-1] = 0, len(offsets) - 1
    return np.maximum.accumulate(edges)
