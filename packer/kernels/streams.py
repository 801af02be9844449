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
def _next_due(amount, before, rest, weight):
    """Return where a stream's clock is after ``amount`` units of a share, and what the division leaves."""
    moved = np.uint64((amount << WEIGHT_BITS) + rest)
    quotient = moved // np.uint64(weight)
    return min(before + np.int64(quotient), NEVER), np.int64(moved - quotient * np.uint64(weight))


@inline
def _set_due(stream, amount, weights, quotas, begins, clock, rest, phase, left, due):
    """Set when the middle of a stream's next sample is due; its clock then shows the sample's end."""
    # a share that begins later begins with its phase
    while left[stream] == 0 and phase[stream] + 1 < len(begins):
        phase[stream] += 1
        clock[stream], rest[stream] = begins[at(phase[stream])], 0
        left[stream] = quotas[at(phase[stream]), stream]
    before, room, whole = clock[stream], left[stream], amount
    while amount > left[stream] and phase[stream] + 1 < len(begins):
        amount -= left[stream]
        phase[stream] += 1
        clock[stream], rest[stream] = begins[at(phase[stream])], 0
        left[stream] = quotas[at(phase[stream]), stream]
    left[stream] -= amount
    weight = weights[at(phase[stream]), stream]
    if weight == 0 and amount > 0:
        # the stream's share ends inside the sample
        clock[stream] = NEVER
        due[stream] = before if 2 * room >= whole else NEVER
        return
    if weight > 0:
        clock[stream], rest[stream] = _next_due(amount, clock[stream], rest[stream], weight)
    due[stream] = before + (clock[stream] - before >> 1)


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
    num_streams, last_phase = len(edges) - 1, len(begins) - 1
    cursors = edges[:num_streams].copy()
    clock, rest = np.zeros(num_streams, np.int64), np.zeros(num_streams, np.int64)
    phase, left = np.zeros(num_streams, np.int64), quotas[0].copy()
    due = np.full(num_streams, NEVER)
    for stream in range(num_streams):
        if cursors[at(stream)] < edges[at(stream + 1)]:
            amount = np.int64(SAMPLE_UNITS) if by_samples else entries[at(cursors[at(stream)])] >> 32
            _set_due(at(stream), amount, weights, quotas, begins, clock, rest, phase, left, due)
    count, current = np.int64(0), 0
    phase_starts[:] = 0
    while True:
        stream, now = at(0), due[0]
        for other in range(1, num_streams):
            is_sooner = due[at(other)] < now
            stream = at(other) if is_sooner else stream
            now = due[at(other)] if is_sooner else now
        while current < last_phase and now >= begins[at(current + 1)]:
            current += 1
            phase_starts[at(current)] = count
        if now >= end or now >= NEVER:
            return count
        cursor = cursors[stream]
        entry = entries[at(cursor)]
        places[at(count)] = entry & 0xFFFFFFFF
        seqlens[at(count)] = entry >> 32
        streams[at(count)] = stream
        count += 1
        cursors[stream] = cursor + 1
        if cursor + 1 == edges[at(stream + at(1))] or clock[stream] >= NEVER:
            due[stream] = NEVER
            continue
        amount = np.int64(SAMPLE_UNITS) if by_samples else entries[at(cursor + 1)] >> 32
        if phase[stream] < last_phase:
            _set_due(stream, amount, weights, quotas, begins, clock, rest, phase, left, due)
            continue
        # no quota ends any more
        before = clock[stream]
        clock[stream], rest[stream] = _next_due(amount, before, rest[stream], weights[at(last_phase), stream])
        due[stream] = before + (clock[stream] - before >> 1)


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


@jit
def count_within(seqlens, tokens):
    """Return how many of the first samples hold no more than so many tokens."""
    held = np.int64(0)
    for sample in range(len(seqlens)):
        held += np.int64(seqlens[at(sample)])
        if held > tokens:
            return sample
    return len(seqlens)


@jit
def count_streams(streams, first, last, counts):
    """Add to ``counts`` (int64[S]) how many of the samples [first, last) are of each stream."""
    for sample in range(first, last):
        counts[at(streams[at(sample)])] += 1
