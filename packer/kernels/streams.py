"""Several streams merged so that every stretch of the result holds every stream's share.

A stream's clock is the plan's position at which its next sample is due: a sample of w units moves it by w
over the stream's share. The sample whose middle is due first comes next. So at any position a stream is
behind or ahead of its share by half a sample. All in integers: a clock carries what a division leaves.
"""

import numpy as np

from packer.kernels._jit import at, inline, jit
from packer.kernels.rng import shuffle, subkey

WEIGHT_BITS = 30
"""A stream's share is its weight in units of 2^-30."""

SAMPLE_UNITS = 1 << 10
"""Units of a sample where samples, not tokens, are shared out: clocks are whole numbers of them."""

NEVER = np.int64(2**62)
"""When a stream is due that has no more samples, or no share."""


@inline
def _advance(stream, amount, weights, quotas, begins, clock, rest, phase, left):
    """Move the clock of a stream by ``amount`` of its units; into the next phases where its quota is used."""
    while amount > left[at(stream)] and phase[at(stream)] + 1 < len(begins):
        amount -= left[at(stream)]
        phase[at(stream)] += 1
        now = phase[at(stream)]
        clock[at(stream)], rest[at(stream)] = begins[at(now)], 0
        left[at(stream)] = quotas[at(now), at(stream)]
    weight = weights[at(phase[at(stream)]), at(stream)]
    left[at(stream)] -= amount
    if weight == 0:
        if amount > 0:
            clock[at(stream)] = NEVER
        return
    moved = (amount << WEIGHT_BITS) + rest[at(stream)]
    clock[at(stream)] = min(clock[at(stream)] + moved // weight, NEVER)
    rest[at(stream)] = moved % weight


@jit
def merge(entries, edges, weights, quotas, begins, end, by_samples, places, seqlens, streams, phase_starts):
    """Merge streams of entries (length << 32 | place) by when the middle of each sample is due.

    Args:
        entries: int64, stream after stream.
        edges: (S + 1,) int64, stream s is ``entries[edges[s]:edges[s + 1]]``.
        weights: (H, S) int64 below 2^31, each phase's shares in units of 2^-30.
        quotas: (H, S) int64, units of each stream in each phase; those of the last phase do not end.
        begins: (H,) int64, the plan's position at which each phase begins; 0 first.
        end: int64, position from which on nothing is due any more.
        by_samples: whether a sample is ``SAMPLE_UNITS`` units, not its tokens.
        places: (P,) integers, filled: in the merged order.
        seqlens: (P,) int32, filled likewise.
        streams: (P,) integers, filled: of which stream each is.
        phase_starts: (H,) int64, filled: the first sample of each phase.

    Returns:
        How many samples were due.
    """
    num_streams, num_phases = len(edges) - 1, len(begins)
    cursors = edges[:num_streams].copy()
    clock, rest = np.zeros(num_streams, np.int64), np.zeros(num_streams, np.int64)
    phase, left = np.zeros(num_streams, np.int64), quotas[0].copy()
    due = np.empty(num_streams, np.int64)
    for stream in range(num_streams):
        _set_due(
            stream,
            entries,
            edges,
            by_samples,
            cursors,
            weights,
            quotas,
            begins,
            clock,
            rest,
            phase,
            left,
            due,
        )
    count, current = np.int64(0), 0
    phase_starts[:] = 0
    while True:
        first = 0
        for stream in range(1, num_streams):
            if due[at(stream)] < due[at(first)]:
                first = stream
        now = due[at(first)]
        while current + 1 < num_phases and now >= begins[at(current + 1)]:
            current += 1
            phase_starts[at(current)] = count
        if now >= end or now >= NEVER:
            return count
        entry = entries[at(cursors[at(first)])]
        places[at(count)] = entry & 0xFFFFFFFF
        seqlens[at(count)] = entry >> 32
        streams[at(count)] = first
        count += 1
        cursors[at(first)] += 1
        _set_due(
            first, entries, edges, by_samples, cursors, weights, quotas, begins, clock, rest, phase, left, due
        )


@inline
def _set_due(
    stream, entries, edges, by_samples, cursors, weights, quotas, begins, clock, rest, phase, left, due
):
    """Set when the middle of a stream's next sample is due; its clock then shows the sample's end."""
    if cursors[at(stream)] == edges[at(stream + 1)] or clock[at(stream)] >= NEVER:
        due[at(stream)] = NEVER
        return
    amount = np.int64(SAMPLE_UNITS) if by_samples else entries[at(cursors[at(stream)])] >> 32
    # a share that begins later begins with its phase
    while left[at(stream)] == 0 and phase[at(stream)] + 1 < len(begins):
        phase[at(stream)] += 1
        clock[at(stream)], rest[at(stream)] = begins[at(phase[at(stream)])], 0
        left[at(stream)] = quotas[at(phase[at(stream)]), at(stream)]
    before, room = clock[at(stream)], left[at(stream)]
    _advance(stream, amount, weights, quotas, begins, clock, rest, phase, left)
    if clock[at(stream)] >= NEVER:
        # the stream's share ends inside the sample
        due[at(stream)] = before if 2 * room >= amount else NEVER
        return
    due[at(stream)] = before + (clock[at(stream)] - before >> 1)


@jit
def mark_newest(places, streams, count, skipped, is_left):
    """Clear ``is_left`` (bool by place) at the places that the newest pass of their stream reaches.

    Args:
        places: (P,) integers, of the samples of a merged order.
        streams: (P,) integers, the stream of each.
        count: how many samples count.
        skipped: (S,) int64, samples of each stream before its newest pass.
        is_left: bool by place.
    """
    seen = np.zeros(len(skipped), np.int64)
    for sample in range(count):
        stream = at(streams[at(sample)])
        if seen[stream] >= skipped[stream]:
            is_left[at(places[at(sample)])] = False
        seen[stream] += 1


@jit
def shuffle_passes(orders, key):
    """Fill every row of ``orders`` (int64[passes, n]) but the first with the one before, shuffled in parts.

    Odd rows are shuffled inside their halves, even ones inside their middle and the quarters around it.
    """
    count = orders.shape[1]
    for number in range(1, len(orders)):
        row, stream = orders[number], subkey(key, number)
        row[:] = orders[number - 1]
        if number % 2 == 1:
            shuffle(row, 0, count // 2, subkey(stream, 0))
            shuffle(row, count // 2, count, subkey(stream, 1))
        else:
            shuffle(row, 0, count // 4, subkey(stream, 0))
            shuffle(row, count // 4, count - count // 4, subkey(stream, 1))
            shuffle(row, count - count // 4, count, subkey(stream, 2))
