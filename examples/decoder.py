"""A small Llama-like decoder in plain torch whose rows may be packed, and shared by several ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from packer.runtime.sequence_parallel import UlyssesAttention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Shape of a decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    loss_chunk: int = 4096
    """Tokens whose logits exist at a time."""
    recompute: bool = False
    """Keep a layer's input only, and run the layer again in the backward."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        kv_size = config.num_kv_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        """(B, t, hidden) → (B, t, hidden), of the t positions that this rank holds."""
        # (B, t, heads·dim) -> (B, t, heads, dim)
        query, key, value = (
            of(x).view(*x.shape[:2], -1, self.head_dim) for of in (self.query, self.key, self.value)
        )
        attended = attend(rotate(query, cosine, sine), rotate(key, cosine, sine), value)
        return self.out(attended.flatten(2))


class Layer(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a way around it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        """(B, t, hidden) → (B, t, hidden)."""
        x = x + self.attention(self.attention_norm(x), cosine, sine, attend)
        hidden = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Decoder(nn.Module):
    """Embedding, layers, head and loss.

    ``model(batch)`` is the summed loss of this rank's tokens; a training loop divides by the step's tokens.
    """

    def __init__(self, config: DecoderConfig, attention: UlyssesAttention) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, batch: Mapping[str, Any], *, by_position: bool = False, **extra: Any) -> Tensor:
        """Sum of the losses of this rank's tokens, or (B, t) that of each position, 0 where none is.

        ``extra`` goes to the attention: a mask of the whole row, or its length where slices are ragged.
        """
        attend = partial(
            self.attention, cu_seqlens=batch.get("cu_seqlens"), max_seqlen=batch.get("max_seqlen"), **extra
        )
        x = self.embedding(batch["input_ids"])
        head_dim = self.config.hidden_size // self.config.num_heads
        cosine, sine = rotary(batch["position_ids"], head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            if self.config.recompute:
                x = checkpoint(layer, x, cosine, sine, attend, use_reentrant=False)
            else:
                x = layer(x, cosine, sine, attend)
        labels = shift_labels(batch)
        hidden = self.norm(x).flatten(0, 1)
        if by_position:
            return torch.cat(self._losses(hidden, labels.flatten(), "none")).view(labels.shape)
        return torch.stack(self._losses(hidden, labels.flatten(), "sum")).sum()

    def _losses(self, hidden: Tensor, labels: Tensor, reduction: str) -> list[Tensor]:
        chunks = zip(hidden.split(self.config.loss_chunk), labels.split(self.config.loss_chunk), strict=True)
        return [checkpoint(self._chunk_loss, *chunk, reduction, use_reentrant=False) for chunk in chunks]

    def _chunk_loss(self, hidden: Tensor, labels: Tensor, reduction: str) -> Tensor:
        logits = self.head(hidden)
        at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
        return functional.cross_entropy(
            logits.to(at_least_float32), labels, ignore_index=-100, reduction=reduction
        )


def shift_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """Labels of the next token. Slices of a row bring them along; a whole row is shifted here, once."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, t, 1, head_dim / 2) of the rotary angles at the positions."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = (positions[..., None].double() * theta**-steps)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of halves of (B, t, heads, dim) by its position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
