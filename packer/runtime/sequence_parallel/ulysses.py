"""Ulysses sequence parallelism for plain torch: exact attention over a row that several ranks share.

Every rank holds a slice of the row and all heads. Before attention one all-to-all gives each rank the whole
row and its share of the heads; after it a second one brings the slices back (Jacobs et al., arXiv
2309.14509). The backward of each exchange is the other one, so gradients are exact for any lengths of slices
and any division of heads: grouped key/value heads go to every rank whose query heads need them, and their
gradients are summed.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from packer.errors import ConfigError
from packer.runtime.sequence_parallel.attention import AttentionFunction, AxisOrder
from packer.runtime.sequence_parallel.shard import even_edges

HeadRanges = list[tuple[int, int]]
"""For each rank, its first head and the one after its last."""


class UlyssesAttention(torch.nn.Module):
    """An attention function made to work on slices of a row.

    The slices are contiguous and lie in the order of ranks (``shard="contiguous"``). With one rank, or no
    group, it is the plain attention function, called in the same way.

    Args:
        attention: ``scaled_dot_product_attention``, ``flex_attention``, ``varlen_attn``, ``flash_attn_func``,
            ``flash_attn_varlen_func``, a partial or a compiled form of these, or a function of one's own.
        group: The ranks that share a row: a process group, or the ``sp`` axis of a mesh.
        causal: Ask the function for causal attention. A mask decides for itself; a function that has no
            parameter for it is left alone.
        axis_order: ``bshd``, ``bhsd`` or ``thd``, for a function whose parameters do not give it away. Such a
            function gets grouped heads as they are.
    """

    def __init__(
        self,
        attention: Callable[..., Any],
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        causal: bool = True,
        axis_order: AxisOrder | None = None,
    ) -> None:
        super().__init__()
        self.attention = AttentionFunction.describe(attention, axis_order)
        self.module = attention if isinstance(attention, torch.nn.Module) else None
        self.causal = causal
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group
        self.sp_size = 1 if self.group is None else dist.get_world_size(self.group)
        self.sp_rank = 0 if self.group is None else dist.get_rank(self.group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None = None,
        row_length: int | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        """Attention of this rank's tokens to the whole row.

        Args:
            query: (B, t, H, D) of this rank's slice, positions already encoded.
            key: (B, t, KV, D), KV a divisor of H.
            value: (B, t, KV, Dv).
            cu_seqlens: Segment edges of the *whole* packed row, int32; None where every row is one sample.
                There is no default: forgetting it would let the samples of a packed row see each other.
            max_seqlen: Length of the packed row's longest segment.
            row_length: Positions of the whole row, where slices are ragged; else sp · t.
            **extra: Handed to the attention function: masks are of the whole row, nothing may be per head.

        Returns:
            (B, t, H, Dv).

        Raises:
            ConfigError: More ranks than heads, heads that do not group, dtypes that differ, a slice that is
                not this rank's share of ``row_length``, attention that cannot tell packed samples apart.
        """
        num_heads, num_kv_heads = query.shape[2], key.shape[2]
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"{num_heads} query heads do not group over {num_kv_heads} key/value heads; "
                "the model needs a multiple of them"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise ConfigError(
                f"query, key and value travel together, and are {query.dtype}, {key.dtype}, {value.dtype}; "
                "cast them to one dtype"
            )
        edges = self._edges(query.shape[1], row_length)
        # Whatever is to be refused is refused before the first exchange.
        arguments = self.attention.arguments(
            torch.Size((query.shape[0], edges[-1])),
            query.device,
            causal=self.causal,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            extra=extra,
        )
        if self.group is None or self.sp_size == 1:
            return self.attention(query, key, value, arguments)
        exchange = Exchange(self.group, self.sp_rank, edges)
        heads = query_heads(num_heads, self.sp_size)
        kv_heads = key_value_heads(heads, num_heads // num_kv_heads)
        query, key, value = _tokens_to_heads(exchange, (heads, kv_heads, kv_heads), query, key, value)
        repeats = head_repeats(heads[self.sp_rank], num_heads // num_kv_heads)
        key, value = (_repeat_heads(tensor, repeats) for tensor in (key, value))
        output = self.attention(query, key, value, arguments)
        return _heads_to_tokens(exchange, (heads,), output)[0]

    def _edges(self, local_length: int, row_length: int | None) -> list[int]:
        edges = even_edges(local_length * self.sp_size if row_length is None else row_length, self.sp_size)
        expected = edges[self.sp_rank + 1] - edges[self.sp_rank]
        if expected != local_length:
            raise ConfigError(
                f"rank {self.sp_rank} of {self.sp_size} holds {local_length:,} positions, and its slice of a "
                f"row of {edges[-1]:,} has {expected:,}; pass contiguous slices and "
                "row_length=batch.padded_seqlen"
            )
        return edges


def query_heads(num_heads: int, sp_size: int) -> HeadRanges:
    """Each rank's query heads, in runs that are equal or differ by one."""
    if sp_size > num_heads:
        raise ConfigError(
            f"{sp_size} sequence-parallel ranks cannot share {num_heads} heads; "
            f"take {num_heads} ranks at most"
        )
    return list(itertools.pairwise(even_edges(num_heads, sp_size)))


