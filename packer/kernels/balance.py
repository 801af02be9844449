"""Even costs over the data-parallel ranks: what each micro-batch costs, and slots of like cost."""

import numpy as np

from packer.kernels._jit import at, inline, jit
from packer.kernels.deal import SCALE_BITS, by_mean_class, deviations_of, shares_of
from packer.kernels.rng import below, shuffle, subkey

NEAR = 16
"""Micro-batches next in mean class among which a partner is drawn."""

SWEEPS = 8
"""Partners that every micro-batch tries."""

SPREAD_SHARE = 0.25
"""Of the spread that random steps would have: how far exchanges may take a step from the epoch's mix."""


@jit
def measure(
    seqlens, starts, sizes, first, last, segment_multiple, cost_per_token, tokens, longest, rooms, costs
):
    """Sum up micro-batches [first, last).

    Args:
        seqlens: int32, the lengths of all samples.
        starts: (M,) int64, where each micro-batch begins in ``seqlens``.
        sizes: (M,) int64, samples of each micro-batch.
        first: first micro-batch.
        last: end of the micro-batches.
        segment_multiple: each sample on its own is padded to a multiple of it.
        cost_per_token: c in the cost of a sample, c·len + len².
        tokens: (M,) int64, filled: Σ len.
        longest: (M,) int64, filled: max len.
        rooms: (M,) int64, filled: Σ len after padding; ``tokens`` itself where there is none.
        costs: (M,) int64, filled: Σ cost; ``tokens`` itself where the cost is the tokens.
    """
    for microbatch in range(first, last):
        total, most, room, cost = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for position in range(starts[microbatch], starts[microbatch] + sizes[microbatch]):
            seqlen = np.int64(seqlens[position])
            total += seqlen
            most = max(most, seqlen)
            cost += (cost_per_token + seqlen) * seqlen
            if segment_multiple > 1:
                room += (seqlen + segment_multiple - 1) // segment_multiple * segment_multiple
        longest[microbatch] = most
        rooms[microbatch] = room
        costs[microbatch] = cost
        tokens[microbatch] = total  # last: it may be the array of the two before


@jit
def even_out_steps(hist, costs, step_size, dp_size, edges, first, last, targets, spread, key, order):
    """Exchange micro-batches between the steps of windows [first, last), so that their slots cost less.

    A slot is the ``dp_size`` micro-batches that run at the same time: it lasts as long as its dearest. A
    step's slots are cut from its micro-batches in the order of their costs, as ``even_out_slots`` cuts them.
    Two micro-batches of like mean class change places where the maxima of both steps' slots then sum up to
    less, and neither step is further from the epoch's mix than it was, or than ``spread`` allows.

    Args:
        hist: (m, K) int64, as ``deal`` takes it.
        costs: (m,) int64, of the same micro-batches.
        step_size: E, micro-batches of a step, a multiple of ``dp_size``.
        dp_size: ranks.
        edges: (W + 1,) int64, where windows begin, in micro-batches.
        first: first window.
        last: end of the windows.
        targets: (K,) int64, the epoch's tokens by class.
        spread: Σ_k (p_tk − p_k)² that every step may have.
        key: uint64, of the random choices; window w draws from its w-th stream.
        order: (M,) integers, as ``deal`` filled it; rearranged in place.
    """
    shares = shares_of(targets)
    for window in range(first, last):
        start, stop = edges[window] - edges[first], edges[window + 1] - edges[first]
        count = (stop - start) // step_size * step_size
        if count <= step_size:
            continue
        places = order[edges[window] : edges[window] + count]
        inside, spent = np.empty((count, hist.shape[1]), np.int64), np.empty(count, np.int64)
        for place in range(count):
            microbatch = places[place] - edges[first]
            spent[place] = costs[microbatch]
            for number in range(hist.shape[1]):
                inside[place, number] = hist[microbatch, number]
        _even_out_window(
            inside,
            spent,
            step_size,
            dp_size,
            shares,
            spread,
            subkey(key, window),
            places,
        )


