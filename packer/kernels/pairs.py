"""The exact partition of sorted pairs of sequences, padded each on its own."""

import numpy as np

from packer.kernels._jit import jit
from packer.kernels.limits import UNLIMITED, budget_fits, count_fits, round_up


@jit
def partition_pairs(samples, lengths, edges, limits, width, charge, out, starts, sizes, leftovers):
    """Cut each window of sorted samples into micro-batches at the least cost over all padded areas.

    Only one of several lengths can be sorted, so a group is extended backwards, sample by sample, while all
    its areas keep their budgets: n·B steps for micro-batches of B samples.

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
    cost = np.empty(most // width + 1, np.int64)
    came = np.empty(most // width + 1, np.int64)
    longest = np.empty(num_lengths, np.int64)
    totals = np.empty(num_lengths, np.int64)
    budgets, real, multiple, shapes = limits.budgets, limits.real, limits.multiple, limits.shapes
    max_samples, max_attention, min_samples = limits.max_samples, limits.max_attention, limits.min_samples
    num_microbatches = 0
    for window in range(len(edges) - 1):
        num_units = (edges[window + 1] - edges[window]) // width
        first = edges[window + 1] - num_units * width
        penalty = UNLIMITED // (num_units + 1)
        cost[0] = 0
        for end in range(1, num_units + 1):
            cost[end] = cost[end - 1] + penalty
            came[end] = end
            longest[:] = 0
            totals[:] = 0
            fits = True
            begin = end
            while fits and begin > 0:
                begin -= 1
                size = end - begin
                total = np.int64(charge)
                for metric in range(num_lengths):
                    widest = np.int64(0)
                    for position in range(first + begin * width, first + (begin + 1) * width):
                        widest = max(widest, np.int64(lengths[metric, position]))
                    longest[metric] = max(longest[metric], widest)
                    totals[metric] += widest
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
        end = num_units
        while end > 0:
            begin = came[end]
            if begin == end:
                behind -= width
                for member in range(width):
                    out[behind + member] = samples[first + (end - 1) * width + member]
                end -= 1
                continue
            for member in range(width):
                starts[num_microbatches] = target
                sizes[num_microbatches] = end - begin
                num_microbatches += 1
                for unit in range(begin, end):
                    out[target] = samples[first + unit * width + member]
                    target += 1
            end = begin
        leftovers[window] = edges[window + 1] - behind
    return num_microbatches
