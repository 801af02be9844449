"""A counter-based generator: every draw is a pure function of a key and a counter.

SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") read as a function of
its counter, so that any draw can be made by any thread in any order. It depends on no library's generator.
"""

import numpy as np

from packer.kernels._jit import at, inline, jit

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_32 = np.uint64(0xFFFFFFFF)


@inline
def mix(z):
    """Return 64 well-mixed bits of the uint64 ``z``."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@inline
def draw(key, counter):
    """Return the draw number ``counter`` (an integer from 0) of the stream ``key``, as uint64."""
    return mix(key + (np.uint64(counter) + np.uint64(1)) * _GAMMA)


@inline
def subkey(key, index):
    """Return the key of the ``index``-th stream below ``key``."""
    return mix(mix(key ^ _MIX_1) + np.uint64(index) * _GAMMA)


@inline
def below(key, counter, bound):
    """Return an unbiased integer of [0, bound) as int64: by Lemire's multiplication, or by masks if wide."""
    if bound <= 0xFFFFFFFF:
        wide = np.uint64(bound)
        product = (draw(key, counter) >> np.uint64(32)) * wide
        if (product & _LOW_32) < wide:
            # 2^32 mod bound: the products below it are one too many for some results
            threshold = (np.uint64(1 << 32) - wide) % wide
            while (product & _LOW_32) < threshold:
                key = mix(key + _MIX_2)
                product = (draw(key, counter) >> np.uint64(32)) * wide
        return np.int64(product >> np.uint64(32))
    mask = np.uint64(bound - 1)
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    value = draw(key, counter) & mask
    while value >= np.uint64(bound):
        key = mix(key + _MIX_2)
        value = draw(key, counter) & mask
    return np.int64(value)


@jit
def derive_key(seed, epoch, purpose):
    """Return the uint64 key of one purpose in one epoch of one seed (all uint64)."""
    return subkey(subkey(mix(seed + _GAMMA), epoch), purpose)


@jit
def draw_to_end(values, size, count, key):
    """Move ``count`` random ones of the first ``size`` values to their end."""
    for index in range(count):
        last = size - 1 - index
        other = below(key, index, last + 1)
        values[last], values[other] = values[other], values[last]


@jit
def shuffle(values, start, stop, key):
    """Shuffle ``values[start:stop]`` in place (Fisher–Yates)."""
    for last in range(stop - start - 1, 0, -1):
        here, other = at(start + last), at(start + below(key, last, last + 1))
        values[here], values[other] = values[other], values[here]


@jit
def shuffle_segments(values, offsets, first, last, key):
    """Shuffle the segments [first, last) of ``values``, which begin at ``offsets``, each by its own key."""
    for segment in range(first, last):
        shuffle(values, offsets[segment], offsets[segment + 1], subkey(key, segment))


@jit
def count_buckets(start, stop, shift, key, counts):
    """Count the buckets that the integers of [start, stop) draw: the top bits of their draws."""
    for value in range(start, stop):
        counts[draw(key, value) >> shift] += 1


@jit
def scatter_buckets(start, stop, shift, key, cursors, out):
    """Write the integers of [start, stop) where the cursors of their buckets stand, and move these."""
    for value in range(start, stop):
        bucket = draw(key, value) >> shift
        out[at(cursors[bucket])] = value
        cursors[bucket] += 1


@jit
def scatter_entries(lengths, start, stop, shift, key, cursors, out):
    """Like ``scatter_buckets``, but write entries: length << 32 | integer, as int64."""
    for value in range(start, stop):
        bucket = draw(key, value) >> shift
        out[at(cursors[bucket])] = np.int64(lengths[value]) << 32 | value
        cursors[bucket] += 1
