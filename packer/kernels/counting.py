"""Counting: histograms of lengths, and ids scattered into the order of their lengths."""

import numpy as np

from packer.kernels._jit import at, jit


@jit
def count_lengths(lengths, start, stop, counts):
    """Add the lengths of samples [start, stop) to ``counts`` (int64[max length + 1])."""
    for sample in range(start, stop):
        counts[lengths[sample]] += 1


@jit
def scatter_by_length(lengths, start, stop, cursors, out):
    """Write samples [start, stop) to the cursors (int64) of their lengths, moving the cursors; stable."""
    for sample in range(start, stop):
        cursor = cursors[lengths[sample]]
        out[cursor] = sample
        cursors[lengths[sample]] = cursor + 1


@jit
def take_blocks(values, order, first, last, out):
    """Write row ``order[r]`` of ``values`` (n, width) to row r of ``out``, for rows [first, last)."""
    for row in range(first, last):
        for member in range(values.shape[1]):
            out[at(row), at(member)] = values[at(order[at(row)]), at(member)]


@jit
def gather_segments(values, starts, offsets, first, last, out):
    """Copy stretches [first, last) of ``values``, from ``starts``, to ``out[offsets[s]:offsets[s + 1]]``."""
    for segment in range(first, last):
        source = starts[segment]
        for target in range(offsets[segment], offsets[segment + 1]):
            out[at(target)] = values[at(source)]
            source += 1


@jit
def mean_pieces(pieces, starts, sizes, width, first, last, means):
    """Write the mean of the pieces of units [first, last), each of ``width`` micro-batches, rounded down."""
    for unit in range(first, last):
        total, count = 0, 0
        for microbatch in range(unit * width, (unit + 1) * width):
            for position in range(starts[microbatch], starts[microbatch] + sizes[microbatch]):
                total += pieces[at(position)]
                count += 1
        means[unit] = total // max(count, 1)


@jit
def join_entries(lengths, first, last, entries):
    """Write entries [first, last), length << 32 | sample, of samples in their order."""
    for sample in range(first, last):
        entries[at(sample)] = np.int64(lengths[at(sample)]) << 32 | sample


@jit
def split_entries(entries, first, last, samples, lengths):
    """Split entries [first, last), length << 32 | sample, into the two."""
    for place in range(first, last):
        entry = entries[at(place)]
        samples[at(place)] = entry & 0xFFFFFFFF
        lengths[at(place)] = entry >> 32
