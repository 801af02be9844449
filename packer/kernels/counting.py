"""Counting: histograms of lengths, and ids scattered into the order of their lengths."""

from packer.kernels._jit import jit


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
def gather_segments(values, starts, offsets, first, last, out):
    """Copy stretches [first, last) of ``values``, from ``starts``, to ``out[offsets[s]:offsets[s + 1]]``."""
    for segment in range(first, last):
        source = starts[segment]
        target = offsets[segment]
        for position in range(offsets[segment + 1] - target):
            out[target + position] = values[source + position]
