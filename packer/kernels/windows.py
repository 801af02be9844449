"""Windows of a random order: sorted inside, and cut into micro-batches.

A window is a stretch of entries (length << 32 | sample). They are written back in the order of its
micro-batches, those that found no place at its end, so that windows can be worked on side by side.
"""

import numpy as np

from packer.kernels._jit import at, inline, jit
from packer.kernels.best_fit import decide
from packer.kernels.limits import UNLIMITED, budget_fits, count_fits, next_multiple, round_up
from packer.kernels.partition import partition

_ID = 0xFFFFFFFF
_INDEX_BITS = 31


@inline
def _sort_by_bits(values, start, stop, low, high, scratch, counts):
    """Sort by bits [low, high), two digits a turn; equal ones keep their order. ``counts`` is int64[2, 256].

    Above ``high`` there are no bits, or there are 16 or 32 to sort by.
    """
    passes = (high - low + 15) // 16 * 2
    width = (high - low + passes - 1) // passes
    mask = np.int64((1 << width) - 1)
    for shift in range(low, low + passes * width, 2 * width):
        counts[:, : mask + 1] = 0
        for position in range(start, stop):
            value = values[at(position)] >> shift
            counts[0, at(value & mask)] += 1
            counts[1, at(value >> width & mask)] += 1
        before, behind = np.int64(0), np.int64(start)
        for digit in range(mask + 1):
            counts[0, digit], before = before, before + counts[0, digit]
            counts[1, digit], behind = behind, behind + counts[1, digit]
        for position in range(start, stop):
            value = values[at(position)]
            digit = at(value >> shift & mask)
            scratch[at(counts[0, digit])] = value
            counts[0, digit] += 1
        for position in range(stop - start):
            value = scratch[at(position)]
            digit = at(value >> (shift + width) & mask)
            values[at(counts[1, digit])] = value
            counts[1, digit] += 1


@inline
def _spread_longest(entries, start, stop, block, scratch, counts):
    """Spread the pieces of one sample among the longest entries, so that a block holds few of one sample.

    Only pieces of full length come many from one sample, and they are the longest: put into the order of the
    samples, then read column by column, neighbours end up a block apart.
    """
    first = stop - 1
    while first > start and entries[first - 1] >> 32 == entries[stop - 1] >> 32:
        first -= 1
    _sort_by_bits(entries, first, stop, 0, 32, scratch, counts)
    count = stop - first
    num_columns = (count + block - 1) // block
    position = 0
    for column in range(num_columns):
        for index in range(column, count, num_columns):
            scratch[position] = entries[first + index]
            position += 1
    for index in range(count):
        entries[first + index] = scratch[index]


@inline
def _link_pieces(entries, start, stop, owners, bits, previous, keys, scratch, counts):
    """Write to ``previous`` the position, from ``start``, of the piece before of the same sample, or −1."""
    for index in range(stop - start):
        keys[index] = np.int64(owners[entries[start + index] & _ID]) << _INDEX_BITS | index
    _sort_by_bits(keys, 0, stop - start, _INDEX_BITS, _INDEX_BITS + bits, scratch, counts)
    for place in range(stop - start):
        index = keys[place] & (1 << _INDEX_BITS) - 1
        previous[index] = -1
        if place > 0 and keys[place] >> _INDEX_BITS == keys[place - 1] >> _INDEX_BITS:
            previous[index] = keys[place - 1] & (1 << _INDEX_BITS) - 1


