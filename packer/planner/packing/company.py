"""Packed rows where the number of samples of a row binds: ``min_samples``, or a tight ``max_samples``.

Samples are dealt over a fixed number of rows, the longest first to the emptiest row, so that the shortest are
left for the rows that lack company. The fewest rows that lose nothing are looked for, window by window of a
random order, so that the work stays linear and samples have other mates in every epoch.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from packer.kernels import longest_first as kernels
from packer.kernels.limits import UNLIMITED, Limits
from packer.planner.order.orders import id_dtype, permutation, subkey
from packer.planner.order.threads import run_chunks
from packer.planner.packing.microbatches import IntArray, MicroBatches, compact_owners, positions_of

_WINDOW = 1 << 14
_STEPS = (1.0, 1.001, 1.0025, 1.005, 1.01, 1.02, 1.04, 1.08, 1.16, 1.32, 1.64, 2.3, 3.6, 6.2, 11.4)
"""How many times the fewest conceivable rows are tried, one after the other."""


def with_company(
    packs: MicroBatches,
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    *,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None = None,
) -> MicroBatches:
    """Return rows that hold ``min_samples``, and about the fewest that ``max_samples`` allows.

    Args:
        packs: rows made without a look at ``min_samples``; returned as they are where none is short.
        lengths: (1, n) int32 lengths of the samples.
        owners: (n,) the sample of each piece; None where no sample is cut.
        limits: bounds of a row.
        key: of the random choices.
        phase_starts: where phases begin, whose samples stay apart, and the samples stand in a random order in
            which they are to be used; None where the order is still to be made.
    """
    is_short = bool((packs.sizes < limits.min_samples).any())
    if not is_short and not _are_too_many(packs, limits):
        return packs
    dealt = _deal(lengths[0], owners, limits, key, phase_starts)
    if not is_short and (len(dealt) >= len(packs) or len(dealt.leftover)):
        return packs
    return dealt


def _are_too_many(packs: MicroBatches, limits: Limits) -> bool:
    """Say whether more rows were made than ``max_samples`` asks for, where it is what binds."""
    if limits.max_samples >= UNLIMITED:
        return False
    num_samples = int(packs.sizes.sum())
    fewest = -(-num_samples // limits.max_samples)
    tokens = int(packs.seqlens[positions_of(packs)].sum(dtype=np.int64)) // int(limits.budgets[0])
    return len(packs) > fewest + fewest // 1000 and 5 * fewest > 4 * tokens


def _deal(
    lengths: IntArray,
    owners: IntArray | None,
    limits: Limits,
    key: np.uint64,
    phase_starts: NDArray[np.int64] | None,
) -> MicroBatches:
    """Deal the samples of each window over its rows."""
    size = len(lengths)
    order = (
        permutation(size, subkey(key, 0)) if phase_starts is None else np.arange(size, dtype=id_dtype(size))
    )
    numbers, num_owners = compact_owners(owners)
    windows = max(1, len(order) // _WINDOW)
    edges = np.arange(windows + 1, dtype=np.int64) * len(order) // windows
    if phase_starts is not None:
        edges = np.union1d(edges, phase_starts)

    def work(window: int, _first: int, _stop: int) -> tuple[IntArray, NDArray[np.int64], IntArray]:
        samples = order[edges[window] : edges[window + 1]]
        samples = samples[np.argsort(-lengths[samples].astype(np.int64), kind="stable")]
        row_of, num_rows = _best_rows(
            lengths[samples].astype(np.int64),
            numbers[samples] if len(numbers) else numbers,
            num_owners,
            limits,
        )
        sizes = np.bincount(row_of[row_of >= 0], minlength=num_rows)
        is_left = np.append(sizes < limits.min_samples, True)[row_of]  # the last place is −1: no row
        grouped = samples[np.argsort(np.where(is_left, num_rows, row_of), kind="stable")]
        sizes = sizes[sizes >= max(1, limits.min_samples)]
        return grouped[: sizes.sum()], sizes, grouped[sizes.sum() :]

    results = run_chunks(work, np.arange(len(edges), dtype=np.int64))
    pieces = np.concatenate([rows for rows, _, _ in results])
    sizes = np.concatenate([sizes for _, sizes, _ in results])
    rows = MicroBatches(
        pieces=pieces,
        seqlens=lengths[pieces],
        starts=np.cumsum(sizes) - sizes,
        sizes=sizes,
        leftover=np.concatenate([left for _, _, left in results]),
    )
    mixed = permutation(len(rows), subkey(key, 1))
    return replace(rows, starts=rows.starts[mixed], sizes=rows.sizes[mixed])


def _best_rows(
    lengths: NDArray[np.int64], owners: NDArray[np.int32], num_owners: int, limits: Limits
) -> tuple[NDArray[np.int32], int]:
    """Return the row of each sample, −1 where it has none, and the number of rows.

    Among the numbers of rows that are tried it is the smallest of those that lose the fewest tokens.
    """
    rooms = -(-lengths // limits.segment_multiple) * limits.segment_multiple
    squares = lengths**2 if limits.max_attention < UNLIMITED else np.zeros_like(lengths)
    row_of = np.empty(len(lengths), np.int32)

    def lost(num_rows: int) -> int:
        return int(
            kernels.deal_longest_first(
                rooms,
                squares,
                owners,
                num_owners,
                num_rows,
                limits.min_samples,
                limits.max_samples,
                int(limits.budgets[0]),
                limits.max_attention,
                row_of,
                np.empty(num_rows, np.int64),
            )
        )

    numbers = list(_numbers_of_rows(rooms, limits))
    best, least, below = 0, int(rooms.sum()) + 1, numbers[0] - 1
    for num_rows in numbers:
        missing = lost(num_rows)
        if missing < least:
            best, least = num_rows, missing
        if missing == 0:
            break
        below = num_rows
    # between the last number that lost something and the first that did not
    while least == 0 and best - below > 1 + best // 2000:
        middle = (best + below) // 2
        if lost(middle) == 0:
            best = middle
        else:
            below = middle
    lost(best)
    return row_of, best


def _numbers_of_rows(rooms: NDArray[np.int64], limits: Limits) -> Iterator[int]:
    """Yield the numbers of rows to try, rising."""
    fewest = max(
        -(-int(rooms.sum()) // int(limits.budgets[0])), -(-len(rooms) // min(limits.max_samples, len(rooms)))
    )
    most = max(1, len(rooms) // limits.min_samples)
    before = 0
    for factor in _STEPS:
        number = min(int(np.ceil(fewest * factor)), most)
        if number > before:
            yield number
        before = max(before, number)
    if before < most:
        yield most
