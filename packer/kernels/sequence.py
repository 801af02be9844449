"""Steps put into the order in which the sources' running totals stay nearest to their shares.

Error diffusion: of the next steps of a random order, one comes next that makes up for what those before it
were off. So what the sources have given by any step is off by little more than one step's own deviation, and
so is what any stretch of steps holds of them.
"""

import numpy as np

from packer.kernels._jit import at, jit

REACH = 64
"""Steps among which the next one is chosen."""

_OLDEST = 1 << 10
"""From this age on a step's age counts no more: far over what any reaches, but no sum may overflow."""

UNIT_BITS = 12
"""Deviations are counted in units of 2^-12 of what is tolerated."""

_MOST = np.int64(1) << 20


@jit
def deviations_of(held, shares, share_bits, tolerances, first, last, out):
    """Write how far steps [first, last) are from the shares, in units of 2^-12 of each tolerance.

    Args:
        held: (T, S) int64, units of each source in each step.
        shares: (S,) int64, of each source, in units of 2^-share_bits.
        share_bits: so few that no product overflows.
        tolerances: (S,) int64 above 0, units that a source may be off.
        first: first step.
        last: end of the steps.
        out: (T, S) int64, filled from ``first`` to ``last``.
    """
    for step in range(first, last):
        total = np.int64(0)
        for source in range(held.shape[1]):
            total += held[at(step), at(source)]
        for source in range(held.shape[1]):
            off = (held[at(step), at(source)] << share_bits) - total * shares[at(source)]
            tolerance = tolerances[at(source)]
            if share_bits >= UNIT_BITS:
                tolerance <<= share_bits - UNIT_BITS
            else:
                tolerance = max(np.int64(1), tolerance >> (UNIT_BITS - share_bits))
            off = (off + (tolerance >> 1)) // tolerance
            out[at(step), at(source)] = min(max(off, -_MOST), _MOST)


@jit
def sequence(deviations, first, last, sums, order):
    """Write steps [first, last) in their order to ``order[first:last]``.

    Of the next 64 steps that comes first for which 2 d·v + (1/2 − age/128) v² is least: d the running totals,
    v the step's deviations. So a step that is far off is used as soon as it makes up for what others were
    off, rather than left for the end, and none waits for long.

    Args:
        deviations: (T, S) int64, as ``deviations_of`` fills it; S below 2^12.
        first: first step.
        last: end of the steps.
        sums: (S,) int64, running totals; moved.
        order: (T,) int64, filled.
    """
    num_sources = deviations.shape[1]
    waiting = np.empty(REACH, np.int64)  # as they came
    count, entered = 0, first
    for place in range(first, last):
        while count < REACH and entered < last:
            waiting[at(count)] = entered
            count += 1
            entered += 1
        best, least = 0, np.int64(0)
        for candidate in range(count):
            step = at(waiting[at(candidate)])
            crossed, squares = np.int64(0), np.int64(0)
            for source in range(num_sources):
                off = deviations[step, at(source)]
                crossed += sums[at(source)] * off
                squares += off * off
            cost = 256 * crossed + (64 - min(place - waiting[at(candidate)], _OLDEST)) * squares
            if candidate == 0 or cost < least:
                best, least = candidate, cost
        step = waiting[at(best)]
        order[at(place)] = step
        for source in range(num_sources):
            moved = sums[at(source)] + deviations[at(step), at(source)]
            sums[at(source)] = min(max(moved, -_MOST), _MOST)
        count -= 1
        for candidate in range(best, count):
            waiting[at(candidate)] = waiting[at(candidate + 1)]


@jit
def hold(seqlens, sources, starts, sizes, rows, step_size, first, last, of_sample, out):
    """Write what each source gives steps [first, last).

    Args:
        seqlens: (n,) int32, the lengths of all samples.
        sources: (n,) integers, the source of each.
        starts: (M,) int64, where each micro-batch begins in ``seqlens``.
        sizes: (M,) int64, samples of each micro-batch.
        rows: (T · E,) int64, micro-batches, step by step.
        step_size: E.
        first: first step.
        last: end of the steps.
        of_sample: units of a sample; 0 where a token is one.
        out: (T, S) int64, filled from ``first`` to ``last``.
    """
    for step in range(first, last):
        row = out[step]
        row[:] = 0
        for place in range(step * step_size, (step + 1) * step_size):
            start = starts[at(rows[at(place)])]
            for position in range(start, start + sizes[at(rows[at(place)])]):
                row[at(sources[at(position)])] += (
                    of_sample if of_sample > 0 else np.int64(seqlens[at(position)])
                )


@jit
def longest_of(seqlens, sources, starts, sizes, rows, first, last, out):
    """Raise ``out`` (int64[S]) to the longest sample of each source in ``rows[first:last]``."""
    for place in range(first, last):
        start = starts[at(rows[at(place)])]
        for position in range(start, start + sizes[at(rows[at(place)])]):
            source = at(sources[at(position)])
            out[source] = max(out[source], np.int64(seqlens[at(position)]))
