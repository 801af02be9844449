"""The mix of a step: classes of lengths, what micro-batches hold of each, and the design effect.

The design effect is survey sampling's (Kish 1965): how much more the steps differ than random samples of
their size would. Sums are of integers, so that no order of summation, and no chunk, changes a digit.
"""

from fractions import Fraction

import numpy as np

from packer.kernels._jit import at, inline, jit

NUM_CLASSES = 16

_LOW_32 = np.uint64(0xFFFFFFFF)
_EXACT = np.uint64(1 << 31)


def length_classes(lengths, counts, num_classes=NUM_CLASSES):
    """Cut lengths into classes of about equal numbers of tokens: ⌊16 · (tokens below + half its own) / all⌋.

    Args:
        lengths: (L,) int64, distinct and rising, from 0.
        counts: (L,) int64, samples of each; Σ length · count < 2^62.
        num_classes: classes to cut into; those without a length are left out.

    Returns:
        (K,) int64, the longest length of each class that is used; (K,) int64, the tokens of each.
    """
    own = lengths * counts
    # twice the middle of each length's tokens, in the order of lengths: it never falls
    middles = 2 * np.cumsum(own) - own
    total = int(own.sum())
    edges = [-(-2 * total * number // num_classes) for number in range(1, num_classes)]
    classes = np.searchsorted(np.array(edges, np.int64), middles, side="right")
    last = np.flatnonzero(np.append(classes[1:] != classes[:-1], True)) if len(classes) else classes
    below = np.append(np.zeros(1, np.int64), np.cumsum(own)[last])
    return lengths[last].astype(np.int64), np.diff(below)


@inline
def _class_of(bounds, seqlen):
    """Return the first class whose longest length is ``seqlen`` or more; the last one beyond."""
    low, high = np.int64(0), np.int64(len(bounds) - 1)
    while low < high:
        middle = (low + high) >> 1
        if bounds[at(middle)] < seqlen:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def tokens_by_class(seqlens, sources, bounds, starts, sizes, first, last, out):
    """Count the tokens that micro-batches [first, last) hold of each class.

    With S sources a class is one of length and source jointly, ``length class · S + source``; one bound
    leaves the sources alone as classes.

    Args:
        seqlens: (n,) int32, the lengths of all samples.
        sources: (n,) integers, the source of each; empty where there is one.
        bounds: (L,) int64, the longest length of each length class.
        starts: (M,) int64, where each micro-batch begins in ``seqlens``.
        sizes: (M,) int64, samples of each micro-batch.
        first: first micro-batch.
        last: end of the micro-batches.
        out: (last − first, L · S) int64, filled.
    """
    num_sources = out.shape[1] // len(bounds)
    for microbatch in range(first, last):
        row = out[microbatch - first]
        row[:] = 0
        _add_tokens(seqlens, sources, bounds, starts[microbatch], sizes[microbatch], num_sources, row)


@inline
def _add_tokens(seqlens, sources, bounds, start, size, num_sources, row):
    below, above, column = np.int64(0), np.int64(-1), np.int64(0)
    for position in range(start, start + size):
        seqlen = np.int64(seqlens[at(position)])
        if seqlen <= below or seqlen > above:  # neighbours are often of one class
            number = _class_of(bounds, seqlen)
            column = number * num_sources
            below = bounds[at(number - 1)] if number > 0 else np.int64(-1)
            above = bounds[at(number)]
        if len(sources) > 0:
            row[at(column + sources[at(position)])] += seqlen
        else:
            row[at(column)] += seqlen


@inline
def _share_squared(part, whole):
    """Return part² / whole, rounded down: its integer, and 32 bits behind the point; part ≤ whole < 2^62."""
    if whole < _EXACT:
        square = part * part
        rest = square % whole
        return square // whole, (rest << np.uint64(32)) // whole
    quotient, rest = np.uint64(0), np.uint64(0)
    for bit in range(61, -33, -1):  # long division, the bits of part before the point
        quotient, rest = quotient << np.uint64(1), rest << np.uint64(1)
        if bit >= 0 and (part >> np.uint64(bit)) & np.uint64(1):
            rest += part
        while rest >= whole:
            rest -= whole
            quotient += np.uint64(1)
        if bit == 0:
            number, quotient = quotient, np.uint64(0)
    return number, quotient


@jit
def sum_steps(
    seqlens, sources, bounds, offsets, is_filler, step_size, first, last, tokens, squares, concentration
):
    """Add up what the design effect needs of steps [first, last).

    Args:
        seqlens: (n,) int32, the lengths of all samples, row by row.
        sources: (n,) integers, the source of each; empty where there is one.
        bounds: (L,) int64, the longest length of each length class.
        offsets: (R + 1,) int64, row r holds ``seqlens[offsets[r]:offsets[r + 1]]``.
        is_filler: (R,) bool, rows that are left out; empty where there is none.
        step_size: rows of a step.
        first: first step.
        last: end of the steps.
        tokens: (K,) int64, added to: Σ w_i by class.
        squares: (K, 2) uint64, added to: Σ w_i² by class, the upper and the lower 32 bits on their own.
        concentration: (2,) uint64, added to: Σ_t Σ_k h_tk² / W_t, h the tokens of a class, W of all; whole
            tokens, and 2^-32 tokens below 2^32.
    """
    num_classes = len(tokens)
    num_sources = num_classes // len(bounds)
    row = np.empty(num_classes, np.int64)
    for step in range(first, last):
        row[:] = 0
        for index in range(step * step_size, (step + 1) * step_size):
            if len(is_filler) > 0 and is_filler[index]:
                continue
            start, stop = offsets[index], offsets[index + 1]
            _add_tokens(seqlens, sources, bounds, start, stop - start, num_sources, row)
            _add_squares(seqlens, sources, bounds, start, stop, num_sources, squares)
        whole = np.uint64(row.sum())
        for number in range(num_classes):
            tokens[number] += row[number]
            if row[number] > 0:
                quotient, fraction = _share_squared(np.uint64(row[number]), whole)
                fraction += concentration[1]
                concentration[0] += quotient + (fraction >> np.uint64(32))
                concentration[1] = fraction & _LOW_32


@inline
def _add_squares(seqlens, sources, bounds, start, stop, num_sources, squares):
    for position in range(start, stop):
        seqlen = np.int64(seqlens[at(position)])
        column = _class_of(bounds, seqlen) * num_sources
        if len(sources) > 0:
            column += np.int64(sources[at(position)])
        square = np.uint64(seqlen * seqlen)
        squares[at(column), 0] += square >> np.uint64(32)
        squares[at(column), 1] += square & _LOW_32


def design_effect(tokens, squares, concentration, num_steps):
    """Return how much more the steps differ in their mix than random samples would make them.

    Args:
        tokens: (K,) of all steps, as ``sum_steps`` adds them up.
        squares: (K, 2) likewise.
        concentration: (2,) likewise.
        num_steps: T.

    Returns:
        1 for steps of random samples, below 1 for stratified ones; None for one class, or one step.
    """
    parts = [int(part) for part in tokens]
    whole = sum(parts)
    if num_steps < 2 or sum(part > 0 for part in parts) < 2:
        return None
    by_class = [(int(upper) << 32) + int(lower) for upper, lower in squares]
    evenness = Fraction(sum(part * part for part in parts), whole * whole)  # Σ p_k²
    found = Fraction((int(concentration[0]) << 32) + int(concentration[1]), whole << 32) - evenness
    # each quotient is rounded down: steps of one mix would come out a hair below nothing
    expected = _random_spread(parts, by_class, num_steps)
    return float(max(found, Fraction(0)) / expected * num_steps / (num_steps - 1))


def random_spread(lengths, counts, bounds, num_steps):
    """Return Σ_k (p_tk − p_k)², as it would be on average, if the steps were of random samples.

    Args:
        lengths: (L,) int64, distinct and rising.
        counts: (L,) int64, samples of each.
        bounds: (K,) int64, the longest length of each class.
        num_steps: over which the samples are spread.
    """
    classes = np.searchsorted(bounds, lengths)
    parts, by_class = [0] * len(bounds), [0] * len(bounds)
    for number, length, count in zip(classes.tolist(), lengths.tolist(), counts.tolist(), strict=True):
        parts[number] += length * count
        by_class[number] += length * length * count
    return float(_random_spread(parts, by_class, num_steps)) if any(parts) else 0.0


def _random_spread(tokens, squares, num_steps):
    """Return Σ_k mean_i(w_i² (1[c_i = k] − p_k)²) / (n · mean_i(w_i)²), where n = N / num_steps."""
    whole = sum(tokens)
    evenness = Fraction(sum(part * part for part in tokens), whole * whole)
    crossed = Fraction(sum(part * square for part, square in zip(tokens, squares, strict=True)), whole)
    return (sum(squares) * (1 + evenness) - 2 * crossed) * num_steps / (whole * whole)
