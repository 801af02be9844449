"""The design effects of an epoch's steps, from its rows alone: how much more they differ than random ones.

It shares no code with the planner, which states the figure in ``plan.json``. Sums are of integers, divided
once.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from packer.plan.reader import Epoch, Plan
from packer.plan.rows import MicroBatches
from packer.plan.sources import source_of

NUM_CLASSES = 16
"""Of lengths, with about equal numbers of tokens."""

_FRACTION_BITS = 32
"""Of a step's Σ h² / W, behind the point; the rest is rounded down."""


ClassesOf = Callable[[MicroBatches], NDArray[np.integer]]
"""(P,) the class of each piece of a record batch."""


def design_effects(plan: Plan, epoch: int) -> dict[str, float | None]:
    """Return what an epoch's header entry states: by ``seqlen`` and by ``source``."""
    opened, step_size = plan.epoch(epoch), plan.dp_size * plan.grad_accum
    first_steps = np.array([phase["first_step"] for phase in plan.header.get("phases") or []] or [0])
    sources = plan.sources
    by_source = None
    if len(sources) > 1:

        def source_of_piece(table: MicroBatches) -> NDArray[np.integer]:
            return source_of(table.sample_ids, sources)

        by_source = _over_classes(opened, step_size, source_of_piece, len(sources), first_steps)
    return {"seqlen": design_effect(opened, step_size, first_steps), "source": by_source}


def design_effect(
    epoch: Epoch, step_size: int, first_steps: NDArray[np.integer] | None = None
) -> float | None:
    """Return the design effect in length: 1 where steps differ as random ones, 16 as those of a 16th of it.

    Fillers are left out, repeats count. Memory: the distinct lengths, and a few record batches.

    Args:
        epoch: whose rows are meant.
        step_size: E, the micro-batches of a step.
        first_steps: (phases,) where the phases of a mix begin: the steps of each are held against its own
            mix, and both sums, what they differ and what random ones would, are over all; None: one phase.

    Returns:
        None where no phase has lengths of two classes, or each has one step.
    """
    lengths, counts = _histogram(epoch)
    classes = _classes(lengths.tolist(), counts.tolist())
    # (classes,) the shortest length of each
    first_lengths = lengths[np.flatnonzero(np.diff(classes, prepend=-1))]
    return _over_classes(epoch, step_size, _classes_by_length(first_lengths), len(first_lengths), first_steps)


def _classes_by_length(first_lengths: NDArray[np.int64]) -> ClassesOf:
    """Return what tells the class of a piece from its length.

    Args:
        first_lengths: (classes,) the shortest length of each, rising.
    """
    return lambda table: np.searchsorted(first_lengths, table.seqlens, side="right") - 1


def _over_classes(
    epoch: Epoch,
    step_size: int,
    classes_of: ClassesOf,
    num_classes: int,
    first_steps: NDArray[np.integer] | None,
) -> float | None:
    """Return the design effect over classes of pieces; see ``design_effect``."""
    first_steps = np.zeros(1, np.int64) if first_steps is None else first_steps
    squares = _Squares(len(first_steps), num_classes)
    # by phase, as Python integers: 64 bits may not be enough
    tokens, held = np.zeros((len(first_steps), num_classes), object), [0] * len(first_steps)
    num_steps = np.zeros(len(first_steps), np.int64)
    for first_step, of_steps in _tokens_by_class(
        epoch, step_size, classes_of, num_classes, squares, first_steps
    ):
        phases = np.searchsorted(first_steps, first_step + np.arange(len(of_steps)), side="right") - 1
        for phase in np.unique(phases).tolist():
            mine = of_steps[phases == phase]
            held[phase] += _concentration(mine)
            tokens[phase] += mine.sum(axis=0).astype(object)
            num_steps[phase] += len(mine)
    has_two = any(np.count_nonzero(of_phase) > 1 for of_phase in tokens)
    spare_steps = int((num_steps - 1)[num_steps > 0].sum())
    if not has_two or spare_steps < 1:
        return None
    found = expected = Fraction(0)
    for phase, (of_phase, squared) in enumerate(zip(tokens.tolist(), squares.as_integers(), strict=True)):
        whole = sum(of_phase)
        if not whole:
            continue
        evenness = Fraction(sum(part * part for part in of_phase), whole * whole)  # Σ p²
        found += max(Fraction(held[phase], 1 << _FRACTION_BITS) - evenness * whole, Fraction(0))
        # Σ_k Σ_i w² (1[c = k] − p_k)² = Σ_i w² (1 + Σ p²) − 2 Σ_i w² p_c
        crossed = Fraction(sum(part * square for part, square in zip(of_phase, squared, strict=True)), whole)
        spread = sum(squared) * (1 + evenness) - 2 * crossed
        expected += spread * int(num_steps[phase]) / whole
    return float(found / expected * int(num_steps.sum()) / spare_steps)


