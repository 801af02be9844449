"""The mix of a step: classes of lengths, what micro-batches hold of each, and the design effect.

The design effect is survey sampling's (Kish 1965): how much more the steps differ than random samples of
their size would. Sums are of integers, so that no order of summation, and no chunk, changes a digit.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.kernels._jit import at, inline, jit

NUM_CLASSES = 16

_LOW_32 = np.uint64(0xFFFFFFFF)
_EXACT = np.uint64(1 << 31)
_TABLE_SIZE = 4096


def length_classes(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], num_classes: int = NUM_CLASSES
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
def _first_classes(bounds):
    """Return a table from length >> shift to the first class that may hold the length, and the shift."""
    shift = 0
    while bounds[len(bounds) - 1] >> shift >= _TABLE_SIZE:
        shift += 1
    table = np.empty((bounds[len(bounds) - 1] >> shift) + 1, np.int64)
    number = 0
    for entry in range(len(table)):
        while bounds[number] < entry << shift:
            number += 1
        table[entry] = number
    return table, shift


@inline
def _class_of(seqlen, bounds, table, shift):
    """Return the class of a length; the last one for what is longer than all."""
    seqlen = min(seqlen, bounds[at(len(bounds) - 1)])
    number = table[at(seqlen >> shift)]
    while bounds[at(number)] < seqlen:
        number += 1
    return number


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
    table, shift = _first_classes(bounds)
    for microbatch in range(first, last):
        row = out[microbatch - first]
        row[:] = 0
        for position in range(starts[microbatch], starts[microbatch] + sizes[microbatch]):
            seqlen = np.int64(seqlens[at(position)])
            column = _class_of(seqlen, bounds, table, shift) * num_sources
            if len(sources) > 0:
                column += np.int64(sources[at(position)])
            row[at(column)] += seqlen


@inline
def _add_concentration(row, concentration):
    """Add Σ_k row_k² / Σ_k row_k, rounded down to 2^-32, to an integer and the 32 bits behind the point."""
    whole = np.uint64(row.sum())
    if whole == 0:
        return
    fraction = concentration[1]
    if whole < _EXACT:
        squares = np.uint64((row * row).sum())  # at most whole²
        concentration[0] += squares // whole
        fraction += (squares % whole << np.uint64(32)) // whole
    else:
        for part in row:
            quotient, rest = _square_over(np.uint64(part), whole)
            concentration[0] += quotient
            fraction += rest
    concentration[0] += fraction >> np.uint64(32)
    concentration[1] = fraction & _LOW_32


@inline
def _square_over(part, whole):
    """Return ⌊part² / whole⌋, and the 32 bits behind the point, by long division; part ≤ whole < 2^62."""
    number, quotient, rest = np.uint64(0), np.uint64(0), np.uint64(0)
    for bit in range(61, -33, -1):
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
    table, shift = _first_classes(bounds)
    row = np.empty(num_classes, np.int64)
    upper, lower = np.zeros(num_classes, np.uint64), np.zeros(num_classes, np.uint64)
    for step in range(first, last):
        row[:] = 0
        for index in range(step * step_size, (step + 1) * step_size):
            if len(is_filler) > 0 and is_filler[index]:
                continue
            for position in range(offsets[index], offsets[index + 1]):
                seqlen = np.int64(seqlens[at(position)])
                column = _class_of(seqlen, bounds, table, shift) * num_sources
                if len(sources) > 0:
                    column += np.int64(sources[at(position)])
                row[at(column)] += seqlen
                square = np.uint64(seqlen * seqlen)
                upper[at(column)] += square >> np.uint64(32)
                lower[at(column)] += square & _LOW_32
        tokens += row
        _add_concentration(row, concentration)
    squares[:, 0] += upper
    squares[:, 1] += lower


class StepSums(NamedTuple):
    """What ``sum_steps`` adds up over steps that have one mix."""

    tokens: NDArray[np.int64]
    """(K,)"""
    squares: NDArray[np.uint64]
    """(K, 2)"""
    concentration: NDArray[np.uint64]
    """(2,)"""
    num_steps: int
    """T."""


def design_effect(phases: Sequence[StepSums]) -> float | None:
    """Return how much more the steps differ in their mix than random samples would make them.

    Args:
        phases: of the epoch, one unless its mix changes: the steps of each are held against its own mix, and
            what they differ, and random samples would, is weighted by its tokens.

    Returns:
        1 for steps of random samples, below 1 for stratified ones; None where no phase has two classes, or
        there is one step a phase.
    """
    found, expected, num_steps, num_classes = Fraction(0), Fraction(0), 0, 0
    for sums in phases:
        parts = [int(part) for part in sums.tokens]
        whole = sum(parts)
        if not whole:
            continue
        num_steps += sums.num_steps - 1
        num_classes = max(num_classes, sum(part > 0 for part in parts))
        by_class = [(int(upper) << 32) + int(lower) for upper, lower in sums.squares]
        evenness = Fraction(sum(part * part for part in parts), whole * whole)  # Σ p_k²
        held = (int(sums.concentration[0]) << 32) + int(sums.concentration[1])
        # each quotient is rounded down: steps of one mix would come out a hair below nothing
        found += max(Fraction(held, whole << 32) - evenness, Fraction(0)) * whole
        expected += _random_spread(parts, by_class, sums.num_steps) * whole
    if num_steps < 1 or num_classes < 2:
        return None
    all_steps = sum(sums.num_steps for sums in phases)
    return float(found / expected * all_steps / num_steps)


@jit
def sum_sources(seqlens, sources, first, last, out):
    """Add up samples [first, last) by source.

    Args:
        seqlens: (n,) int32.
        sources: (n,) integers.
        first: first sample.
        last: end of the samples.
        out: (3, S) int64, added to: Σ length; Σ length², the upper and the lower 32 bits on their own.
    """
    for sample in range(first, last):
        seqlen, source = np.int64(seqlens[at(sample)]), at(sources[at(sample)])
        out[0, source] += seqlen
        out[1, source] += seqlen * seqlen >> 32
        out[2, source] += seqlen * seqlen & 0xFFFFFFFF


def spread_of(sums: NDArray[np.int64], num_steps: int) -> float:
    """Return Σ_k (p_tk − p_k)², on average, of steps of random samples with these ``sum_sources``."""
    tokens, upper, lower = sums.tolist()
    squares = [(high << 32) + low for high, low in zip(upper, lower, strict=True)]
    return float(_random_spread(tokens, squares, num_steps)) if any(tokens) else 0.0


def random_spread(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], bounds: NDArray[np.int64], num_steps: int
) -> float:
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


def _random_spread(tokens: list[int], squares: list[int], num_steps: int) -> Fraction:
    """Return Σ_k mean_i(w_i² (1[c_i = k] − p_k)²) / (n · mean_i(w_i)²), where n = N / num_steps."""
    whole = sum(tokens)
    evenness = Fraction(sum(part * part for part in tokens), whole * whole)
    crossed = Fraction(sum(part * square for part, square in zip(tokens, squares, strict=True)), whole)
    return (sum(squares) * (1 + evenness) - 2 * crossed) * num_steps / (whole * whole)
