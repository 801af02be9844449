"""Windows of a random order: sorted inside, and cut into micro-batches.

A window is a stretch of entries (length << 32 | sample). Its samples are written back in the order of its
micro-batches, those that found no place at its end, so that windows can be worked on side by side.
"""

import numpy as np

from packer.kernels._jit import inline, jit
from packer.kernels.best_fit import decide, usable
from packer.kernels.limits import UNLIMITED, budget_fits, count_fits, round_up
from packer.kernels.partition import partition

_ID = 0xFFFFFFFF
_INDEX_BITS = 31


@inline
def _sort_by_bits(values, start, stop, low, high, scratch, counts):
    """Sort by bits [low, high), byte by byte; equal ones keep their order. ``counts`` is int64[257]."""
    for shift in range(low, high, 8):
        for value in range(257):
            counts[value] = 0
        for position in range(start, stop):
            counts[(values[position] >> shift & 0xFF) + 1] += 1
        for value in range(1, 257):
            counts[value] += counts[value - 1]
        for position in range(start, stop):
            value = values[position] >> shift & 0xFF
            scratch[counts[value]] = values[position]
            counts[value] += 1
        for position in range(start, stop):
            values[position] = scratch[position - start]


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
def _reach(entries, first, num_units, width, limits, previous, base, shapes, reach):
    """Fill S and the first possible start of a group that ends with each unit of ``width`` sorted entries.

    The longest samples of the units decide: dealt in turn, they all go to the same micro-batch.
    ``previous`` counts positions from ``base``.
    """
    budget, real, multiple, choices = limits.budgets[0], limits.real, limits.multiple, limits.shapes
    max_samples, max_attention = limits.max_samples, limits.max_attention
    start = 0
    total = np.int64(0)
    for unit in range(num_units):
        longest = entries[first + (unit + 1) * width - 1] >> 32
        padded = round_up(multiple, choices, longest)
        total += longest
        if len(previous) > 0:
            offset = first - base
            for position in range(offset + unit * width, offset + (unit + 1) * width):
                other = previous[position]
                while other >= offset + start * width:
                    if (other - position) % width == 0:
                        start = (other - offset) // width + 1
                        break
                    other = previous[other]
            # units that left the group no longer count
            total = np.int64(0)
            for inside in range(start, unit + 1):
                total += entries[first + (inside + 1) * width - 1] >> 32
        while not (
            count_fits(max_samples, max_attention, unit + 1 - start, padded)
            and budget_fits(budget, real, unit + 1 - start, padded, total)
        ):
            total -= entries[first + (start + 1) * width - 1] >> 32
            start += 1
        shapes[unit] = padded
        reach[unit] = start


@inline
def _emit(entries, first, width, start, stop, target, out_ids, out_lengths):
    """Write the micro-batches of one group: each takes every ``width``-th of units [start, stop)."""
    for member in range(width):
        for unit in range(start, stop):
            entry = entries[first + unit * width + member]
            out_ids[target] = entry & _ID
            out_lengths[target] = entry >> 32
            target += 1
    return target


