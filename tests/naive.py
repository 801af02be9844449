"""Naive twins: the slow and obvious way to what the package does fast."""

import struct
from bisect import bisect_right
from fractions import Fraction
from itertools import chain, combinations, pairwise
from pathlib import Path

import numpy as np


def read_items(prefix: Path, dtypes: dict[int, np.dtype]) -> list[list[int]]:
    """Read a ``.bin``/``.idx`` pair field by field."""
    with open(f"{prefix}.idx", "rb") as index, open(f"{prefix}.bin", "rb") as data:
        assert index.read(9) == b"MMIDIDX\x00\x00"
        (version,) = struct.unpack("<Q", index.read(8))
        (code,) = struct.unpack("<B", index.read(1))
        (num_items,) = struct.unpack("<Q", index.read(8))
        (num_entries,) = struct.unpack("<Q", index.read(8))
        assert version == 1
        sizes = [struct.unpack("<i", index.read(4))[0] for _ in range(num_items)]
        pointers = [struct.unpack("<q", index.read(8))[0] for _ in range(num_items)]
        documents = [struct.unpack("<q", index.read(8))[0] for _ in range(num_entries)]
        assert index.read() == b""
        assert documents[0] == 0
        assert documents[-1] == num_items
        items = []
        for size, pointer in zip(sizes, pointers, strict=True):
            data.seek(pointer)
            items.append(np.frombuffer(data.read(size * dtypes[code].itemsize), dtypes[code]).tolist())
        return items


def row(samples: list[dict[str, list]], segments: list[tuple[int, int]], is_filler: bool) -> dict[str, list]:
    """Build a row in the stated order: concatenate, mask starts, pad, shift once, restart positions.

    ``segments`` are the edges of each sample with its padding and, last, of the padding of the row.
    """
    length = segments[-1][1]
    built = {
        "input_ids": [0] * length,
        "weights": [[0.0, 0.0] for _ in range(length)],
        "labels": [-100] * length,
        "position_ids": [position - first for first, last in segments for position in range(first, last)],
        "is_token": [False] * length,
    }
    for sample, (first, _) in zip(samples, segments, strict=False):
        labels = sample.get("labels", sample["input_ids"])
        for offset, token in enumerate(sample["input_ids"]):
            built["input_ids"][first + offset] = token
            built["weights"][first + offset] = sample["weights"][offset]
            built["labels"][first + offset] = labels[offset] if offset else -100
            built["is_token"][first + offset] = True
    shifted = [*built["labels"][1:], -100]
    built["shift_labels"] = [-100] * length if is_filler else shifted
    return built


