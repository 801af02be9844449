"""Deal micro-batches to steps so that each step's mix comes nearest to the epoch's.

Strata, then an exchange: the micro-batches of a window are sorted by their mean class and cut into as many
strata as a step has places; every step gets one of each at random. Then micro-batches of one stratum change
places wherever that brings their two steps nearer to the epoch's mix.
"""

import numpy as np
from numpy.typing import NDArray

from packer.kernels._jit import at, inline, jit
from packer.kernels.rng import below, shuffle, subkey

SWEEPS = 6
"""Partners that every micro-batch tries; four take most of what there is to gain."""

MIN_STEPS = 64
"""Steps of a window, at least: what the window itself differs from the epoch stays in its steps."""

SCALE_BITS = 4
"""A scale of 2^4 leaves deviations as they are."""

_SHARE_BITS = 20
_DEVIATION_BITS = 15
_STEP_BITS = 26
_LANES = 16
_FINENESS = 64


def window_edges(num_microbatches: int, step_size: int, num_steps_wanted: int = 0) -> NDArray[np.int64]:
    """Return the (W + 1,) edges of windows of at least 64 steps, or as many as wanted; of one with fewer."""
    num_steps = num_microbatches // step_size
    num_windows = max(1, num_steps // max(MIN_STEPS, num_steps_wanted))
    edges = np.arange(num_windows + 1, dtype=np.int64) * num_steps // num_windows * step_size
    edges[-1] = num_microbatches
    return edges


@jit
def deal(hist, step_size, edges, first, last, targets, scales, key, order):
    """Put the micro-batches of windows [first, last) into the order of their steps.

    A window's step t is ``order[start + t·E:start + (t + 1)·E]``; steps, and micro-batches in a step, come in
    random order. What fills no step stays at the window's end as it came: the input's order must be random.

    Args:
        hist: (m, K) int64, tokens by class of micro-batches ``edges[first]`` to ``edges[last]``; each
            holds less than 2^43.
        step_size: E, micro-batches of a step.
        edges: (W + 1,) int64, where windows begin, in micro-batches; all but the last hold whole steps.
        first: first window.
        last: end of the windows.
        targets: (K,) int64, the epoch's tokens by class; below 2^62 in sum.
        scales: (K,) int64 above 0, how much a deviation of each class counts, in units of 2^-4.
        key: uint64, of the random choices; window w draws from its w-th stream.
        order: (M,) integers, filled from ``edges[first]`` to ``edges[last]``.
    """
    shares = shares_of(targets)
    for window in range(first, last):
        start, stop = edges[window], edges[window + 1]
        inside = hist[start - edges[first] : stop - edges[first]]
        _deal_window(inside, step_size, shares, scales, subkey(key, window), order[start:stop])
        for place in range(start, stop):
            order[at(place)] += start


@inline
def shares_of(targets):
    """Return each class's share of the tokens in units of 2^-20."""
    total, shift = np.int64(0), 0
    for number in range(len(targets)):
        total += targets[number]
    while total >> shift >= np.int64(1) << 40:
        shift += 1
    shares = np.empty(len(targets), np.int64)
    for number in range(len(targets)):
        shares[number] = (targets[number] >> shift << _SHARE_BITS) // max(np.int64(1), total >> shift)
    return shares


@inline
def _deal_window(hist, step_size, shares, scales, key, order):
    """Write a permutation of the window's micro-batches, counted from its start."""
    num_steps = len(hist) // step_size
    count = num_steps * step_size
    strata = by_mean_class(hist[:count])
    for stratum in range(step_size):
        shuffle(strata, stratum * num_steps, (stratum + 1) * num_steps, subkey(key, stratum))
    if step_size > 1 and num_steps > 1:
        _exchange(hist, strata, step_size, shares, scales, subkey(key, step_size))
    steps = np.arange(num_steps)
    shuffle(steps, 0, num_steps, subkey(key, step_size + 1))
    for step in range(num_steps):
        begin = step * step_size
        for stratum in range(step_size):
            order[at(begin + stratum)] = strata[at(stratum * num_steps + steps[at(step)])]
        shuffle(order, begin, begin + step_size, subkey(key, step_size + 2 + step))
    for place in range(count, len(hist)):
        order[place] = place


@inline
def by_mean_class(hist):
    """Return the micro-batches by the mean class of their tokens, to 1/64 of a class; stable."""
    count, num_classes = hist.shape
    means = np.empty(count, np.int64)
    cursors = np.zeros(num_classes * _FINENESS + 1, np.int64)
    for row in range(count):
        tokens, moment = np.int64(0), np.int64(0)
        for number in range(num_classes):
            tokens += hist[at(row), at(number)]
            moment += hist[at(row), at(number)] * number
        means[at(row)] = moment * _FINENESS // max(np.int64(1), tokens)
        cursors[at(means[at(row)] + 1)] += 1
    for mean in range(num_classes * _FINENESS):
        cursors[mean + 1] += cursors[mean]
    rows = np.empty(count, np.int64)
    for row in range(count):
        cursor = cursors[at(means[at(row)])]
        rows[at(cursor)] = row
        cursors[at(means[at(row)])] = cursor + 1
    return rows


@inline
def deviations_of(hist, rows, shares, scales, step_size):
    """Return h − w·p of each of ``rows`` and class, and w, in a unit in which a step's squares fit 63 bits.

    The deviations are scaled, class by class; w is not.

    Returns:
        (n, K and zeros) int32; (n,) int64.
    """
    num_classes = hist.shape[1]
    lanes = (num_classes + _LANES - 1) // _LANES * _LANES
    most = np.int64(1)
    tokens = np.zeros(len(rows), np.int64)
    for place in range(len(rows)):
        for number in range(num_classes):
            tokens[at(place)] += hist[at(rows[at(place)]), at(number)]
        most = max(most, tokens[at(place)])
    shift, limit = 0, min(np.int64(1) << _DEVIATION_BITS, (np.int64(1) << _STEP_BITS) // step_size)
    limit = max(np.int64(1), (limit << SCALE_BITS) // max(scales.max(), 1 << SCALE_BITS))
    while most << _SHARE_BITS >> shift > limit:
        shift += 1
    half = np.int64(1) << shift >> 1
    out = np.zeros((len(rows), lanes), np.int32)
    for place in range(len(rows)):
        row = rows[at(place)]
        for number in range(num_classes):
            expected = tokens[at(place)] * shares[at(number)]
            off = ((hist[at(row), at(number)] << _SHARE_BITS) - expected + half) >> shift
            out[at(place), at(number)] = off * scales[at(number)] >> SCALE_BITS
        tokens[at(place)] = tokens[at(place)] << _SHARE_BITS >> shift
    return out, tokens


@inline
def _exchange(hist, strata, step_size, shares, scales, key):
    """Let micro-batches of one stratum, ``strata[stratum · T + step]``, change places between steps.

    The sum of squares Σ_t Σ_k (h_tk − W_t p_k)², scaled, falls with every exchange. Each tries random
    partners.
    """
    num_steps = len(strata) // step_size
    deviations, _ = deviations_of(hist, strata, shares, scales, step_size)
    lanes = deviations.shape[1]
    sums = np.zeros((num_steps, lanes), np.int32)
    held = np.arange(len(strata))  # whose deviations stand where
    for begin in range(0, len(strata), num_steps):
        for step in range(num_steps):
            for lane in range(lanes):
                sums[at(step), at(lane)] += deviations[at(begin + step), at(lane)]
    draws = np.int64(0)
    for _ in range(SWEEPS):
        for begin in range(0, len(strata), num_steps):
            for here in range(num_steps):
                there = below(key, draws, num_steps)
                draws += 1
                if here == there:
                    continue
                mine, theirs = held[at(begin + here)], held[at(begin + there)]
                change = np.int64(0)
                for lane in range(lanes):
                    moved = np.int32(deviations[at(theirs), at(lane)] - deviations[at(mine), at(lane)])
                    apart = np.int32(sums[at(here), at(lane)] - sums[at(there), at(lane)] + moved)
                    change += np.int64(moved) * np.int64(apart)
                if change < 0:
                    held[at(begin + here)], held[at(begin + there)] = theirs, mine
                    for lane in range(lanes):
                        moved = np.int32(deviations[at(theirs), at(lane)] - deviations[at(mine), at(lane)])
                        sums[at(here), at(lane)] += moved
                        sums[at(there), at(lane)] -= moved
    before = strata.copy()
    for place in range(len(strata)):
        strata[at(place)] = before[at(held[at(place)])]
