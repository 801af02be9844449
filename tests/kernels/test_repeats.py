"""Samples that a step holds twice."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import repeats as kernels


def found(rows, step_size, rooms, sources, is_copy=None):
    """Mark rows, lists of names, that hold what their step holds already; a name is its position."""
    pieces = np.array([name for row in rows for name in row], np.int32)
    sizes = np.array([len(row) for row in rows])
    is_met = np.empty(len(rows), np.bool_)
    count = kernels.find_repeats(
        pieces,
        np.arange(len(sources)),
        np.array(sources, np.uint16),
        np.cumsum(sizes) - sizes,
        sizes,
        np.arange(len(rows)),
        np.zeros(len(rows), np.bool_) if is_copy is None else np.array(is_copy),
        step_size,
        np.array(rooms),
        np.empty(len(sources), np.int64),
        is_met,
    )
    assert count == is_met.sum()
    return is_met.tolist()


@given(st.integers(1, 3), st.integers(0, 4), st.integers(-1, 9), st.data())
def test_repeats_equal_their_definition(step_size, num_steps, room, data):
    names = st.lists(st.integers(0, 7), min_size=1, max_size=3)
    rows = data.draw(st.lists(names, min_size=step_size * num_steps, max_size=step_size * num_steps))
    sources = [0, 0, 0, 0, 1, 1, 1, 1]
    expected = []
    for first in range(0, len(rows), step_size):
        step, seen = rows[first : first + step_size], set()
        size = sum(map(len, step))
        for row in step:
            is_met = False
            for name in row:
                if [room, -1][sources[name]] >= size:
                    is_met |= name in seen
                    seen.add(name)
            expected.append(is_met)
    assert found(rows, step_size, [room, -1], sources) == expected


def test_copies_do_not_count():
    assert found([[1], [1]], 2, [9], [0, 0], is_copy=[False, True]) == [False, False]


def test_exchanges_part_what_meets_and_move_whole_micro_batches():
    rng = np.random.default_rng(0)
    names, size, step_size, num_steps = 400, 4, 8, 100
    pieces = np.concatenate([rng.permutation(names) for _ in range(size * step_size * num_steps // names)])
    pieces = pieces.astype(np.int32)
    starts, sizes = np.arange(0, len(pieces), size), np.full(step_size * num_steps, size)
    rows, is_met = rng.permutation(step_size * num_steps), np.empty(step_size * num_steps, np.bool_)
    sources, rooms, seen = np.zeros(names, np.uint16), np.array([names]), np.empty(names, np.int64)
    nothing = np.zeros(len(rows), np.bool_)

    def count():
        return kernels.find_repeats(
            pieces, np.arange(names), sources, starts, sizes, rows, nothing, step_size, rooms, seen, is_met
        )

    assert count() > 50
    for key in range(4):
        kernels.part_repeats(
            pieces,
            np.full(len(pieces), 5, np.int32),
            np.arange(names),
            sources,
            starts,
            sizes,
            rows,
            nothing,
            step_size,
            rooms,
            0,
            num_steps,
            np.uint64(key),
            seen,
            is_met,
        )
        count()
    assert count() == 0
    assert sorted(rows) == list(range(len(rows)))
    steps = pieces[(starts[rows][:, np.newaxis] + np.arange(size))].reshape(num_steps, -1)
    assert all(max(Counter(step).values()) == 1 for step in steps.tolist())
