"""One sequence-parallel rank's part of a micro-batch: geometry first, then only the tokens that are needed.

The whole row is never built. The order of operations on it is the one every rank would follow if it had it:
concatenate the samples, mask the first label of each, pad on the right, shift the labels once, restart the
positions in each sample, slice. Since the plan fixes every length, each rank can work out by itself which
tokens of which samples its slice holds, read those, and agree with its peers without a word.

``RowLayout`` says where the samples lie, ``rank_spans`` which positions of the row a rank holds, ``cut``
which tokens of which samples that is, ``read_shard`` fetches them. A micro-batch has B rows of S positions in
the padded layout, one row of T in the packed one; a rank's slice is ``(B, t)``, t = S/sp or T/sp.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from packer.errors import ConfigError, LengthMismatchError, PlanError

Shard = Literal["contiguous", "zigzag", "zigzag-samples"]
"""How positions go to ranks: one run each (Ulysses); or, for context parallelism, where causal attention should
cost each rank the same, chunks r and 2·sp − 1 − r of 2·sp chunks of the row, or of every sample of a packed row."""

IGNORE_INDEX = -100
"""The label that no loss looks at."""

_MADE_HERE = frozenset({"labels", "shift_labels", "position_ids", "attention_mask"})


class MapStyle(Protocol):
    """What the loader asks of a data set: ``dataset[sample_id]`` → mapping with ``input_ids``."""

    def __getitem__(self, sample_id: int, /) -> Mapping[str, Any]: ...


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
    """(k + 1,) segment edges within a row, 0 … ``row_length``: the samples with their own padding and, if there
    is any, the padding at the row's end as a segment of its own. In the padded layout a row is one segment."""
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


