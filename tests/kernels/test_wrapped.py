"""Wrapped rows: the kernel against its naive twin, and what must hold whatever the lengths."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer.kernels import wrapped as kernels
from tests import naive


@st.composite
def problems(draw):
    """Lengths, many of them hard to cut, who the documents belong to, and the room of a row."""
    multiple = draw(st.sampled_from([1, 1, 1, 2, 5]))
    capacity = draw(st.integers(-(-kernels.LEAST_ROOM // multiple), 24)) * multiple
    length = st.one_of(st.integers(1, 4), st.integers(1, 3 * capacity), st.sampled_from([3, capacity + 1]))
    lengths = draw(st.lists(length, min_size=1, max_size=40))
    owners = draw(st.one_of(st.just([]), st.lists(st.integers(-1, 5), min_size=40, max_size=40)))
    return lengths, owners, capacity, multiple


def wrap(lengths, owners, capacity, multiple):
    """Run the kernel with as much room as its description promises to take; return rows of pieces."""
    entries = np.array([length << 32 | document for document, length in enumerate(lengths)], np.int64)
    rooms = sum(-(-length // multiple) * multiple for length in lengths)
    most = len(lengths) + rooms // (capacity - 1)
    documents, starts, seqlens = np.full((3, most), -1, np.int32)
    sizes = np.full(most + 1, -1, np.int64)
    num_pieces, num_rows = kernels.wrap(
        entries,
        np.array(owners, np.int32),
        max(owners, default=-1) + 1,
        capacity,
        multiple,
        documents,
        starts,
        seqlens,
        sizes,
    )
    pieces = list(zip(documents.tolist(), starts.tolist(), seqlens.tolist(), strict=True))
    ends = np.cumsum(sizes[:num_rows]).tolist()
    assert not ends or ends[-1] == num_pieces
    return [pieces[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=False)]


@given(problems())
def test_rows_equal_those_of_the_naive_twin(problem):
    lengths, owners, capacity, multiple = problem
    assert wrap(*problem) == naive.wrapped(lengths, owners, capacity, multiple, kernels.REACH)


@given(problems())
def test_documents_are_tiled_by_pieces_that_train_and_cut_only_where_a_row_ends(problem):
    lengths, owners, *_ = problem
    found = defaultdict(list)
    for row in wrap(*problem):
        inside = [owners[document] for document, _, _ in row if owners and owners[document] >= 0]
        assert len(set(inside)) == len(inside), "two parts of one sample in a row"
        for place, (document, start, tokens) in enumerate(row):
            found[document].append((start, tokens))
            assert tokens > 1 or lengths[document] == 1
            assert start == 0 or place == 0
            assert start + tokens == lengths[document] or place == len(row) - 1
    for document, length in enumerate(lengths):
        ends = [start + tokens for start, tokens in found[document]]
        assert [start for start, _ in found[document]] == [0, *ends[:-1]]
        assert ends[-1] == length


@given(problems())
def test_a_row_is_full_to_one_token_unless_nothing_that_is_left_could_fill_it(problem):
    lengths, owners, capacity, multiple = problem
    rows = wrap(*problem)
    for number, row in enumerate(rows):
        missing = capacity - sum(-(-tokens // multiple) * multiple for _, _, tokens in row)
        assert missing >= 0
        if missing < 2:
            continue
        inside = {owners[document] for document, _, _ in row} - {-1} if owners else set()
        for document in (piece[0] for later in rows[number + 1 :] for piece in later):
            is_met = owners and owners[document] in inside
            assert is_met or (lengths[document] == 3 and missing == 2)


def test_a_row_ends_one_token_short_rather_than_hold_a_part_without_a_label():
    # 1 of the second document would be left in the second row, or 1 of it would be in the first
    assert wrap([6, 5], [], 10, 1) == [[(0, 0, 6), (1, 0, 3)], [(1, 3, 2)]]
    assert wrap([9, 5], [], 10, 1) == [[(0, 0, 9)], [(1, 0, 5)]]
    assert wrap([9, 1, 5], [], 10, 1) == [[(0, 0, 9), (1, 0, 1)], [(2, 0, 5)]]


def test_a_document_of_three_waits_where_there_is_room_for_two():
    assert wrap([8, 3, 7], [], 10, 1) == [[(0, 0, 8), (2, 0, 2)], [(2, 2, 5), (1, 0, 3)]]
    assert wrap([8, 3], [], 10, 1) == [[(0, 0, 8)], [(1, 0, 3)]]


def test_a_long_document_goes_through_many_rows():
    assert wrap([25], [], 8, 1) == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 7)], [(0, 23, 2)]]
