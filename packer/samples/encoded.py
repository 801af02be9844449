"""Token ids of the rows of a batch, end to end, and which of them are trained on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Tokens(NamedTuple):
    """The tokens of a row."""

    ids: NDArray[np.int32]
    """(tokens,)"""
    mask: NDArray[np.bool_] | None = None
    """(tokens,) which of them are trained on, where that was asked for."""


class Encoded(NamedTuple):
    """Token ids of the rows of a batch, end to end."""

    ids: NDArray[Any]
    """(tokens,) in the type they are stored in; int32 where they come from a tokenizer."""
    lengths: NDArray[np.integer]
    """(rows,); of pairs (rows, members), the members of a row end to end."""
    mask: NDArray[np.bool_] | None = None
    """(tokens,) which tokens are trained on, where that is not all of them."""

    @property
    def row_lengths(self) -> NDArray[np.integer]:
        """(rows,) tokens of each row, of pairs all its members'."""
        return self.lengths if self.lengths.ndim == 1 else self.lengths.sum(axis=1)


def gathered(tokens: Mapping[int, Tokens], num_rows: int, *, masked: bool) -> Encoded:
    """Put the tokens of rows end to end; rows that are not there have none."""
    lengths = np.zeros(num_rows, np.int64)
    lengths[list(tokens)] = [len(row.ids) for row in tokens.values()]
    ids = np.concatenate([np.zeros(0, np.int32), *(row.ids for row in tokens.values())])
    if not masked:
        return Encoded(ids, lengths)
    masks = [row.mask for row in tokens.values() if row.mask is not None]
    return Encoded(ids, lengths, np.concatenate([np.zeros(0, np.bool_), *masks]))


def with_completions(prompts: Encoded | None, wholes: Sequence[Encoded]) -> Encoded:
    """Mark as trained what each whole has behind the ids that its prompt begins with, too.

    Where tokens merge over the edge, or a chat template renders a prompt alone otherwise, the completion
    begins at the first id that differs; of several completions of a prompt at the first of all.

    Args:
        prompts: the rows' prompts alone; None trains on everything.
        wholes: prompts with their completions; more than one make pairs.
    """
    if prompts is not None:
        edges = np.min([common_prefixes(prompts, whole) for whole in wholes], axis=0)
        wholes = [
            whole._replace(mask=_within(whole.lengths) >= np.repeat(edges, whole.lengths)) for whole in wholes
        ]
    return wholes[0] if len(wholes) == 1 else _side_by_side(wholes)


def common_prefixes(some: Encoded, others: Encoded) -> NDArray[np.int64]:
    """(rows,) how many ids two sequences have in common before the first that differs."""
    shared: NDArray[np.int64] = np.minimum(some.lengths, others.lengths).astype(np.int64)
    rows, within = np.repeat(np.arange(len(shared)), shared), _within(shared)
    differs = np.flatnonzero(
        some.ids[_starts(some.lengths)[rows] + within] != others.ids[_starts(others.lengths)[rows] + within]
    )
    found, first = np.unique(rows[differs], return_index=True)
    shared[found] = within[differs[first]]
    return shared


def _side_by_side(members: Sequence[Encoded]) -> Encoded:
    """Put the members of each row one behind the other."""
    lengths = np.stack([member.lengths for member in members], axis=1)
    # (rows · members,): where each piece begins in the members end to end
    sizes = [len(member.ids) for member in members]
    begin = np.stack(
        [_starts(member.lengths) + sum(sizes[:at]) for at, member in enumerate(members)], axis=1
    ).ravel()
    order = np.repeat(begin, lengths.ravel()) + _within(lengths.ravel())
    masks = [member.mask for member in members if member.mask is not None]
    return Encoded(
        np.concatenate([member.ids for member in members])[order],
        lengths,
        np.concatenate(masks)[order] if masks else None,
    )


def _starts(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


def _within(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """(tokens,) each token's place in its row."""
    places: NDArray[np.int64] = np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
    return places