@inline
def _reach(entries, first, num_units, width, limits, previous, base, shapes, expiry):
    """Fill S of a group that ends with each unit of ``width`` entries, and what is too far from each start.

    The longest samples of the units decide: dealt in turn, they all go to the same micro-batch.
    ``previous`` counts positions from ``base``.
    """
    budget, real, multiple, choices = limits.budgets[0], limits.real, limits.multiple, limits.shapes
    max_samples, max_attention = limits.max_samples, limits.max_attention
    start = 0
    total = np.int64(0)
    for unit in range(num_units):
        longest = entries[at(first + (unit + 1) * width - 1)] >> 32
        padded = round_up(multiple, choices, longest)
        total += longest
        if len(previous) > 0:
            apart = _first_apart(previous, first - base, unit, width, start)
            expiry[start:apart] = unit + 1
            start = apart
            # units that left the group no longer count
            total = np.int64(0)
            for inside in range(start, unit + 1):
                total += entries[first + (inside + 1) * width - 1] >> 32
        while not (
            count_fits(max_samples, max_attention, unit + 1 - start, padded)
            and budget_fits(budget, real, unit + 1 - start, padded, total)
        ):
            total -= entries[at(first + (start + 1) * width - 1)] >> 32
            expiry[at(start)] = unit + 1
            start += 1
        shapes[at(unit)] = padded
    expiry[start : num_units + 1] = num_units + 1
    shapes[num_units] = shapes[num_units - 1]


@inline
def _first_apart(previous, offset, unit, width, start):
    """Return the first unit, from ``start``, since which no micro-batch meets a sample of ``unit`` again."""
    for position in range(offset + unit * width, offset + (unit + 1) * width):
        other = previous[position]
        while other >= offset + start * width:
            if (other - position) % width == 0:
                start = (other - offset) // width + 1
                break
            other = previous[other]
    return start


@inline
def _emit(entries, first, width, start, stop, target, out):
    """Write the micro-batches of one group: each takes every ``width``-th of units [start, stop)."""
    for member in range(width):
        for unit in range(start, stop):
            out[at(target)] = entries[at(first + unit * width + member)]
            target += 1
    return target