def key_value_heads(heads: HeadRanges, group_size: int) -> HeadRanges:
    """The key/value heads that each rank's query heads look at; several ranks may need the same one."""
    return [(first // group_size, (last - 1) // group_size + 1) for first, last in heads]


def head_repeats(heads: tuple[int, int], group_size: int) -> list[int]:
    """How many of a rank's query heads look at each of its key/value heads."""
    first, last = heads
    groups = range(first // group_size, (last - 1) // group_size + 1)
    return [min(last, (group + 1) * group_size) - max(first, group * group_size) for group in groups]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The two all-to-alls among the ranks that share a row, each the adjoint of the other.

    All tensors of a call travel as one message: a token's record holds its heads of each tensor in turn.
    """

    group: dist.ProcessGroup
    sp_rank: int
    edges: list[int]
    """(sp + 1,) where the ranks' slices of the row begin and end."""

    def tokens_to_heads(
        self, ranges: Sequence[HeadRanges], tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Slices with all heads ``(B, t, H, D)`` → whole rows with this rank's heads ``(B, T, h, D)``."""
        num_rows, local_length = tensors[0].shape[:2]
        records = self._records(ranges, tensors)
        outgoing, sent = _message(tensors[0], num_rows, [local_length] * len(records), records)
        for rank, part in enumerate(sent):
            for field, tensor, of in zip(_fields(part, records[rank]), tensors, ranges, strict=True):
                field.copy_(tensor[:, :, slice(*of[rank])])
        mine = records[self.sp_rank]
        incoming, received = _message(tensors[0], num_rows, self._lengths, [mine] * len(records))
        self._all_to_all(incoming, received, outgoing, sent)
        # One row's slices lie end to end as they came.
        rows = incoming.view(1, self.edges[-1], -1) if num_rows == 1 else torch.cat(received, dim=1)
        return _fields(rows, mine)

    def heads_to_tokens(
        self, ranges: Sequence[HeadRanges], tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Whole rows with this rank's heads ``(B, T, h, D)`` → slices with all heads ``(B, t, H, D)``.

        Heads that several ranks hold are summed, in float32 at least.
        """
        num_rows, local_length = tensors[0].shape[0], self._lengths[self.sp_rank]
        records = self._records(ranges, tensors)
        mine = records[self.sp_rank]
        outgoing, sent = _message(tensors[0], num_rows, self._lengths, [mine] * len(records))
        for (first, last), part in zip(itertools.pairwise(self.edges), sent, strict=True):
            for field, tensor in zip(_fields(part, mine), tensors, strict=True):
                field.copy_(tensor[:, first:last])
        incoming, received = _message(tensors[0], num_rows, [local_length] * len(records), records)
        self._all_to_all(incoming, received, outgoing, sent)
        fields = [_fields(part, record) for part, record in zip(received, records, strict=True)]
        return tuple(_merge([of_rank[index] for of_rank in fields], of) for index, of in enumerate(ranges))

    @property
    def _lengths(self) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self.edges)]

    def _records(self, ranges: Sequence[HeadRanges], tensors: Sequence[torch.Tensor]) -> list["Record"]:
        """For each rank, the shape (heads, head dimension) of each field of its record."""
        return [
            [(of[rank][1] - of[rank][0], tensor.shape[3]) for of, tensor in zip(ranges, tensors, strict=True)]
            for rank in range(len(self.edges) - 1)
        ]

    def _all_to_all(
        self,
        incoming: torch.Tensor,
        received: Sequence[torch.Tensor],
        outgoing: torch.Tensor,
        sent: Sequence[torch.Tensor],
    ) -> None:
        dist.all_to_all_single(
            incoming,
            outgoing,
            [part.numel() for part in received],
            [part.numel() for part in sent],
            group=self.group,
        )


Record = list[tuple[int, int]]
"""What one token carries to a rank: (heads, head dimension) of each tensor."""


def _message(
    like: torch.Tensor, num_rows: int, lengths: Sequence[int], records: Sequence[Record]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A flat buffer for all ranks, and each rank's part of it as ``(B, length, width)``."""
    shapes = [
        (num_rows, length, sum(heads * dim for heads, dim in record))
        for length, record in zip(lengths, records, strict=True)
    ]
    sizes = [num_rows * length * width for _, length, width in shapes]
    buffer = like.new_empty(sum(sizes))
    return buffer, [part.view(shape) for part, shape in zip(torch.split(buffer, sizes), shapes, strict=True)]


def _fields(records: torch.Tensor, record: Record) -> tuple[torch.Tensor, ...]:
    """Views ``(B, length, heads, head dimension)`` of the fields of records ``(B, length, width)``."""
    parts = torch.split(records, [heads * dim for heads, dim in record], dim=2)
    return tuple(part.view(*part.shape[:2], *shape) for part, shape in zip(parts, record, strict=True))


def _merge(parts: Sequence[torch.Tensor], ranges: HeadRanges) -> torch.Tensor:
    """One tensor of all heads from the ranks' shares of them; shares that overlap are summed."""
    if all(left[1] == right[0] for left, right in itertools.pairwise(ranges)):
        return torch.cat(list(parts), dim=2)
    num_rows, length, _, dim = parts[0].shape
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    merged = parts[0].new_zeros(num_rows, length, ranges[-1][1], dim, dtype=dtype)
    for part, (first, last) in zip(parts, ranges, strict=True):
        merged[:, :, first:last] += part
    return merged.to(parts[0].dtype)


def _repeat_heads(tensor: torch.Tensor, repeats: list[int]) -> torch.Tensor:
    """Repeat key/value heads where the query heads do not group over them evenly."""
    if len(set(repeats)) == 1:
        return tensor
    parts = [tensor[:, :, head : head + 1].expand(-1, -1, count, -1) for head, count in enumerate(repeats)]
    return torch.cat(parts, dim=2)


class _TokensToHeads(torch.autograd.Function):
    """``Exchange.tokens_to_heads``, and its adjoint as the backward."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, ranges: Sequence[HeadRanges], *tensors: torch.Tensor) -> Any:
        ctx.exchange, ctx.ranges = exchange, ranges
        return exchange.tokens_to_heads(ranges, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.exchange.heads_to_tokens(ctx.ranges, grads)


class _HeadsToTokens(torch.autograd.Function):
    """``Exchange.heads_to_tokens``, and its adjoint as the backward."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, ranges: Sequence[HeadRanges], *tensors: torch.Tensor) -> Any:
        ctx.exchange, ctx.ranges = exchange, ranges
        return exchange.heads_to_tokens(ranges, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.exchange.tokens_to_heads(ctx.ranges, grads)


_Exchanged = Callable[..., tuple[torch.Tensor, ...]]
_tokens_to_heads: _Exchanged = _TokensToHeads.apply
_heads_to_tokens: _Exchanged = _HeadsToTokens.apply