@inline
def _even_out_window(hist, costs, step_size, dp_size, shares, spread, key, places):
    """Exchange entries of ``places``; ``hist`` and ``costs`` are those of the places as they came."""
    count = len(places)
    ascending = by_mean_class(hist)
    scales = np.full(hist.shape[1], 1 << SCALE_BITS, np.int64)
    deviations, tokens = deviations_of(hist, np.arange(count), shares, scales, step_size)
    sums, weights, ladders = _sum_steps(deviations, tokens, costs, step_size)
    held = np.arange(count)  # the micro-batch that stands at each place
    stands = np.arange(count)  # and where each stands
    draws = np.int64(0)
    for _ in range(SWEEPS):
        for rank in range(count):
            other = rank + 1 + below(key, draws, NEAR)
            draws += 1
            if other >= count:
                continue
            mine, theirs = ascending[at(rank)], ascending[at(other)]
            here, there = stands[at(mine)] // step_size, stands[at(theirs)] // step_size
            out, come = costs[at(mine)], costs[at(theirs)]
            if here == there or out == come:
                continue
            change = _change(ladders[here], dp_size, out, come) + _change(ladders[there], dp_size, come, out)
            heavier = tokens[at(theirs)] - tokens[at(mine)]
            if (
                change >= 0
                or not _may_change(
                    sums[here], deviations[mine], deviations[theirs], weights[here] + heavier, spread
                )
                or not _may_change(
                    sums[there], deviations[theirs], deviations[mine], weights[there] - heavier, spread
                )
            ):
                continue
            for lane in range(deviations.shape[1]):
                moved = deviations[at(theirs), at(lane)] - deviations[at(mine), at(lane)]
                sums[at(here), at(lane)] += moved
                sums[at(there), at(lane)] -= moved
            weights[here] += heavier
            weights[there] -= heavier
            _replace(ladders[here], out, come)
            _replace(ladders[there], come, out)
            stands[at(mine)], stands[at(theirs)] = stands[at(theirs)], stands[at(mine)]
            held[at(stands[at(mine)])] = mine
            held[at(stands[at(theirs)])] = theirs
    before = places.copy()
    for place in range(count):
        places[at(place)] = before[at(held[at(place)])]


@inline
def _sum_steps(deviations, tokens, costs, step_size):
    """Return each step's deviations and tokens, and its micro-batches' costs, rising."""
    num_steps = len(costs) // step_size
    sums = np.zeros((num_steps, deviations.shape[1]), np.int32)
    weights = np.zeros(num_steps, np.int64)
    ladders = np.empty((num_steps, step_size), np.int64)
    for place in range(len(costs)):
        for lane in range(deviations.shape[1]):
            sums[place // step_size, lane] += deviations[place, lane]
        weights[place // step_size] += tokens[place]
    for step in range(num_steps):
        ladders[step] = np.sort(costs[step * step_size : (step + 1) * step_size])
    return sums, weights, ladders


@inline
def _change(ladder, dp_size, out, come):
    """Return what Σ slot maxima changes by where a cost ``out`` of the rising ``ladder`` becomes ``come``."""
    change = np.int64(0)
    for top in range(dp_size - 1, len(ladder), dp_size):
        now = ladder[at(top)]
        if come > out and now >= out:
            after = max(come, now)
            change += (min(after, ladder[at(top + 1)]) if top + 1 < len(ladder) else after) - now
        elif come < out and now <= out:
            after = min(come, now)
            change += (max(after, ladder[at(top - 1)]) if top > 0 else after) - now
    return change


@inline
def _replace(ladder, out, come):
    """Put ``come`` for one ``out`` into the rising ``ladder``."""
    place = np.searchsorted(ladder, out)
    while place + 1 < len(ladder) and ladder[place + 1] < come:
        ladder[place] = ladder[place + 1]
        place += 1
    while place > 0 and ladder[place - 1] > come:
        ladder[place] = ladder[place - 1]
        place -= 1
    ladder[place] = come


@inline
def _may_change(sums, out, come, weight, spread):
    """Tell whether a step's squares of deviations do not grow, or stay below what is allowed."""
    before, after = np.int64(0), np.int64(0)
    for lane in range(len(sums)):
        now = np.int64(sums[at(lane)])
        then = now + come[at(lane)] - out[at(lane)]
        before += now * now
        after += then * then
    return after <= before or np.float64(after) <= np.float64(weight * weight) * spread


@jit
def even_out_slots(costs, step_size, dp_size, first, last, key, order):
    """Put the micro-batches of steps [first, last) into slots and ranks of like cost.

    A step's micro-batches are cut into slots in the order of their costs. From the dearest slot to the
    cheapest, the dearest of a slot goes to the rank that has least to do in this step; ranks and slots come
    in random order, so that none is favoured.

    Args:
        costs: (M,) int64, of all micro-batches.
        step_size: E, micro-batches of a step, a multiple of ``dp_size``.
        dp_size: ranks.
        first: first step.
        last: end of the steps.
        key: uint64, of the random choices; step t draws from its t-th stream.
        order: (M,) integers, the micro-batch of each row, step t in ``order[t·E:(t + 1)·E]``; rearranged in
            place.
    """
    num_slots = step_size // dp_size
    for step in range(first, last):
        rows = order[step * step_size : (step + 1) * step_size]
        inside = rows.copy()
        ascending = np.argsort(costs[inside], kind="mergesort")
        stream = subkey(key, step)
        slots = np.arange(num_slots)
        shuffle(slots, 0, num_slots, subkey(stream, 0))
        names = np.arange(dp_size)
        shuffle(names, 0, dp_size, subkey(stream, 1))
        loads = np.zeros(dp_size, np.int64)
        for slot in range(num_slots):
            ranks = np.argsort(loads, kind="mergesort")
            for place in range(dp_size):
                microbatch = inside[ascending[step_size - 1 - slot * dp_size - place]]
                rows[slots[slot] * dp_size + names[ranks[place]]] = microbatch
                loads[ranks[place]] += costs[microbatch]
