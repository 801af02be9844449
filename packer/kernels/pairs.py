"""The partition of sorted pairs of sequences, padded each on its own."""

import numpy as np

from packer.kernels._jit import inline, jit
from packer.kernels.limits import UNLIMITED, budget_fits, count_fits, round_up

_FINENESS = 64
"""A cut falls between blocks of 1/64 of a micro-batch, at most; between samples, where fewer fit into one."""


@inline
def _cut_blocks(lengths, first, num_units, width, limits, blocks, widest, totals):
    """Put units of ``width`` samples into blocks; fill where they end, their longest and summed lengths.

    Returns:
        The number of blocks.
    """
    num_blocks = 0
    finest = np.int64(0)
    for unit in range(num_units):
        block = num_blocks - 1
        room = limits.max_samples
        for metric in range(len(lengths)):
            longest = np.int64(0)
            for position in range(first + unit * width, first + (unit + 1) * width):
                longest = max(longest, np.int64(lengths[metric, position]))
            padded = round_up(limits.multiple, limits.shapes, longest)
            room = min(room, limits.budgets[metric] // padded)
            widest[metric, num_blocks] = longest
        room = max(np.int64(1), room // _FINENESS)
        joins = block >= 0 and unit + 1 - (blocks[block - 1] if block > 0 else 0) <= min(finest, room)
        for metric in range(len(lengths)):
            longest = widest[metric, num_blocks]
            if joins:
                widest[metric, block] = max(widest[metric, block], longest)
                totals[metric, block] += longest
            else:
                totals[metric, num_blocks] = longest
        if joins:
            finest = min(finest, room)
        else:
            finest = room
            block = num_blocks
            num_blocks += 1
        blocks[block] = unit + 1
    return num_blocks


@jit
def partition_pairs(samples, lengths, edges, limits, width, charge, out, starts, sizes, leftovers):
    """Cut each window of sorted samples into micro-batches at the least cost over all padded areas.

    Only one of several lengths can be sorted, so a group is extended backwards, block by block, while all its
    areas keep their budgets. A block is a sample, or 1/64 of a micro-batch of many: at most 64 steps a block.

    Args:
        samples: (n,) samples of all windows, sorted inside each.
        lengths: (K, n) int32 lengths, in the same order.
        edges: (W + 1,) int64, window w is ``samples[edges[w]:edges[w + 1]]``.
        limits: bounds of a micro-batch; one sample alone keeps them.
        width: 1, or the micro-batches of a step that must agree in shape: each takes every ``width``-th.
        charge: what a micro-batch costs besides its padded tokens.
        out: (n,) filled: the samples micro-batch by micro-batch, at each window's end those without a place.
        starts: (n,) int64, filled: where each micro-batch begins in ``out``.
        sizes: (n,) int64, filled: samples of each micro-batch.
        leftovers: (W,) int64, filled: samples at each window's end that found no place.

    Returns:
        The number of micro-batches.
    """
    num_lengths = len(lengths)
    most = 0
    for window in range(len(edges) - 1):
        most = max(most, edges[window + 1] - edges[window])
    most = most // width + 1
    cost = np.empty(most, np.int64)
    came = np.empty(most, np.int64)
    blocks = np.empty(most, np.int64)
    widest = np.empty((num_lengths, most), np.int64)
    summed = np.empty((num_lengths, most), np.int64)
    longest = np.empty(num_lengths, np.int64)
    totals = np.empty(num_lengths, np.int64)
    budgets, real, multiple, shapes = limits.budgets, limits.real, limits.multiple, limits.shapes
    max_samples, max_attention, min_samples = limits.max_samples, limits.max_attention, limits.min_samples
    num_microbatches = 0
    for window in range(len(edges) - 1):
        num_units = (edges[window + 1] - edges[window]) // width
        first = edges[window + 1] - num_units * width
        num_blocks = _cut_blocks(lengths, first, num_units, width, limits, blocks, widest, summed)
        penalty = UNLIMITED // (num_units + 1)
        cost[0] = 0
        for end in range(1, num_blocks + 1):
            left_out = blocks[end - 1] - (blocks[end - 2] if end > 1 else 0)
            cost[end] = cost[end - 1] + penalty * left_out
            came[end] = end
            longest[:] = 0
            totals[:] = 0
            fits = True
            begin = end
            while fits and begin > 0:
                begin -= 1
                size = blocks[end - 1] - (blocks[begin - 1] if begin > 0 else 0)
                total = np.int64(charge)
                for metric in range(num_lengths):
                    longest[metric] = max(longest[metric], widest[metric, begin])
                    totals[metric] += summed[metric, begin]
                    padded = round_up(multiple, shapes, longest[metric])
                    fits &= count_fits(max_samples, max_attention, size, padded)
                    fits &= budget_fits(budgets[metric], real, size, padded, totals[metric])
                    total += size * padded
                if fits and size >= min_samples and cost[begin] + total < cost[end]:
                    cost[end] = cost[begin] + total
                    came[end] = begin
        target = edges[window]
        behind = edges[window + 1] - (first - edges[window])
        for position in range(edges[window], first):
            out[behind + position - edges[window]] = samples[position]
        end = num_blocks
        while end > 0:
            begin = came[end]
            until = blocks[end - 1]
            if begin == end:
                since = blocks[end - 2] if end > 1 else 0
                behind -= (until - since) * width
                for place in range((until - since) * width):
                    out[behind + place] = samples[first + since * width + place]
                end -= 1
                continue
            since = blocks[begin - 1] if begin > 0 else 0
            for member in range(width):
                starts[num_microbatches] = target
                sizes[num_microbatches] = until - since
                num_microbatches += 1
                for unit in range(since, until):
                    out[target] = samples[first + unit * width + member]
                    target += 1
            end = begin
        leftovers[window] = edges[window + 1] - behind
    return num_microbatches