@jit
def partition_windows(
    entries, edges, bits, limits, width, charge, owners, out_ids, out_lengths, starts, sizes, leftovers
):
    """Sort each window and cut it into padded micro-batches at the least cost, or into steps of one shape.

    Args:
        entries: int64 entries of all windows; sorted inside each window on return.
        edges: (W + 1,) int64, window w is ``entries[edges[w]:edges[w + 1]]``.
        bits: of the longest length.
        limits: bounds of a micro-batch; one sample alone keeps them.
        width: 1, or the micro-batches of a step that must agree in shape.
        charge: what a micro-batch costs besides its padded tokens.
        owners: the sample of each piece, counted from 0; empty where no sample is cut.
        out_ids: filled beside ``entries``.
        out_lengths: filled beside ``entries``.
        starts: int64, filled: where each micro-batch begins in the outputs.
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
    reach = np.empty(most // width + 1, np.int64)
    came = np.empty(most // width + 2, np.int64)
    cost = np.empty(most // width + 2, np.int64)
    queue = np.empty(most // width + 2, np.int64)
    turns = np.empty(most // width + 2, np.int64)
    expiry = np.empty(most // width + 2, np.int64)
    previous = np.empty(most if len(owners) > 0 else 0, np.int64)
    keys = np.empty(len(previous), np.int64)
    owner_bits = 0
    while len(owners) >> owner_bits > 0:
        owner_bits += 1
    counts = np.empty(257, np.int64)
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
            _emit(entries, start, 1, 0, stop - start, start, out_ids, out_lengths)
            continue
        _reach(entries, first, num_units, width, limits, previous, start, shapes, reach)
        partition(shapes, reach, num_units, limits.min_samples, charge, cost, came, queue, turns, expiry)
        # back to front: groups to the front of the output in turn, units left out to its end
        target = start
        behind = stop - (first - start)
        _emit(entries, start, 1, 0, first - start, behind, out_ids, out_lengths)
        end = num_units
        while end > 0:
            begin = came[end]
            if begin == end:
                behind -= width
                _emit(entries, first, width, end - 1, end, behind, out_ids, out_lengths)
                end -= 1
                continue
            for member in range(width):
                starts[num_microbatches] = target + member * (end - begin)
                sizes[num_microbatches] = end - begin
                num_microbatches += 1
            target = _emit(entries, first, width, begin, end, target, out_ids, out_lengths)
            end = begin
        leftovers[window] = stop - behind
    return num_microbatches


@jit
def best_fit_windows(entries, edges, bits, limits, levels, words, heads, out_ids, out_lengths, starts, sizes):
    """Sort each window and pack it by best-fit-decreasing.

    Args:
        entries: int64 entries of all windows; sorted inside each window on return.
        edges: (W + 1,) int64, window w is ``entries[edges[w]:edges[w + 1]]``.
        bits: of the longest length.
        limits: bounds of a micro-batch; one sample alone keeps them.
        levels: starts of the levels of the bitmap, see ``decide``.
        words: uint64 zeros, the bitmap.
        heads: (room + 1,) int32 zeros.
        out_ids: filled beside ``entries``.
        out_lengths: filled beside ``entries``.
        starts: int64, filled: where each micro-batch begins in the outputs.
        sizes: int64, filled: samples of each micro-batch.

    Returns:
        The number of micro-batches.
    """
    most = 0
    for window in range(len(edges) - 1):
        most = max(most, edges[window + 1] - edges[window])
    scratch = np.empty(most, np.int64)
    counts = np.empty(257, np.int64)
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
    min_samples, max_samples = limits.min_samples, limits.max_samples
    num_microbatches = 0
    for window in range(len(edges) - 1):
        start, stop = edges[window], edges[window + 1]
        _sort_by_bits(entries, start, stop, 32, 32 + bits, scratch, counts)
        num_classes = 0
        total = np.int64(0)
        position = stop - 1
        while position >= start:
            seqlen = entries[position] >> 32
            cursors[num_classes] = position
            class_rooms[num_classes] = (seqlen + segment_multiple - 1) // segment_multiple * segment_multiple
            class_squares[num_classes] = seqlen * seqlen if max_attention < UNLIMITED else 0
            class_counts[num_classes] = 0
            while position >= start and entries[position] >> 32 == seqlen:
                class_counts[num_classes] += 1
                total += class_rooms[num_classes]
                position -= 1
            num_classes += 1
        # room for each sample that a pack may come to lack: that of the longest of as many short ones
        packs = total // capacity + 1
        lacking = entries[start + min(stop - start - 1, min_samples * packs)] >> 32
        reserve = (lacking + segment_multiple - 1) // segment_multiple * segment_multiple
        num_nodes = decide(
            class_rooms[:num_classes],
            class_squares[:num_classes],
            class_counts[:num_classes],
            capacity,
            max_samples,
            max_attention,
            min_samples,
            reserve,
            levels,
            words,
            heads,
            nodes,
        )
        target = start
        for node in range(num_nodes):
            for _ in range(nodes[3, node]):
                starts[num_microbatches] = target
                sizes[num_microbatches] = nodes[4, node]
                num_microbatches += 1
                step = node
                while step >= 0:
                    group = nodes[1, step]
                    for _ in range(nodes[2, step]):
                        entry = entries[cursors[group]]
                        out_ids[target] = entry & _ID
                        out_lengths[target] = entry >> 32
                        cursors[group] -= 1
                        target += 1
                    step = nodes[0, step]
        # leave bitmap and heads as they were
        for node in range(num_nodes):
            place = max(0, usable(nodes[7, node], nodes[4, node], min_samples, reserve))
            heads[place] = 0
            for level in range(len(levels) - 1):
                place >>= 6
                words[levels[level] + place] = 0
    return num_microbatches
