"""Samples that a step holds twice, from two passes through their source: found, and parted by exchanges."""

import numpy as np

from packer.kernels._jit import at, inline, jit
from packer.kernels.rng import below

TRIES = 48
"""Rows that are tried as a partner of one that has to go."""

ENOUGH = 8
"""Partners that would do, of which the one is taken that holds the most alike of the sources."""

SPAN = 64
"""Steps on either side in which a partner is looked for."""


@inline
def _size_of(step, step_size, sizes, rows, is_copy):
    """Return the samples of a step, copies left out."""
    size = np.int64(0)
    for place in range(step * step_size, (step + 1) * step_size):
        if not is_copy[at(place)]:
            size += sizes[at(rows[at(place)])]
    return size


@jit
def find_repeats(pieces, names, sources, starts, sizes, rows, is_copy, step_size, rooms, seen, is_met):
    """Mark rows that hold a sample which an earlier row, or place, of their step holds.

    A step that has more samples than a pass through the source may hold some of them twice.

    Args:
        pieces: (n,) integers, positions in the stream, micro-batch by micro-batch.
        names: (P,) integers, which sample, from 0, each position of the stream is.
        sources: (P,) integers, the source of each.
        starts: (M,) int64, where each micro-batch begins in ``pieces``.
        sizes: (M,) int64, samples of each micro-batch.
        rows: (R,) int64, micro-batches, step by step.
        is_copy: (R,) bool, rows that repeat others on purpose, and do not count.
        step_size: E.
        rooms: (S,) int64, samples of a pass through each source; −1 where none comes twice.
        seen: int64 by name, scratch.
        is_met: (R,) bool, filled.

    Returns:
        How many rows are marked.
    """
    seen[:] = -1
    is_met[:] = False
    count = 0
    for step in range(len(rows) // step_size):
        size = _size_of(step, step_size, sizes, rows, is_copy)
        for place in range(step * step_size, (step + 1) * step_size):
            if is_copy[at(place)]:
                continue
            start = starts[at(rows[at(place)])]
            for position in range(start, start + sizes[at(rows[at(place)])]):
                piece = at(pieces[at(position)])
                if rooms[at(sources[piece])] < size:
                    continue
                name = at(names[piece])
                if seen[name] == step and not is_met[at(place)]:
                    is_met[at(place)] = True
                    count += 1
                seen[name] = step
    return count


@inline
def _may_join(
    row, step, but, size, pieces, names, sources, starts, sizes, rows, step_size, rooms, seen, stamp
):
    """Say whether a micro-batch holds no sample twice, and none that a step holds but at ``but``."""
    for place in range(step * step_size, (step + 1) * step_size):
        if place == but:
            continue
        start = starts[at(rows[at(place)])]
        for position in range(start, start + sizes[at(rows[at(place)])]):
            piece = at(pieces[at(position)])
            if rooms[at(sources[piece])] >= size:
                seen[at(names[piece])] = stamp
    for position in range(starts[row], starts[row] + sizes[row]):
        piece = at(pieces[at(position)])
        if rooms[at(sources[piece])] >= size:
            if seen[at(names[piece])] == stamp:
                return False
            seen[at(names[piece])] = stamp
    return True


@inline
def _distance(mine, theirs, pieces, seqlens, sources, starts, sizes, held):
    """Return how much two micro-batches differ in what they hold of the sources; ``held`` is left at 0."""
    for position in range(starts[mine], starts[mine] + sizes[mine]):
        held[at(sources[at(pieces[at(position)])])] += np.int64(seqlens[at(position)])
    for position in range(starts[theirs], starts[theirs] + sizes[theirs]):
        held[at(sources[at(pieces[at(position)])])] -= np.int64(seqlens[at(position)])
    distance = np.int64(0)
    for microbatch in (mine, theirs):
        for position in range(starts[microbatch], starts[microbatch] + sizes[microbatch]):
            source = at(sources[at(pieces[at(position)])])
            distance += abs(held[source])
            held[source] = 0
    return distance


@jit
def part_repeats(
    pieces,
    seqlens,
    names,
    sources,
    starts,
    sizes,
    rows,
    is_copy,
    step_size,
    rooms,
    first,
    last,
    key,
    seen,
    is_met,
):
    """Exchange marked rows of steps [first, last) with rows nearby, where then neither meets its like.

    Args:
        pieces: as ``find_repeats`` takes it.
        seqlens: (n,) int32, their lengths.
        names: likewise.
        sources: likewise.
        starts: likewise.
        sizes: likewise.
        rows: likewise; exchanged in place.
        is_copy: likewise.
        step_size: E.
        rooms: likewise.
        first: first step.
        last: end of the steps.
        key: uint64, of the random choices.
        seen: int64 by name, scratch.
        is_met: (R,) bool, as ``find_repeats`` filled it.
    """
    seen[:] = 0
    held = np.zeros(len(rooms), np.int64)
    stamp, draws = np.int64(0), np.int64(0)
    for place in range(first * step_size, last * step_size):
        if not is_met[at(place)]:
            continue
        step = place // step_size
        low, high = max(first, step - SPAN), min(last, step + SPAN + 1)
        best, least, found = np.int64(-1), np.int64(0), 0
        for _ in range(TRIES):
            if found == ENOUGH:
                break
            other = low * step_size + below(key, draws, (high - low) * step_size)
            draws += 1
            there = other // step_size
            if there == step or is_copy[at(other)]:
                continue
            mine, theirs = at(rows[at(place)]), at(rows[at(other)])
            stamp += 2
            here_size = _size_of(step, step_size, sizes, rows, is_copy) + sizes[theirs] - sizes[mine]
            there_size = _size_of(there, step_size, sizes, rows, is_copy) + sizes[mine] - sizes[theirs]
            if _may_join(
                theirs,
                step,
                place,
                here_size,
                pieces,
                names,
                sources,
                starts,
                sizes,
                rows,
                step_size,
                rooms,
                seen,
                stamp,
            ) and _may_join(
                mine,
                there,
                other,
                there_size,
                pieces,
                names,
                sources,
                starts,
                sizes,
                rows,
                step_size,
                rooms,
                seen,
                stamp + 1,
            ):
                found += 1
                cost = _distance(mine, theirs, pieces, seqlens, sources, starts, sizes, held)
                if best < 0 or cost < least:
                    best, least = other, cost
        if best >= 0:
            rows[at(place)], rows[at(best)] = rows[at(best)], rows[at(place)]
