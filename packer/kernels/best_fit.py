"""Best-fit-decreasing decided on a histogram, and ids dealt to the packs it decides.

The decision follows Johnson's best-fit-decreasing exactly, but moves all samples of one length and all packs
of one residual together, so its time depends on the number of distinct lengths, not of samples. Packs of one
history form a node; a node remembers its parent, so the path to the root spells the pack's contents.
"""

from packer.kernels._jit import at, inline, jit
from packer.kernels.bitmap import clear_bit, next_bit, set_bit

NO_NODE = -1


@inline
def _how_many(size, square, left, room, filled, used, max_samples, max_squares):
    """Return how many samples of one class, of ``left``, a row takes that has room for one."""
    most = min(left, max_samples - filled)
    if most > 1:
        most = min(most, room // size)
    if square > 0:
        most = min(most, (max_squares - used) // square)
    return most


@jit
def decide(
    sizes,
    squares,
    counts,
    capacity,
    max_samples,
    max_squares,
    levels,
    words,
    heads,
    nodes,
):
    """Pack a histogram by best-fit-decreasing.

    Args:
        sizes: (L,) int64, the room that a sample of each class takes, never rising; none over ``capacity``.
        squares: (L,) int64, what a sample takes of ``max_squares``.
        counts: (L,) int64, samples of each class.
        capacity: room of a pack.
        max_samples: samples that a pack may hold.
        max_squares: bound of the sum of squares in a pack; none of ``squares`` is over it.
        levels: (k + 1,) int64, starts of the levels of the bitmap over rooms 0..capacity.
        words: uint64 zeros, the bitmap.
        heads: (capacity + 1,) int32 zeros: 1 + the first node of each room left.
        nodes: (8, n) int64, filled: parent, class, repeats, packs, samples in the pack, squares in the pack,
            next node of the same room left, room left.

    Returns:
        The number of nodes, or −1 where n were too few (``words`` and ``heads`` are then spoilt).
    """
    parent, kind, repeats, packs, filled, used, following, rooms = nodes
    num_nodes = 0
    for group in range(len(sizes)):
        size, square, left = sizes[group], squares[group], counts[group]
        place = size
        while left > 0:
            # the tightest open pack that can take one more sample of this class
            place = next_bit(words, levels, place) if place <= capacity else -1
            node, before = NO_NODE, NO_NODE
            room, taken, squared, available = capacity, 0, 0, left
            if place >= 0:
                node = heads[at(place)] - 1
                while node >= 0 and used[at(node)] + square > max_squares:
                    before, node = node, following[at(node)]
                if node < 0:
                    place += 1
                    continue
                here = at(node)
                room, taken, squared, available = rooms[here], filled[here], used[here], packs[here]
            each = _how_many(size, square, left, room, taken, squared, max_samples, max_squares)
            many = min(available, left if each == 1 else left // each)
            left -= many * each
            if node >= 0:
                here = at(node)
                packs[here] -= many
                if packs[here] == 0:
                    if before >= 0:
                        following[at(before)] = following[here]
                    else:
                        heads[at(place)] = following[here] + 1
                        if following[here] < 0:
                            clear_bit(words, levels, place)
            if num_nodes == len(parent):
                return -1
            new = at(num_nodes)
            parent[new], kind[new], repeats[new] = node, group, each
            packs[new], filled[new] = many, taken + each
            used[new], rooms[new] = squared + each * square, room - each * size
            following[new] = NO_NODE
            rest = room - each * size
            if rest > 0 and taken + each < max_samples:
                following[new] = heads[at(rest)] - 1
                if heads[at(rest)] == 0:
                    set_bit(words, levels, rest)
                heads[at(rest)] = num_nodes + 1
            num_nodes += 1
            place = size
    return num_nodes


@jit
def spell_patterns(nodes, chosen, offsets, classes):
    """Write the class of every sample of the ``chosen`` nodes' packs, longest first.

    Args:
        nodes: as filled by ``decide``.
        chosen: (P,) int64 nodes.
        offsets: (P + 1,) int64, pattern p fills ``classes[offsets[p]:offsets[p + 1]]``.
        classes: int32, filled.
    """
    for pattern in range(len(chosen)):
        end = offsets[pattern + 1]
        node = chosen[pattern]
        while node >= 0:
            for _ in range(nodes[2, node]):
                end -= 1
                classes[end] = nodes[1, node]
            node = nodes[0, node]


@jit
def count_classes(kinds, start, stop, pattern_offsets, classes, uses, cursors):
    """Add to ``cursors`` (int64 per class) the samples that packs [start, stop) take of each class.

    ``uses`` is int64 scratch with a place for each pattern.
    """
    uses[:] = 0
    for pack in range(start, stop):
        uses[at(kinds[pack])] += 1
    for pattern in range(len(uses)):
        for position in range(pattern_offsets[pattern], pattern_offsets[pattern + 1]):
            cursors[at(classes[position])] += uses[pattern]


@jit
def deal(
    kinds, start, stop, pattern_offsets, classes, class_lengths, ids, cursors, position, out_ids, out_lengths
):
    """Give packs [start, stop) their samples.

    Args:
        kinds: (M,) int32, the pattern of each pack.
        start: first pack.
        stop: end of the packs.
        pattern_offsets: (P + 1,) int64, where each pattern begins in ``classes``.
        classes: int32.
        class_lengths: (L,) int32, the length of each class.
        ids: samples in the order of their classes.
        cursors: (L,) int64, the next sample of each class; moved.
        position: where in the outputs the first pack begins.
        out_ids: samples, pack by pack.
        out_lengths: their lengths.
    """
    for pack in range(start, stop):
        pattern = kinds[pack]
        for slot in range(pattern_offsets[at(pattern)], pattern_offsets[at(pattern + 1)]):
            group = at(classes[at(slot)])
            cursor = cursors[group]
            out_ids[at(position)] = ids[at(cursor)]
            out_lengths[at(position)] = class_lengths[group]
            cursors[group] = cursor + 1
            position += 1