@jit
def partition_windows(entries, edges, bits, limits, width, charge, owners, starts, sizes, leftovers):
    """Sort each window and cut it into padded micro-batches at the least cost, or into steps of one shape.

    Args:
        entries: int64 entries of all windows; on return in the order of their micro-batches.
        edges: (W + 1,) int64, window w is ``entries[edges[w]:edges[w + 1]]``.
        bits: of the longest length.
        limits: bounds of a micro-batch; one sample alone keeps them.
        width: 1, or the micro-batches of a step that must agree in shape.
        charge: what a micro-batch costs besides its padded tokens.
        owners: the sample of each piece, counted from 0; empty where no sample is cut.
        starts: int64, filled: where each micro-batch begins in ``entries``.
        sizes: int64, filled: samples of each micro-batch.
        leftovers: (W,) int64, filled: samples at each window's end that found no place.

    Returns:
        The number of micro-batches.
    """
    most = 0
    for window in range(len(edges) - 1):
        most = max(most, edges[window + 1] - edges[window])
    scratch = np.empty(most, np.int64)
    shapes = np.empty(most // width + 1, np.int64)
    expiry = np.empty(most // width + 1, np.int64)
    came = np.empty(most // width + 1, np.int64)
    cost = np.empty(most // width + 1, np.int64)
    queue = np.empty((4, most // width + 1), np.int64)
    previous = np.empty(most if len(owners) > 0 else 0, np.int64)
    keys = np.empty(len(previous), np.int64)
    owner_bits = 0
    while len(owners) >> owner_bits > 0:
        owner_bits += 1
    counts = np.empty((2, 256), np.int64)
    num_microbatches = 0
    for window in range(len(edges) - 1):
        start, stop = edges[window], edges[window + 1]
        _sort_by_bits(entries, start, stop, 32, 32 + bits, scratch, counts)
        if len(owners) > 0:
            longest = round_up(limits.multiple, limits.shapes, entries[stop - 1] >> 32)
            block = max(1, min(limits.max_samples, limits.budgets[0] // longest))
            _spread_longest(entries, start, stop, block * width, scratch, counts)
            _link_pieces(entries, start, stop, owners, owner_bits, previous, keys, scratch, counts)
        num_units = (stop - start) // width
        first = stop - num_units * width
        if num_units == 0:
            leftovers[window] = stop - start
            continue
        _reach(entries, first, num_units, width, limits, previous, start, shapes, expiry)
        partition(
            shapes,
            expiry,
            num_units,
            limits.min_samples,
            charge,
            cost,
            came,
            queue[0],
            queue[1],
            queue[2],
            queue[3],
        )
        # back to front: groups to the front of the window in turn, units left out to its end
        target = 0
        behind = stop - first
        _emit(entries, start, 1, 0, first - start, behind, scratch)
        end = num_units
        while end > 0:
            begin = came[end]
            if begin == end:
                behind -= width
                _emit(entries, first, width, end - 1, end, behind, scratch)
                end -= 1
                continue
            for member in range(width):
                starts[num_microbatches] = start + target + member * (end - begin)
                sizes[num_microbatches] = end - begin
                num_microbatches += 1
            target = _emit(entries, first, width, begin, end, target, scratch)
            end = begin
        entries[start:stop] = scratch[: stop - start]
        leftovers[window] = stop - start - behind
    return num_microbatches


@jit
def best_fit_windows(entries, edges, bits, limits, levels, words, heads, starts, sizes):
    """Sort each window and pack it by best-fit-decreasing.

    Args:
        entries: int64 entries of all windows; on return in the order of their micro-batches.
        edges: (W + 1,) int64, window w is ``entries[edges[w]:edges[w + 1]]``.
        bits: of the longest length.
        limits: bounds of a micro-batch; one sample alone keeps them.
        levels: starts of the levels of the bitmap, see ``decide``.
        words: uint64 zeros, the bitmap.
        heads: (room + 1,) int32 zeros.
        starts: int64, filled: where each micro-batch begins in ``entries``.
        sizes: int64, filled: samples of each micro-batch.

    Returns:
        The number of micro-batches.
    """
    most = 0
    for window in range(len(edges) - 1):
        most = max(most, edges[window + 1] - edges[window])
    scratch = np.empty(most, np.int64)
    counts = np.empty((2, 256), np.int64)
    class_rooms = np.empty(most, np.int64)
    class_squares = np.empty(most, np.int64)
    class_counts = np.empty(most, np.int64)
    cursors = np.empty(most, np.int64)
    nodes = np.empty((8, most), np.int64)
    capacity, segment_multiple, max_attention = (
        limits.budgets[0],
        limits.segment_multiple,
        limits.max_attention,
    )
    max_samples = limits.max_samples
    num_microbatches = 0
    for window in range(len(edges) - 1):
        start, stop = edges[window], edges[window + 1]
        _sort_by_bits(entries, start, stop, 32, 32 + bits, scratch, counts)
        num_classes = 0
        position = stop - 1
        while position >= start:
            seqlen = entries[position] >> 32
            cursors[num_classes] = position
            class_rooms[num_classes] = next_multiple(segment_multiple, seqlen)
            class_squares[num_classes] = seqlen * seqlen if max_attention < UNLIMITED else 0
            class_counts[num_classes] = 0
            while position >= start and entries[position] >> 32 == seqlen:
                class_counts[num_classes] += 1
                position -= 1
            num_classes += 1
        num_nodes = decide(
            class_rooms[:num_classes],
            class_squares[:num_classes],
            class_counts[:num_classes],
            capacity,
            max_samples,
            max_attention,
            levels,
            words,
            heads,
            nodes,
        )
        target = 0
        for node in range(num_nodes):
            for _ in range(nodes[3, node]):
                starts[num_microbatches] = start + target
                sizes[num_microbatches] = nodes[4, node]
                num_microbatches += 1
                step = node
                while step >= 0:
                    group = nodes[1, step]
                    for _ in range(nodes[2, step]):
                        scratch[at(target)] = entries[at(cursors[group])]
                        cursors[group] -= 1
                        target += 1
                    step = nodes[0, step]
        entries[start:stop] = scratch[: stop - start]
        # leave bitmap and heads as they were
        for node in range(num_nodes):
            place = nodes[7, node]
            heads[place] = 0
            for level in range(len(levels) - 1):
                place >>= 6
                words[levels[level] + place] = 0
    return num_microbatches
