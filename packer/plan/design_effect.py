"""The design effect of an epoch's steps, from its rows alone: how much more they differ than random ones.

It shares no code with the planner, which states the figure in ``plan.json``. Sums are of integers, divided
once.
"""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from packer.plan.reader import Epoch
from packer.plan.rows import MicroBatches

NUM_CLASSES = 16
"""Of lengths, with about equal numbers of tokens."""

_FRACTION_BITS = 32
"""Of a step's Σ h² / W, behind the point; the rest is rounded down."""


def design_effect(epoch: Epoch, step_size: int) -> float | None:
    """Return the design effect in length: 1 where steps differ as random ones, 16 as those of a 16th of it.

    Fillers are left out, repeats count. Memory: the distinct lengths, and a few record batches.

    Args:
        epoch: whose rows are meant.
        step_size: E, the micro-batches of a step.

    Returns:
        None for lengths of one class, or fewer than two steps.
    """
    lengths, counts = _histogram(epoch)
    classes = _classes(lengths.tolist(), counts.tolist())
    num_classes = len(set(classes))
    if num_classes < 2 or epoch.num_steps < 2:
        return None
    # Σ w and Σ w² by class, as Python integers: at a billion long samples 64 bits are not enough
    tokens, squares = [0] * num_classes, [0] * num_classes
    for number, length, count in zip(classes, lengths.tolist(), counts.tolist(), strict=True):
        tokens[number] += length * count
        squares[number] += length * length * count
    first_of_class = np.flatnonzero(np.diff(classes, prepend=-1))
    held = sum(_concentration(part) for part in _tokens_by_class(epoch, step_size, lengths[first_of_class]))
    whole, num_steps = sum(tokens), epoch.num_steps
    evenness = Fraction(sum(part * part for part in tokens), whole * whole)  # Σ p²
    found = max(Fraction(held, whole << _FRACTION_BITS) - evenness, Fraction(0))
    # Σ_k Σ_i w² (1[c = k] − p_k)² = Σ_i w² (1 + Σ p²) − 2 Σ_i w² p_c
    crossed = Fraction(sum(part * square for part, square in zip(tokens, squares, strict=True)), whole)
    expected = (sum(squares) * (1 + evenness) - 2 * crossed) * num_steps / (whole * whole)
    return float(found / expected * num_steps / (num_steps - 1))


def design_effects_by_stretch(
    epoch: Epoch, step_size: int, first_steps: NDArray[np.int64]
) -> tuple[float | None, float | None]:
    """Return the design effect of the steps in their stretch of the epoch, and of the stretches in the epoch.

    Both are 1 where samples are random, as steps and as stretches.

    Args:
        epoch: whose rows are meant.
        step_size: E.
        first_steps: (G,) of each stretch, rising from 0.

    Returns:
        None for lengths of one class, or stretches of a step each; of stretches None for a single one.
    """
    lengths, counts = _histogram(epoch)
    classes = _classes(lengths.tolist(), counts.tolist())
    num_steps, num_stretches = epoch.num_steps, len(first_steps)
    if len(set(classes)) < 2 or num_steps == num_stretches:
        return None, None
    stretch_of = np.repeat(np.arange(num_stretches), np.diff(first_steps, append=num_steps))
    first_of_class = np.flatnonzero(np.diff(classes, prepend=-1))
    tokens = np.zeros((num_stretches, len(first_of_class)), np.int64)
    held = step = 0
    for part in _tokens_by_class(epoch, step_size, lengths[first_of_class]):
        np.add.at(tokens, stretch_of[step : step + len(part)], part)
        step += len(part)
        held += _concentration(part)
    whole = int(tokens.sum())
    of_steps = Fraction(held, 1 << _FRACTION_BITS)
    of_stretches = sum((_evenness(row) for row in tokens.tolist()), Fraction(0))
    weights = [int(count) * int(length) ** 2 for length, count in zip(lengths, counts, strict=True)]
    shares = [Fraction(int(part), whole) for part in tokens.sum(axis=0)]
    spread = sum(
        (weight * (1 - 2 * shares[number]) for number, weight in zip(classes, weights, strict=True)),
        Fraction(0),
    ) + sum(weights) * sum(share * share for share in shares)
    expected = spread / whole  # of a single step, times the tokens of the epoch
    within = float(max(of_steps - of_stretches, Fraction(0)) / expected / (num_steps - num_stretches))
    if num_stretches < 2:
        return within, None
    return within, float(
        (of_stretches - _evenness(tokens.sum(axis=0).tolist())) / expected / (num_stretches - 1)
    )


