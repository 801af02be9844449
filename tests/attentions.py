"""Attention written out, with the parameters of the functions that training uses; any dtype, any device."""

from itertools import pairwise

import torch
from torch import Tensor


def segments_of(cu_seqlens: Tensor) -> Tensor:
    """(T,) the number of the segment of each position."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def reference(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, *, causal: bool = True
) -> Tensor:
    """Softmax over everything a query may see, written out: (B, T, H, D) in and out."""
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / query.shape[3] ** 0.5
    length = query.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
    if causal:
        seen = seen.tril()
    if cu_seqlens is not None:
        segments = segments_of(cu_seqlens)
        seen = seen & (segments[:, None] == segments[None, :])
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    """What torch's ``varlen_attn`` computes, with the parameters of the version without grouped heads."""
    assert query.shape[1] == key.shape[1]
    assert max_q >= int(cu_seq_q.diff().max())
    causal = window_size == (-1, 0)
    return _end_to_end(query, key, value, cu_seq_q, causal)


def flash_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
):
    """What ``flash_attn_varlen_func`` computes; some versions return statistics beside it."""
    return _end_to_end(q, k, v, cu_seqlens_q, causal), None


def flash(q, k, v, softmax_scale=None, causal=False):
    """What ``flash_attn_func`` computes."""
    return reference(q, k, v, None, causal=causal)


def of_ones_own(query, key, value):
    """Causal attention whose parameters tell nothing."""
    return reference(query, key, value, None)


def _end_to_end(query, key, value, cu_seqlens, causal):
    rows = [
        reference(query[None, a:b], key[None, a:b], value[None, a:b], None, causal=causal)[0]
        for a, b in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(rows)