def slice_lengths(row_length: int, sp_size: int) -> list[int]:
    """Positions of each rank's contiguous slice: equal, or, where they do not divide, as equal as can be."""
    edges = [rank * row_length // sp_size for rank in range(sp_size + 1)]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def rank_spans(
    layout: RowLayout, sp_rank: int, sp_size: int, shard: Shard = "contiguous", *, ragged: bool = False
) -> NDArray[np.int64]:
    """Spans of row positions that one rank holds, in the order in which it holds them.

    Args:
        layout: Where the samples lie.
        sp_rank: This rank's place in its group.
        sp_size: Ranks that share the row.
        shard: ``contiguous``; ``zigzag``: torch's and Megatron's order for a row; ``zigzag-samples``:
            Megatron's order for packed rows, a chunk of the head and one of the tail, sample after sample.
        ragged: Let contiguous slices differ by one position where the row does not divide.

    Returns:
        (m, 2) int64: start and stop of each span; every row of the micro-batch is cut alike.

    Raises:
        PlanError: The row, or a segment of it, does not divide.
    """
    if shard == "contiguous":
        if layout.row_length % sp_size and not ragged:
            raise PlanError(_does_not_divide(layout.row_length, "row", sp_size, shard))
        edges = [rank * layout.row_length // sp_size for rank in (sp_rank, sp_rank + 1)]
        return np.array([edges], np.int64)
    bounds = layout.bounds if shard == "zigzag-samples" else np.array([0, layout.row_length], np.int64)
    lengths = np.diff(bounds)
    chunks, rest = np.divmod(lengths, 2 * sp_size)
    if rest.any():
        what = "segment" if shard == "zigzag-samples" else "row"
        raise PlanError(_does_not_divide(int(lengths[rest > 0][0]), what, sp_size, shard))
    # (k, 2 chunks): first positions of chunk r and chunk 2·sp − 1 − r of each segment
    heads = bounds[:-1, None] + chunks[:, None] * np.array([sp_rank, 2 * sp_size - 1 - sp_rank])
    # (k, 2 chunks, start|stop) -> (m, start|stop)
    return np.stack([heads, heads + chunks[:, None]], axis=-1).reshape(-1, 2)


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
    multiple = math.lcm(config.get("sp_size") or 1, config.get("pad_multiple") or 1)
    fixed_seqlen = config.get("fixed_seqlen")
    packed = config.get("layout") == "packed"
    parts = sp_size if shard == "contiguous" else 2 * sp_size
    if packed and shard == "zigzag-samples" and (config.get("pad_segments_to") or 1) % parts:
        raise PlanError(
            f"the plan pads samples to multiples of {config.get('pad_segments_to') or 1}, and "
            f"shard={shard!r} over {sp_size} ranks cuts each into {parts}; "
            f"plan again with --pad-segments-to {parts}"
        )
    if multiple % parts and (fixed_seqlen is None or fixed_seqlen % parts):
        cure = f"--sp-size {sp_size}" if shard == "contiguous" else f"--pad-multiple {parts}"
        cure += " and a --fixed-seqlen that divides" if fixed_seqlen is not None else ""
        raise PlanError(
            f"the plan's rows are multiples of {multiple}, and shard={shard!r} over {sp_size} ranks cuts "
            f"each into {parts}; plan again with {cure}"
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


def read_shard(
    dataset: MapStyle,
    sample_ids: NDArray[np.integer],
    layout: RowLayout,
    spans: NDArray[np.int64],
    *,
    starts: NDArray[np.integer] | None = None,
    is_filler: bool = False,
    pad_values: Mapping[str, float] | None = None,
) -> dict[str, torch.Tensor]:
    """This rank's slice of ``input_ids, position_ids, shift_labels`` and of further token-aligned fields.

    A data set with ``read_slice(sample_id, start, stop)`` (which stops at the sample's end, as slices do) is
    asked for the slice's tokens and the one after them, whose label belongs to the last of them; of any other,
    the samples that touch the slice are read whole. Fields that are not token-aligned have no slice and are
    left out.

    Args:
        dataset: The samples.
        sample_ids: (n,) ids, in the order of ``layout``.
        layout: Where the samples lie.
        spans: What ``rank_spans`` gave for this rank.
        starts: (n,) offset of each planned piece in its sample; None where no sample of the plan is cut.
        is_filler: All labels −100.
        pad_values: Field name → what padding holds; 0 where not named.

    Returns:
        Field name → ``(B, t, …)``; ids and labels int64. Where no sample has ``labels`` they are the ids.

    Raises:
        LengthMismatchError: A sample does not have the planned length.
    """
    pads = pad_values or {}
    pieces = cut(layout, spans)
    shape = (layout.num_rows, int((spans[:, 1] - spans[:, 0]).sum()))
    read = _Reader(dataset, sample_ids, layout.seqlens, starts, {piece.sample for piece in pieces})
    shift_labels = np.full(shape, IGNORE_INDEX, np.int64)
    buffers: dict[str, np.ndarray[Any, Any] | torch.Tensor] = {}
    # A slice of nothing but padding still has every field: an empty read tells dtypes and trailing shapes.
    for piece in pieces or [Piece(0, 0, 0, 0, 0)]:
        fields = read(piece)
        count = piece.stop - piece.start
        for name, values in fields.items():
            if name in _MADE_HERE:
                continue
            if name not in buffers:
                buffers[name] = _full(name, values, shape, pads.get(name, 0))
            buffers[name][piece.row, piece.offset : piece.offset + count] = values[:count]
        if not is_filler:
            labels = fields.get("labels", fields["input_ids"])[1 : count + 1]
            shift_labels[piece.row, piece.offset : piece.offset + len(labels)] = labels
    positions = np.tile(position_ids(layout, spans), (layout.num_rows, 1))
    tensors = {name: torch.as_tensor(buffer) for name, buffer in buffers.items()}
    return tensors | {
        "position_ids": torch.from_numpy(positions),
        "shift_labels": torch.from_numpy(shift_labels),
    }


class _Reader:
    """Token-aligned fields of a piece and, up to the sample's end, of the token after it."""

    def __init__(
        self,
        dataset: MapStyle,
        sample_ids: NDArray[np.integer],
        seqlens: NDArray[np.int64],
        starts: NDArray[np.integer] | None,
        touched: set[int],
    ) -> None:
        self._dataset = dataset
        self._sample_ids = sample_ids.tolist()
        self._seqlens = seqlens.tolist()
        self._starts = None if starts is None else starts.tolist()
        self._read_slice = getattr(dataset, "read_slice", None)
        self._whole: dict[int, Mapping[str, Any]] = {}
        if self._read_slice is None:
            wanted = sorted(touched) or [0]
            samples = _get_samples(dataset, [self._sample_ids[sample] for sample in wanted])
            self._whole = dict(zip(wanted, map(_token_aligned, samples), strict=True))

    def __call__(self, piece: Piece) -> dict[str, Any]:
        seqlen = self._seqlens[piece.sample]
        begin = 0 if self._starts is None else self._starts[piece.sample]
        # One token past the planned end tells a sample that has grown; a cut sample may well go on.
        ahead = 1 if piece.stop > piece.start and (self._starts is None or piece.stop < seqlen) else 0
        start, stop = begin + piece.start, begin + piece.stop + ahead
        if self._read_slice is not None:
            fields = self._read_slice(self._sample_ids[piece.sample], start, stop)
        else:
            fields = {name: values[start:stop] for name, values in self._whole[piece.sample].items()}
        found = len(fields["input_ids"])
        if found != min(piece.stop + ahead, seqlen) - piece.start:
            self._refuse(piece.sample)
        return {name: _as_array(values) for name, values in fields.items()}

    def _refuse(self, sample: int) -> None:
        sample_id, planned = self._sample_ids[sample], self._seqlens[sample]
        found = len(self._dataset[sample_id]["input_ids"])
        raise LengthMismatchError(
            f"sample {sample_id} has {found:,} tokens, and the plan was made for {planned:,}"
            + ("" if self._starts is None else f" from token {self._starts[sample]:,} on")
            + "; the data set, its order or its tokenizer is not the one that was analyzed: "
            "analyze and plan again, or train on that data set"
        )


def _get_samples(dataset: MapStyle, sample_ids: Sequence[int]) -> Iterable[Mapping[str, Any]]:
    get_many = getattr(dataset, "__getitems__", None)
    if get_many is None:
        return [dataset[sample_id] for sample_id in sample_ids]
    samples: Iterable[Mapping[str, Any]] = get_many(list(sample_ids))
    return samples


def _token_aligned(sample: Mapping[str, Any]) -> dict[str, Any]:
    num_tokens = len(sample["input_ids"])
    fields = {
        name: _as_array(values) for name, values in sample.items() if not isinstance(values, str | bytes)
    }
    return {name: values for name, values in fields.items() if values.ndim and len(values) == num_tokens}


def _as_array(values: Any) -> Any:
    return values if isinstance(values, torch.Tensor) else np.asarray(values)


def _full(name: str, values: Any, shape: tuple[int, ...], fill: float) -> Any:
    """A buffer of padding for one field, of the samples' kind, dtype and trailing shape; ids are int64."""
    shape = (*shape, *values.shape[1:])
    if name == "input_ids":
        return np.full(shape, fill, np.int64)
    if isinstance(values, torch.Tensor):
        return torch.full(shape, fill, dtype=values.dtype)
    return np.full(shape, fill, values.dtype)


def _does_not_divide(length: int, what: str, sp_size: int, shard: Shard) -> str:
    parts = sp_size if shard == "contiguous" else 2 * sp_size
    cures = {
        "contiguous": f"--sp-size {sp_size}",
        "zigzag": f"--pad-multiple {parts}",
        "zigzag-samples": f"--pad-segments-to {parts}",
    }
    return (
        f"a {what} of {length:,} positions does not divide into {parts} for shard={shard!r} over "
        f"{sp_size} ranks; plan again with {cures[shard]}"
    )
