"""A set of small integers as a bitmap with summaries: members are added, removed and found in a few steps."""

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from packer.kernels._jit import at, inline


def bitmap_levels(size: int) -> NDArray[np.int64]:
    """Return the starts of the levels of a bitmap over [0, size), 64 bits a word, up to a single word."""
    starts, words = [0], size
    while len(starts) == 1 or words > 1:
        words = max(1, -(-words // 64))
        starts.append(starts[-1] + words)
    return np.array(starts, np.int64)


@inline
def set_bit(words, level_starts, position):
    """Mark ``position`` in a bitmap with summaries: level k holds a bit for each word of level k − 1."""
    for level in range(len(level_starts) - 1):
        words[at(level_starts[level] + (position >> 6))] |= np.uint64(1) << np.uint64(position & 63)
        position >>= 6


@inline
def clear_bit(words, level_starts, position):
    """Unmark ``position``."""
    for level in range(len(level_starts) - 1):
        word = at(level_starts[level] + (position >> 6))
        words[word] &= ~(np.uint64(1) << np.uint64(position & 63))
        if words[word] != 0:
            return
        position >>= 6


@intrinsic
def _lowest_bit(typing_context, word):
    """Return the index of the lowest set bit of a uint64 that has one: one instruction."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(word), generate


@inline
def next_bit(words, level_starts, position):
    """Return the smallest marked position that is not below ``position``, or −1."""
    level = 0
    levels = len(level_starts) - 1
    while level < levels:
        word = position >> 6
        if level_starts[level] + word >= level_starts[level + 1]:
            return -1
        rest = words[at(level_starts[level] + word)] >> np.uint64(position & 63)
        if rest != 0:
            position += _lowest_bit(rest)
            while level > 0:
                level -= 1
                position = (position << 6) + _lowest_bit(words[at(level_starts[level] + position)])
            return position
        level += 1
        position = word + 1
    return -1