def _evenness(tokens: list[int]) -> Fraction:
    """Return Σ h_k² / W."""
    return Fraction(sum(part * part for part in tokens), max(1, sum(tokens)))


def _trained(table: MicroBatches) -> NDArray[np.bool_]:
    """Return (P,) which pieces are of no filler."""
    return np.repeat(~table.is_filler, np.diff(table.offsets))


def _histogram(epoch: Epoch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct lengths, rising, and how many pieces have each."""
    lengths, counts = np.empty((2, 0), np.int64)
    for table in epoch.microbatches():
        found, numbers = np.unique(table.seqlens[_trained(table)], return_counts=True)
        lengths, place = np.unique(np.concatenate([lengths, found.astype(np.int64)]), return_inverse=True)
        sums = np.zeros(len(lengths), np.int64)
        np.add.at(sums, place, np.concatenate([counts, numbers]))
        counts = sums
    return lengths, counts


def _classes(lengths: list[int], counts: list[int]) -> list[int]:
    """Return each length's class, ⌊16 · (tokens of shorter ones + half its own) / all⌋; unused skipped."""
    whole = sum(length * count for length, count in zip(lengths, counts, strict=True))
    classes: list[int] = []
    below, before, number = 0, -1, -1
    for length, count in zip(lengths, counts, strict=True):
        own = length * count
        found = NUM_CLASSES * (2 * below + own) // (2 * whole)
        number += found != before
        classes.append(number)
        below, before = below + own, found
    return classes


def _tokens_by_class(
    epoch: Epoch, step_size: int, first_lengths: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Yield (steps, K) tokens of whole steps, in order.

    Args:
        epoch: whose rows are meant.
        step_size: E.
        first_lengths: (K,) the shortest length of each class.
    """
    num_classes = len(first_lengths)
    begun = np.zeros(num_classes, np.int64)  # of the step that goes on in the next record batch
    for table in epoch.microbatches():
        last_row = table.first_row + len(table.step)
        first_step = table.first_row // step_size
        step = np.arange(table.first_row, last_row) // step_size - first_step
        trained = _trained(table)
        of_piece = np.repeat(step, np.diff(table.offsets))[trained]
        seqlens = table.seqlens[trained]
        tokens = np.zeros((int(step[-1]) + 2, num_classes), np.int64)
        tokens[0] = begun
        np.add.at(tokens, (of_piece, np.searchsorted(first_lengths, seqlens, side="right") - 1), seqlens)
        num_whole = last_row // step_size - first_step
        begun = tokens[num_whole]
        yield tokens[:num_whole]


def _concentration(tokens: NDArray[np.int64]) -> int:
    """Return Σ_t Σ_k h_tk² / W_t in units of 2^-32 tokens.

    Each step's quotient is rounded down; from 2^31 tokens a step on, each class's on its own.
    """
    whole = tokens.sum(axis=1)
    is_small = (whole > 0) & (whole < 1 << 31)  # where 64 bits hold the squares, and the rest shifted by 32
    small, divisors = tokens[is_small], whole[is_small]
    quotients, rests = np.divmod((small * small).sum(axis=1), divisors)
    total = (int(quotients.sum()) << _FRACTION_BITS) + int(((rests << _FRACTION_BITS) // divisors).sum())
    for parts in tokens[whole >= 1 << 31].tolist():
        total += sum((part * part << _FRACTION_BITS) // sum(parts) for part in parts)
    return total