class _Squares:
    """Σ w² by phase and class, exactly."""

    def __init__(self, num_phases: int, num_classes: int) -> None:
        # (2, phases, classes) the upper and the lower 32 bits, each summed in 64
        self._halves = np.zeros((2, num_phases, num_classes), np.int64)

    def add(
        self, phases: NDArray[np.integer], classes: NDArray[np.integer], seqlens: NDArray[np.int64]
    ) -> None:
        """Add (P,) pieces."""
        squares = seqlens * seqlens
        np.add.at(self._halves[0], (phases, classes), squares >> 32)
        np.add.at(self._halves[1], (phases, classes), squares & 0xFFFFFFFF)

    def as_integers(self) -> list[list[int]]:
        """Return them by phase, then class."""
        upper, lower = self._halves.tolist()
        return [
            [(high << 32) + low for high, low in zip(*pair, strict=True)]
            for pair in zip(upper, lower, strict=True)
        ]


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
    first_lengths = lengths[np.flatnonzero(np.diff(classes, prepend=-1))]
    num_classes = len(first_lengths)
    tokens = np.zeros((num_stretches, num_classes), np.int64)
    squares, held = _Squares(1, num_classes), 0
    for step, part in _tokens_by_class(
        epoch, step_size, _classes_by_length(first_lengths), num_classes, squares, np.zeros(1, np.int64)
    ):
        np.add.at(tokens, stretch_of[step : step + len(part)], part)
        held += _concentration(part)
    whole = int(tokens.sum())
    of_steps = Fraction(held, 1 << _FRACTION_BITS)
    of_stretches = sum((_evenness(row) for row in tokens.tolist()), Fraction(0))
    (squared,) = squares.as_integers()
    shares = [Fraction(int(part), whole) for part in tokens.sum(axis=0)]
    spread = sum(
        (square * (1 - 2 * share) for square, share in zip(squared, shares, strict=True)), Fraction(0)
    ) + sum(squared) * sum(share * share for share in shares)
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
    epoch: Epoch,
    step_size: int,
    classes_of: ClassesOf,
    num_classes: int,
    squares: _Squares,
    first_steps: NDArray[np.integer],
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the first of some whole steps and their (steps, K) tokens, in order; count squares on the way.

    Args:
        epoch: whose rows are meant.
        step_size: E.
        classes_of: tells classes.
        num_classes: K.
        squares: what is added to.
        first_steps: (phases,)
    """
    begun = np.zeros(num_classes, np.int64)  # of the step that goes on in the next record batch
    for table in epoch.microbatches():
        last_row = table.first_row + len(table.step)
        first_step = table.first_row // step_size
        step = np.arange(table.first_row, last_row) // step_size - first_step
        trained = _trained(table)
        of_piece = np.repeat(step, np.diff(table.offsets))[trained]
        seqlens, classes = table.seqlens[trained].astype(np.int64), classes_of(table)[trained]
        squares.add(np.searchsorted(first_steps, first_step + of_piece, side="right") - 1, classes, seqlens)
        tokens = np.zeros((int(step[-1]) + 2, num_classes), np.int64)
        tokens[0] = begun
        np.add.at(tokens, (of_piece, classes), seqlens)
        num_whole = last_row // step_size - first_step
        begun = tokens[num_whole]
        yield first_step, tokens[:num_whole]


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