def curriculum_items(values: list[int]) -> dict[str, list[list[int]]]:
    """Index files of DeepSpeed's curriculum: every value, its samples, and these by hundredths of values."""
    unique = sorted(set(values))
    samples = [[sample for sample, value in enumerate(values) if value == wanted] for wanted in unique]
    step = max(1, len(unique) // 100)
    return {
        "index_to_metric": [[value] for value in unique],
        "index_to_sample": samples,
        "index_to_sample_percentile_merged": [
            [sample for some in samples[first : first + step] for sample in some]
            for first in range(0, len(samples), step)
        ],
    }


def flat(lists):
    return list(chain.from_iterable(lists))


# The generator, in Python's integers.

_MASK = 2**64 - 1


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def draw(key, counter):
    return mix((key + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK)


def subkey(key, index):
    return mix((mix(key ^ 0xBF58476D1CE4E5B9) + index * 0x9E3779B97F4A7C15) & _MASK)


def derive_key(seed, epoch, purpose):
    return subkey(subkey(mix((seed + 0x9E3779B97F4A7C15) & _MASK), epoch), purpose)


def below(key, counter, bound):
    """Reject what would make some results likelier than others."""
    while True:
        if bound < 2**32:
            product = (draw(key, counter) >> 32) * bound
            if product % 2**32 >= 2**32 % bound:
                return product >> 32
        else:
            value = draw(key, counter) & ((1 << (bound - 1).bit_length()) - 1)
            if value < bound:
                return value
        key = mix((key + 0x94D049BB133111EB) & _MASK)


def shuffle(values, key):
    values = list(values)
    for last in range(len(values) - 1, 0, -1):
        other = below(key, last, last + 1)
        values[last], values[other] = values[other], values[last]
    return values


def draw_to_end(values, size, count, key):
    values = list(values)
    for index in range(count):
        last = size - 1 - index
        other = below(key, index, last + 1)
        values[last], values[other] = values[other], values[last]
    return values


def buckets(values, num_buckets, key):
    """Return the values bucket by bucket; a bucket is the top bits of a value's draw."""
    shift = 64 - (num_buckets - 1).bit_length()
    out = [[] for _ in range(num_buckets)]
    for value in values:
        out[draw(key, value) >> shift].append(value)
    return out


# The mix of steps.


def length_classes(lengths, num_classes=16):
    """Return the class of each length, ⌊16 · (tokens of shorter ones + half its own) / all⌋, without gaps."""
    tokens = {length: length * lengths.count(length) for length in sorted(set(lengths))}
    classes, shorter = {}, 0
    for length, own in tokens.items():
        whole = sum(tokens.values()) or 1
        classes[length] = int(num_classes * (shorter + Fraction(own, 2)) / whole)
        shorter += own
    used = sorted(set(classes.values()))
    return {length: used.index(number) for length, number in classes.items()}


def tokens_by_class(samples, num_classes):
    """Return the tokens of each class among (class, tokens) pairs."""
    return [sum(tokens for number, tokens in samples if number == k) for k in range(num_classes)]


def design_effect(steps):
    """Return the design effect of steps, lists of (class, tokens); as it is defined, in fractions."""
    samples = flat(steps)
    classes = sorted({number for number, tokens in samples if tokens})
    if len(classes) < 2 or len(steps) < 2:
        return None
    whole = sum(tokens for _, tokens in samples)
    mean_samples = Fraction(len(samples), len(steps))
    found = expected = Fraction(0)
    for k in classes:
        share = Fraction(sum(tokens for number, tokens in samples if number == k), whole)
        for step in steps:
            weight = sum(tokens for _, tokens in step)
            if weight:
                inside = Fraction(sum(tokens for number, tokens in step if number == k), weight)
                found += weight * (inside - share) ** 2 / whole
        spread = sum(tokens**2 * ((number == k) - share) ** 2 for number, tokens in samples)
        expected += spread / len(samples) / (mean_samples * Fraction(whole, len(samples)) ** 2)
    return float(found / expected * Fraction(len(steps), len(steps) - 1))


def deal(hist, step_size, targets, scales, key, sweeps):
    """Return the micro-batches of one window, step by step: strata, an exchange inside them, shuffles."""
    num_steps = len(hist) // step_size
    count = num_steps * step_size

    def mean_class(m):
        return sum(64 * k * tokens for k, tokens in enumerate(hist[m])) // max(1, sum(hist[m]))

    ascending = sorted(range(count), key=mean_class)
    strata = [
        shuffle(ascending[e * num_steps : (e + 1) * num_steps], subkey(key, e)) for e in range(step_size)
    ]
    if step_size > 1 and num_steps > 1:
        _exchange(hist[:count], strata, targets, scales, subkey(key, step_size), sweeps)
    out = []
    for place, step in enumerate(shuffle(range(num_steps), subkey(key, step_size + 1))):
        out += shuffle([stratum[step] for stratum in strata], subkey(key, step_size + 2 + place))
    return out + list(range(count, len(hist)))


def deviations(hist, targets, scales, step_size):
    """Return h − w·p, scaled, by micro-batch and class, and each w, in a power of two of 2^-20 tokens."""
    shift = max(0, sum(targets).bit_length() - 40)
    shares = [(target >> shift << 20) // max(1, sum(targets) >> shift) for target in targets]
    most, unit = max(1, *map(sum, hist)) << 20, 0
    limit = max(1, 16 * min(2**15, 2**26 // step_size) // max(16, *scales))
    while most >> unit > limit:
        unit += 1
    half = 1 << unit >> 1
    moved = [
        [
            (((h << 20) - sum(row) * share + half) >> unit) * scale >> 4
            for h, share, scale in zip(row, shares, scales, strict=True)
        ]
        for row in hist
    ]
    return moved, [sum(row) << 20 >> unit for row in hist]


def _exchange(hist, strata, targets, scales, key, sweeps):
    """Exchange wherever the squares of the two steps' deviations then sum up to less."""
    moved, _ = deviations(hist, targets, scales, len(strata))
    draws = 0
    for _ in range(sweeps):
        for stratum in strata:
            for here in range(len(stratum)):
                there = below(key, draws, len(stratum))
                draws += 1
                before = _squares(moved, strata, here) + _squares(moved, strata, there)
                stratum[here], stratum[there] = stratum[there], stratum[here]
                if _squares(moved, strata, here) + _squares(moved, strata, there) >= before:
                    stratum[here], stratum[there] = stratum[there], stratum[here]


def _squares(moved, strata, step):
    return sum(sum(column) ** 2 for column in zip(*(moved[stratum[step]] for stratum in strata), strict=True))


# Packings. Micro-batches are lists of positions.


def round_up(seqlen, multiple=1, shapes=()):
    return min(shape for shape in shapes if shape >= seqlen) if shapes else -(-seqlen // multiple) * multiple


def fits(lengths, limits, same_shape=None):
    """Say whether samples of these lengths, a list for each budget, keep all bounds of a micro-batch."""
    count = len(lengths[0])
    if count > limits.max_samples:
        return False
    if limits.packed:
        rooms = sum(round_up(length, limits.segment_multiple) for length in lengths[0])
        squares = sum(length**2 for length in lengths[0])
        return rooms <= limits.budgets[0] and squares <= limits.max_attention
    for metric, (row, budget) in enumerate(zip(lengths, limits.budgets, strict=True)):
        longest = max(row) if same_shape is None else same_shape[metric]
        padded = round_up(longest, limits.multiple, list(limits.shapes))
        if count * padded**2 > limits.max_attention:
            return False
        if (sum(row) if limits.real else count * padded) > budget:
            return False
    return True


def next_fit(lengths, owners, limits, width=1, same_seqlen=False):
    """Return groups of micro-batches: the most samples that ``width`` of them can take in turn."""
    n = len(lengths[0])

    def is_valid(group):
        longest = [max(row[p] for batch in group for p in batch) for row in lengths] if same_seqlen else None
        return all(
            fits([[row[p] for p in batch] for row in lengths], limits, longest)
            and len({owners[p] for p in batch}) == len(batch)
            for batch in group
        )

    groups, start = [], 0
    while start < n:
        wide = min(width, (n - start) // limits.min_samples)
        if wide == 0:
            break
        most = (n - start) // wide if wide == width else limits.min_samples
        best = None
        for size in range(1, most + 1):
            taken = range(start, start + size * wide)
            group = [list(taken[member::wide]) for member in range(wide)]
            if not is_valid(group):
                break
            best = group
        if best is None or len(best[0]) < limits.min_samples:
            start += 1
            continue
        groups.append(best)
        start += len(best) * len(best[0])
    return groups


def best_fit_decreasing(rooms, capacity):
    """Return the residuals of best-fit-decreasing, sample by sample."""
    residuals = []
    for room in sorted(rooms, reverse=True):
        tightest = min((residual for residual in residuals if residual >= room), default=None)
        if tightest is None:
            residuals.append(capacity - room)
        else:
            residuals.remove(tightest)
            residuals.append(tightest - room)
    return residuals


def partition_cost(lengths, owners, limits, charge):
    """Return (samples left out, cost) of the best partition of sorted samples: every start for every end."""
    best = [(0, 0)]
    for end in range(1, len(lengths) + 1):
        skipped, cost = best[end - 1]
        choices = [(skipped + 1, cost)]
        for start in range(end):
            group = lengths[start:end]
            alone = len({owners[p] for p in range(start, end)}) == end - start
            if len(group) >= limits.min_samples and alone and fits([group], limits):
                skipped, cost = best[start]
                padded = round_up(group[-1], limits.multiple, list(limits.shapes))
                choices.append((skipped, cost + len(group) * padded + charge))
        best.append(min(choices))
    return best[-1]


def pairs_cost(lengths, limits, charge):
    """The same for samples of several lengths, in the order in which they stand."""
    best = [(0, 0)]
    for end in range(1, len(lengths[0]) + 1):
        skipped, cost = best[end - 1]
        choices = [(skipped + 1, cost)]
        for start in range(end):
            group = [row[start:end] for row in lengths]
            if end - start >= limits.min_samples and fits(group, limits):
                skipped, cost = best[start]
                areas = sum((end - start) * round_up(max(row), limits.multiple) for row in group)
                choices.append((skipped, cost + areas + charge))
        best.append(min(choices))
    return best[-1]


def most_open(steps, firsts, num_bytes):
    """Return the most blocks, and the most bytes, that lie between their first and their last step.

    ``steps`` are lists of samples; block b begins at sample ``firsts[b]``.
    """
    used = [(now, bisect_right(firsts, sample) - 1) for now, step in enumerate(steps) for sample in step]
    last = {block: now for now, block in used}
    first = {block: now for now, block in reversed(used)}
    most_blocks = most_bytes = 0
    for now in range(len(steps)):
        is_open = [block for block in last if first[block] <= now <= last[block]]
        most_blocks = max(most_blocks, len(is_open))
        most_bytes = max(most_bytes, sum(num_bytes[block] for block in is_open))
    return most_blocks, most_bytes


def stretches_of(steps, firsts, at_a_time):
    """Return the steps at which every ``at_a_time``-th block is read of for the first time."""
    seen, borders = set(), set()
    for now, step in enumerate(steps):
        for block in sorted({bisect_right(firsts, sample) - 1 for sample in step} - seen):
            if len(seen) % at_a_time == 0:
                borders.add(now)
            seen.add(block)
    return sorted(borders)


def effects_by_stretch(steps, first_steps):
    """Return the design effects of steps in their stretch, and of stretches in the epoch: each as defined."""
    everyone = sorted(length for step in steps for length in step)
    class_of = length_classes(everyone)
    num_stretches = len(first_steps)
    if num_stretches == len(steps) or len(set(class_of.values())) < 2:
        return None, None
    edges = [*first_steps, len(steps)]
    stretches = [[length for step in steps[start:stop] for length in step] for start, stop in pairwise(edges)]
    whole = sum(everyone)
    within = between = expected = Fraction(0)
    for k in set(class_of.values()):

        def share(samples, k=k):
            return Fraction(sum(n for n in samples if class_of[n] == k), max(1, sum(samples)))

        for samples, (start, stop) in zip(stretches, pairwise(edges), strict=True):
            between += Fraction(sum(samples), whole) * (share(samples) - share(everyone)) ** 2
            for step in steps[start:stop]:
                within += Fraction(sum(step), whole) * (share(step) - share(samples)) ** 2
        expected += sum(n * n * ((class_of[n] == k) - share(everyone)) ** 2 for n in everyone)
    # of random steps, and of random stretches, of one sample each
    expected *= Fraction(1, whole * whole)
    of_steps = float(within / expected / (len(steps) - num_stretches))
    return of_steps, float(between / expected / (num_stretches - 1)) if num_stretches > 1 else None


def mixed(entries, limits, owners, *, pool, keep, tries, reach, gap_shift):
    """Fill rows in order, then every gap with the longest that fits; entries are (length, sample)."""
    room = int(limits.budgets[0])
    waiting, outside, rows = [], list(range(len(entries))), []

    def size(place):
        return -(-entries[place][0] // limits.segment_multiple) * limits.segment_multiple

    def fits(row, place):
        inside = [*row, place]
        own = [owners[entries[p][1]] for p in inside if owners and owners[entries[p][1]] >= 0]
        return (
            sum(map(size, inside)) <= room
            and sum(entries[p][0] ** 2 for p in inside) <= limits.max_attention
            and len(inside) <= limits.max_samples
            and len(set(own)) == len(own)
        )

    def longest(row):
        able = [place for place in waiting if place not in row and fits(row, place)]
        return max(able, key=lambda place: (entries[place][0], place), default=None)

    def gap(row):
        return room - sum(map(size, row))

    def is_met(row, place):
        own = owners[entries[place][1]] if owners else -1
        return own >= 0 and own in [owners[entries[p][1]] for p in row]

    while len(waiting) + len(outside) > keep:
        while outside and len(waiting) < pool:
            waiting.append(outside.pop(0))
        row = []
        for place in waiting:
            if is_met(row, place):
                continue
            if len(row) == limits.max_samples or not fits(row, place):
                break
            row.append(place)
        filler = longest(row)
        rest = gap(row) - (size(filler) if filler is not None else 0)
        if rest > room >> gap_shift:
            last = row.pop()
            chosen, tried = last, 0
            for place in [p for p in waiting if p not in row][:reach]:
                if rest <= room >> gap_shift or tried == tries:
                    break
                if not fits(row, place):
                    continue
                tried += 1
                beside = longest([*row, place])
                other = gap([*row, place]) - (size(beside) if beside is not None else 0)
                if other < rest:
                    rest, chosen = other, place
            row.append(chosen)
        while (filler := longest(row)) is not None:
            row.append(filler)
        waiting = [place for place in waiting if place not in row]
        rows.append([entries[place] for place in row])
    return rows, [entries[place] for place in waiting + outside]


def wrapped(lengths, owners, capacity, multiple, reach):
    """Return rows of (document, start, tokens): end to end, cut where a row ends, no part a single token."""
    coming, waiting, rows = list(range(len(lengths))), [], []
    begun = None  # a document that goes on, and the tokens that were taken of it

    def part(rest, left):
        parts = [n for n in range(1, min(rest, left) + 1) if n == rest or (n > 1 and rest - n > 1)]
        return max(parts, default=0)

    def may_follow(document, left, row):
        owner = owners[document] if owners else -1
        is_met = owner >= 0 and any(owners[other] == owner for other, _, _ in row)
        return not is_met and part(lengths[document], left) > 0

    def next_document(left, row):
        if waiting and may_follow(waiting[0], left, row):
            return waiting.pop(0)
        if left == 1:
            return coming.pop(0) if coming and may_follow(coming[0], left, row) else None
        while coming:
            document = coming.pop(0)
            if may_follow(document, left, row):
                return document
            waiting.append(document)
        for place, document in enumerate(waiting[:reach]):
            if may_follow(document, left, row):
                return waiting.pop(place)
        return None

    while begun or coming or waiting:
        row, left = [], capacity
        while left > 0:
            if begun is None:
                document = next_document(left, row)
                if document is None:
                    break
                begun = (document, 0)
            document, start = begun
            tokens = part(lengths[document] - start, left)
            row.append((document, start, tokens))
            begun = (document, start + tokens) if start + tokens < lengths[document] else None
            left = left - -(-tokens // multiple) * multiple if begun is None else 0
        rows.append(row)
    return rows


def deal_longest_first(rooms, squares, owners, num_rows, limits):
    """Deal the longest first to the emptiest row that can take it; at the end to rows that lack some."""
    rows = [[] for _ in range(num_rows)]
    row_of = []

    def load(row):
        return sum(rooms[place] for place in rows[row])

    def takes(row, place):
        inside = [*rows[row], place]
        own = [owners[p] for p in inside if owners and owners[p] >= 0]
        return (
            load(row) + rooms[place] <= limits.budgets[0]
            and len(inside) <= limits.max_samples
            and sum(squares[p] for p in inside) <= limits.max_attention
            and len(set(own)) == len(own)
        )

    for place in range(len(rooms)):
        lacking = [row for row in range(num_rows) if len(rows[row]) < limits.min_samples]
        lacks = sum(limits.min_samples - len(rows[row]) for row in lacking)
        others = [
            row for row in range(num_rows) if row not in lacking and len(rows[row]) < limits.max_samples
        ]
        groups = [sorted(rows_, key=lambda row: (load(row), row)) for rows_ in (lacking, others)]
        owed = len(rooms) - place <= lacks
        if not groups[0] or (
            not owed and groups[1] and (load(groups[1][0]), groups[1][0]) < (load(groups[0][0]), groups[0][0])
        ):
            groups.reverse()
        row = next((row for group in groups for row in group if takes(row, place)), -1)
        row_of.append(row)
        if row >= 0:
            rows[row].append(place)
    return row_of


def lower_bound(rooms, capacity):
    """Return max(⌈Σ/C⌉, L2), with every k from 0 to C/2."""
    best = -(-sum(rooms) // capacity)
    for k in range(capacity // 2 + 1):
        alone = [room for room in rooms if room > capacity - k]
        large = [room for room in rooms if capacity / 2 < room <= capacity - k]
        small = [room for room in rooms if k <= room <= capacity / 2]
        beyond = sum(small) - (len(large) * capacity - sum(large))
        best = max(best, len(alone) + len(large) + max(0, -(-beyond // capacity)))
    return best


def shapes_cost(lengths, num_shapes, multiple):
    """Return the least sum of padded lengths over all choices of shapes."""
    candidates = sorted({round_up(length, multiple) for length in lengths})
    return min(
        sum(round_up(length, shapes=(*chosen, candidates[-1])) for length in lengths)
        for count in range(min(num_shapes, len(candidates)))
        for chosen in combinations(candidates[:-1], count)
    )


def difficulty(step, schedule):
    """Return min + (max − min)·(step / total)^(1 / degree) in multiples, DeepSpeed's difficulty at a step."""
    least, most = schedule["min_difficulty"], schedule["max_difficulty"]
    total, multiple, degree = (
        schedule[key] for key in ("total_curriculum_step", "difficulty_step", "root_degree")
    )
    value = least
    while (value + 1 - least) ** degree * total <= step * (most - least) ** degree:
        value += 1
    value -= value % multiple
    return min(max(value, -(-least // multiple) * multiple), most)


def even_out_steps(order, hist, costs, step_size, dp_size, targets, spread, key, near, sweeps):
    """Return the whole steps of one window after exchanges that make slots cost less and keep the mix."""
    num_places = len(order)
    if num_places <= step_size:
        return order
    moved, tokens = deviations([hist[m] for m in order], targets, [16] * len(targets), step_size)
    costs = [costs[m] for m in order]
    members = [list(range(start, start + step_size)) for start in range(0, num_places, step_size)]

    def spent(step):
        return sum(sorted(costs[m] for m in members[step])[dp_size - 1 :: dp_size])

    def squares(step):
        return sum(sum(column) ** 2 for column in zip(*(moved[m] for m in members[step]), strict=True))

    def mean_class(m):
        return sum(64 * k * h for k, h in enumerate(hist[order[m]])) // max(1, sum(hist[order[m]]))

    ascending = sorted(range(num_places), key=mean_class)
    draws = -1
    for _ in range(sweeps):
        for rank, mine in enumerate(ascending):
            draws += 1
            other = rank + 1 + below(key, draws, near)
            if other >= num_places:
                continue
            theirs = ascending[other]
            here, there = (next(t for t, step in enumerate(members) if m in step) for m in (mine, theirs))
            if here == there:
                continue
            before = spent(here) + spent(there), squares(here), squares(there)
            mine_at, theirs_at = members[here].index(mine), members[there].index(theirs)
            members[here][mine_at], members[there][theirs_at] = theirs, mine
            may = spent(here) + spent(there) < before[0] and all(
                squares(step) <= max(was, spread * float(sum(tokens[m] for m in members[step]) ** 2))
                for step, was in zip((here, there), before[1:], strict=True)
            )
            if not may:
                members[here][mine_at], members[there][theirs_at] = mine, theirs
    return [order[m] for m in flat(members)]


def even_out_slots(costs, dp_size, key):
    """Return the micro-batches of a step in slots of like cost, the dearest to the idlest rank."""
    num_slots = len(costs) // dp_size
    slots = shuffle(range(num_slots), subkey(key, 0))
    names = shuffle(range(dp_size), subkey(key, 1))
    dearest = sorted(range(len(costs)), key=lambda m: (costs[m], m), reverse=True)
    out, loads = [None] * len(costs), [0] * dp_size
    for slot in slots:
        ranks = sorted(range(dp_size), key=lambda rank: (loads[rank], rank))
        for rank in ranks:
            microbatch = dearest.pop(0)
            out[slot * dp_size + names[rank]] = microbatch
            loads[rank] += costs[microbatch]
    return out


def time_lost(costs, step_size, dp_size):
    """Return Σ slowest · D / Σ cost − 1 of slots and of steps."""
    slots = [costs[start : start + dp_size] for start in range(0, len(costs), dp_size)]
    per_step = step_size // dp_size
    steps = [slots[start : start + per_step] for start in range(0, len(slots), per_step)]
    if not sum(costs):
        return 0, 0
    by_slots = sum(map(max, slots)) * dp_size / sum(costs) - 1
    by_steps = sum(max(map(sum, zip(*step, strict=True))) for step in steps) * dp_size / sum(costs) - 1
    return by_slots, by_steps


# Streams of several sources.


def merge(streams, weights, quotas, begins, end, unit):
    """Merge streams of lengths by when the middle of each sample is due; see ``kernels.streams.merge``."""
    never, whole = 2**62, 1 << 30
    samples = []
    for number, lengths in enumerate(streams):
        clock, rest, phase, left = 0, 0, 0, quotas[0][number]
        for place, length in enumerate(lengths):
            if clock >= never:
                break
            amount = length if unit is None else unit
            while left == 0 and phase + 1 < len(begins):
                phase += 1
                clock, rest, left = begins[phase], 0, quotas[phase][number]
            before, room, mine = clock, left, amount
            while amount > left and phase + 1 < len(begins):
                amount -= left
                phase += 1
                clock, rest, left = begins[phase], 0, quotas[phase][number]
            left -= amount
            weight = weights[phase][number]
            if weight == 0 and amount > 0:
                due, clock = (before if 2 * room >= mine else never), never
            else:
                if weight > 0:
                    moved = amount * whole + rest
                    clock, rest = min(clock + moved // weight, never), moved % weight
                due = before + (clock - before) // 2
            samples.append((due, number, place))
    # a stream gives its samples in their order: what is due earlier than the one before waits for it
    found, cursors = [], [0] * len(streams)
    queues = [[sample for sample in samples if sample[1] == number] for number in range(len(streams))]
    starts, current = [0] * len(begins), 0
    while True:
        heads = [queue[cursors[n]] for n, queue in enumerate(queues) if cursors[n] < len(queue)]
        due, number, place = min(heads, default=(never, 0, 0))
        while current + 1 < len(begins) and due >= begins[current + 1]:
            current += 1
            starts[current] = len(found)
        if due >= end or due >= never:
            return found, starts
        found.append((number, place))
        cursors[number] += 1


def sequence(deviations, reach):
    """Return steps in the order in which running totals stay near nothing; see ``kernels.sequence``."""
    most, waiting, out, entered = 1 << 20, [], [], 0
    sums = [0] * (len(deviations[0]) if deviations else 0)
    for place in range(len(deviations)):
        while len(waiting) < reach and entered < len(deviations):
            waiting.append(entered)
            entered += 1

        def cost(step, place=place, sums=sums):
            off = deviations[step]
            crossed = sum(total * part for total, part in zip(sums, off, strict=True))
            return 256 * crossed + (64 - min(place - step, 1024)) * sum(part * part for part in off)

        step = min(waiting, key=cost)
        waiting.remove(step)
        out.append(step)
        sums = [
            min(max(total + part, -most), most) for total, part in zip(sums, deviations[step], strict=True)
        ]
    return out
