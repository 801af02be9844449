"""Where a micro-batch's samples lie in its rows, and which of their tokens one sequence-parallel rank holds.

The whole row is never built. The order of operations on it is the one every rank would follow if it had it:
concatenate the samples, mask the first label of each, pad on the right, shift the labels once, restart the
positions in each sample, slice. Since the plan fixes every length, each rank can work out by itself which
tokens of which samples its slice holds, read those, and agree with its peers without a word.

``RowLayout`` says where the samples lie, ``rank_spans`` which positions of the row a rank holds, ``cut``
which tokens of which samples that is; ``slices.read_shard`` fetches them. A micro-batch has B rows of S
positions in the padded layout, one row of T in the packed one; a slice is ``(B, S/sp)`` or ``(1, T/sp)``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from packer.errors import ConfigError, PlanError

Shard = Literal["contiguous", "zigzag", "zigzag-samples", "zigzag-samples-torch"]
"""How positions go to ranks: one run each (Ulysses); or, so that causal attention costs every rank the same
(context parallelism), chunks r and 2·sp − 1 − r of 2·sp chunks: of the row (torch and Megatron alike), or of
each sample of a packed row (Megatron; torch's order per document pairs the same chunks, then cuts in runs).
"""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where n samples lie in the rows of a micro-batch; made by ``padded`` or ``packed``."""

    seqlens: NDArray[np.int64]
    """(n,) tokens of each sample."""
    rows: NDArray[np.int64]
    """(n,) the row that holds it."""
    starts: NDArray[np.int64]
    """(n,) the position of its first token in that row."""
    bounds: NDArray[np.int64]
    """(k + 1,) segment edges within a row, 0 … ``row_length``: the samples with their own padding and, where
    there is any, the row's padding as a segment of its own. In the padded layout a row is one segment."""
    num_rows: int
    """B."""
    row_length: int
    """S, or T."""

    @classmethod
    def padded(cls, seqlens: NDArray[np.integer], padded_seqlen: int) -> "RowLayout":
        """One sample a row, each row ``padded_seqlen`` long."""
        n = len(seqlens)
        return cls(
            seqlens=seqlens.astype(np.int64),
            rows=np.arange(n),
            starts=np.zeros(n, np.int64),
            bounds=np.array([0, padded_seqlen], np.int64),
            num_rows=n,
            row_length=padded_seqlen,
        )

    @classmethod
    def packed(
        cls, seqlens: NDArray[np.integer], padded_seqlen: int, pad_segments_to: int = 1
    ) -> "RowLayout":
        """One row of ``padded_seqlen``, samples end to end, each rounded up to ``pad_segments_to``."""
        lengths = seqlens.astype(np.int64)
        # (n + 1,): edges of the samples, each with its own padding
        edges = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(-(-lengths // pad_segments_to) * pad_segments_to, out=edges[1:])
        if edges[-1] > padded_seqlen:
            raise PlanError(
                f"samples of {lengths.sum():,} tokens, padded to multiples of {pad_segments_to}, take "
                f"{edges[-1]:,} positions of a row of {padded_seqlen:,}; the plan was made with another "
                "--pad-segments-to"
            )
        return cls(
            seqlens=lengths,
            rows=np.zeros(len(lengths), np.int64),
            starts=edges[:-1],
            bounds=np.append(edges, padded_seqlen) if edges[-1] < padded_seqlen else edges,
            num_rows=1,
            row_length=padded_seqlen,
        )

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """(k + 1,) int32 segment edges of the whole row: what varlen attention kernels take."""
        return self.bounds.astype(np.int32)

    @property
    def max_segment(self) -> int:
        """Length of the longest segment, padding included: the ``max_seqlen`` of varlen attention kernels."""
        return int(np.diff(self.bounds).max())


class Piece(NamedTuple):
    """Tokens ``start:stop`` of one sample, and where they go in a rank's slice."""

    sample: int
    """Index of the sample in the micro-batch."""
    row: int
    offset: int
    """Position in the slice's row."""
    start: int
    stop: int


def even_edges(total: int, parts: int) -> list[int]:
    """(parts + 1,) edges of ``total`` things dealt out in runs that are equal, or differ by one."""
    return [part * total // parts for part in range(parts + 1)]


def rank_spans(
    layout: RowLayout, sp_rank: int, sp_size: int, shard: Shard = "contiguous", *, ragged: bool = False
) -> NDArray[np.int64]:
    """Spans of row positions that one rank holds, in the order in which it holds them.

    Args:
        layout: Where the samples lie.
        sp_rank: This rank's place in its group.
        sp_size: Ranks that share the row.
        shard: ``contiguous``; ``zigzag``: a chunk of the row's head and its mirror image at the tail;
            ``zigzag-samples``: the same for each sample, one sample after the other, as Megatron has it for
            packed rows; ``zigzag-samples-torch``: torch's per-document order of the row, cut in equal runs.
        ragged: Let contiguous slices differ by one position where the row does not divide.

    Returns:
        (m, 2) int64: start and stop of each span; every row of the micro-batch is cut alike.

    Raises:
        PlanError: The row, or a segment of it, does not divide.
    """
    if shard == "contiguous":
        if layout.row_length % sp_size and not ragged:
            raise PlanError(
                _does_not_divide("the rows", layout.row_length, sp_size, shard) + _cure(sp_size, shard)
            )
        edges = even_edges(layout.row_length, sp_size)
        return np.array([edges[sp_rank : sp_rank + 2]], np.int64)
    bounds = np.array([0, layout.row_length], np.int64) if shard == "zigzag" else layout.bounds
    lengths: NDArray[np.int64] = np.diff(bounds)
    chunks, rest = np.divmod(lengths, 2 * sp_size)
    if rest.any():
        what = "the rows" if shard == "zigzag" else "the padded samples"
        length = int(lengths[rest > 0][0])
        raise PlanError(_does_not_divide(what, length, sp_size, shard) + _cure(sp_size, shard))
    ranks = np.arange(sp_size)
    # (sp, 2): chunk r and chunk 2·sp − 1 − r
    pairs = np.stack([ranks, 2 * sp_size - 1 - ranks], axis=1)
    # (k segments, sp, 2 chunks): the first position of each
    heads = bounds[:-1, None, None] + chunks[:, None, None] * pairs
    # (k, sp, 2, start|stop)
    spans: NDArray[np.int64] = np.stack([heads, heads + chunks[:, None, None]], axis=-1)
    if shard == "zigzag-samples-torch":
        run = layout.row_length // sp_size
        return _run_of_spans(spans.reshape(-1, 2), sp_rank * run, (sp_rank + 1) * run)
    return spans[:, sp_rank].reshape(-1, 2)


def require_divisible(
    config: Mapping[str, Any], sp_size: int, shard: Shard = "contiguous", *, ragged: bool = False
) -> None:
    """Refuse a plan whose rows are not sure to divide among ``sp_size`` ranks, before the first is read.

    Args:
        config: The plan's configuration: ``sp_size, pad_multiple, pad_segments_to, fixed_seqlen, layout``.
        sp_size: Ranks that share a row.
        shard: How the row is cut.
        ragged: Contiguous slices need not be equal.

    Raises:
        ConfigError: ``shard`` is not known, or ``ragged`` is asked of a zigzag.
        PlanError: Names the option of ``packer plan`` that would make the rows divide.
    """
    if shard not in get_args(Shard):
        raise ConfigError(f"shard={shard!r} is not known; choose one of {', '.join(get_args(Shard))}")
    if ragged and shard != "contiguous":
        raise ConfigError(f"ragged slices are contiguous; shard={shard!r} needs rows that divide")
    if sp_size == 1 or ragged:
        return
    segment = (config.get("pad_segments_to") or 1) if config.get("layout") == "packed" else 1
    parts = sp_size if shard == "contiguous" else 2 * sp_size
    if config.get("layout") == "packed" and shard.startswith("zigzag-samples") and segment % parts:
        raise PlanError(
            _does_not_divide("the multiples that samples are padded to", segment, sp_size, shard)
            + f"plan again with --pad-segments-to {parts}"
        )
    if fixed_seqlen := config.get("fixed_seqlen"):
        if fixed_seqlen % parts:
            raise PlanError(
                _does_not_divide("the rows", fixed_seqlen, sp_size, shard)
                + f"plan again with a --fixed-seqlen that {parts} divides"
            )
        return
    multiple = math.lcm(config.get("sp_size") or 1, config.get("pad_multiple") or 1)
    # Samples end to end, each a multiple of the row's own: the row is a multiple of theirs.
    if segment % multiple == 0 and not config.get("num_shapes"):
        multiple = segment
    if multiple % parts:
        raise PlanError(
            _does_not_divide("the multiples that rows are padded to", multiple, sp_size, shard)
            + _cure(sp_size, shard)
        )


def cut(layout: RowLayout, spans: NDArray[np.int64]) -> list[Piece]:
    """The samples' tokens that lie in the spans, in the slice's order; what no piece covers is padding."""
    pieces = []
    offset = 0
    stops = layout.starts + layout.seqlens
    for first, last in spans.tolist():
        starts_in = np.maximum(layout.starts, first)
        stops_in = np.minimum(stops, last)
        for sample in np.flatnonzero(starts_in < stops_in).tolist():
            start, origin = int(starts_in[sample]), int(layout.starts[sample])
            pieces.append(
                Piece(
                    sample=sample,
                    row=int(layout.rows[sample]),
                    offset=offset + start - first,
                    start=start - origin,
                    stop=int(stops_in[sample]) - origin,
                )
            )
        offset += last - first
    return pieces


def position_ids(layout: RowLayout, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """(t,) positions that restart at 0 in each segment of the row, for the positions in the spans."""
    parts = []
    for first, last in spans.tolist():
        edges = np.clip(layout.bounds, first, last)
        parts.append(np.arange(first, last) - np.repeat(layout.bounds[:-1], np.diff(edges)))
    return np.concatenate(parts)


def _run_of_spans(spans: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    """Positions ``first:last`` of the spans laid end to end, as spans."""
    edges = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
    # (m, 2): how much of each span's front and back lies outside
    kept: NDArray[np.int64] = (
        np.clip(np.stack([edges[:-1], edges[1:]], axis=1), first, last) - edges[:-1, None] + spans[:, :1]
    )
    return kept[kept[:, 0] < kept[:, 1]]


def _does_not_divide(what: str, length: int, sp_size: int, shard: Shard) -> str:
    parts = sp_size if shard == "contiguous" else 2 * sp_size
    return (
        f"shard={shard!r} over {sp_size} ranks cuts into {parts} parts, which do not divide {what} "
        f"({length:,} positions); "
    )


def _cure(sp_size: int, shard: Shard) -> str:
    if shard == "contiguous":
        return f"plan again with --sp-size {sp_size}, or take ragged slices if the attention can"
    if shard == "zigzag":
        return f"plan again with --pad-multiple {2 * sp_size}"
    return f"plan again with --pad-segments-to {2 * sp_size} --pad-multiple {2 * sp_size}"
