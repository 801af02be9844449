"""A decoder that keeps little for the backward: what ``train_gpu.py`` and ``fidelity_gpu.py`` train.

Padded batches go through torch's causal FlashAttention, packed ones through its variable-length form: the
same kernels, so that a difference in speed comes from the batches.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    vocab_size: int = 32_000
    hidden_size: int = 1024
    num_layers: int = 24
    num_heads: int = 8
    intermediate_size: int = 2816

    def attention_flops(self, seqlens_squared: float) -> float:
        """Forward and backward of causal attention over samples with this sum of squared lengths."""
        # Two products of 2·L²·hidden forward, twice that backward, half of it below the diagonal.
        return self.num_layers * 3 * 2 * 2 * self.hidden_size * seqlens_squared / 2

    def dense_flops(self, num_tokens: float) -> float:
        """Forward and backward of everything else: six operations a weight and token."""
        per_layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size
        return 6 * num_tokens * (self.num_layers * per_layer + self.vocab_size * self.hidden_size)


class Decoder(nn.Module):
    """``model(batch)`` is the summed loss of the batch."""

    def __init__(self, shape: Shape, max_seqlen: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        head_dim = shape.hidden_size // shape.num_heads
        angles = torch.outer(torch.arange(max_seqlen), 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        positions = batch["position_ids"]
        # (B, S, 1, head_dim / 2)
        cosine, sine = self.cosine[positions][:, :, None], self.sine[positions][:, :, None]
        x = self.embedding(batch["input_ids"])
        branch = torch.zeros_like(x)
        for layer in self.layers:
            x, branch = layer(x, branch, cosine, sine, batch)
        _, normed = AddNorm.apply(x, branch, self.norm)
        labels = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return LinearCrossEntropy.apply(normed.flatten(0, 1), self.head.weight, labels.flatten())


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.query_key_value = nn.Linear(shape.hidden_size, 3 * shape.hidden_size, bias=False)
        self.out = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(
        self, x: Tensor, branch: Tensor, cosine: Tensor, sine: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Take and return the stream, and the last branch, which is yet to be added to it."""
        rows, length, hidden = x.shape
        x, normed = AddNorm.apply(x, branch, self.attention_norm)
        # (B, S, 3·hidden) -> 3 × (B, S, heads, head_dim)
        projected = self.query_key_value(normed).view(rows, length, 3, self.num_heads, -1)
        query, key, value = Rotary.apply(projected, cosine, sine).unbind(2)
        attended = attend(query, key, value, batch).reshape(rows, length, hidden)
        x, normed = AddNorm.apply(x, self.out(attended), self.mlp_norm)
        return x, self.down(SwiGLU.apply(self.gate_up(normed)))


_VARLEN_CAUSAL: dict[str, Any] = (
    {"is_causal": True}
    if "is_causal" in inspect.signature(varlen_attn).parameters
    else {"window_size": (-1, 0)}
)


def attend(query: Tensor, key: Tensor, value: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """(B, S, heads, head_dim) of each; causal, within samples where the batch is packed."""
    edges = batch.get("cu_seqlens")
    if edges is None:
        return _attend_rows(query, key, value)
    if not query.is_cuda:  # torch has no kernel for it there
        lengths = edges.diff().tolist()
        samples = zip(*(tensor.split(lengths, dim=1) for tensor in (query, key, value)), strict=True)
        # edges of one length have segments of no token at their end
        attended = [_attend_rows(*sample) for sample, length in zip(samples, lengths, strict=True) if length]
        return torch.cat(attended, dim=1)
    longest = batch["max_seqlen"]
    return varlen_attn(query[0], key[0], value[0], edges, edges, longest, longest, **_VARLEN_CAUSAL)[None]


def _attend_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *([] if query.is_cuda else [SDPBackend.MATH])]):
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def _rotate(projected: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    # queries and keys: (B, S, 2, heads, head_dim), halves turned against each other
    first, second = projected[:, :, :2].float().chunk(2, dim=-1)
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    # Values are copied along: a view of them would keep the unturned queries and keys alive.
    return torch.cat([turned.to(projected.dtype), projected[:, :, 2:]], dim=2)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _swiglu_back(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate, up = (tensor.float() for tensor in gate_up.chunk(2, dim=-1))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad = grad.float()
    return torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], dim=-1).to(gate_up.dtype)


def _add_norm(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x + branch
    scale = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-6)
    return total, (total.float() * scale * weight.float()).to(x.dtype), scale


def _add_norm_back(
    total: Tensor, scale: Tensor, weight: Tensor, grad_total: Tensor, grad_normed: Tensor
) -> tuple[Tensor, Tensor]:
    direction = total.float() * scale
    grad = grad_normed.float() * weight.float()
    grad_x = scale * (grad - direction * (grad * direction).mean(-1, keepdim=True)) + grad_total.float()
    grad_weight = (grad_normed.float() * direction).flatten(0, -2).sum(0)
    return grad_x.to(total.dtype), grad_weight.to(weight.dtype)


class AddNorm(torch.autograd.Function):
    """Adds a branch to the stream and normalises the sum by its root mean square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total, normed, scale = pointwise("add_norm", _add_norm)(x, branch, weight)
        ctx.save_for_backward(total, scale, weight)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grads = pointwise("add_norm_back", _add_norm_back)(*ctx.saved_tensors, grad_total, grad_normed)
        return grads[0], grads[0], grads[1]


class Rotary(torch.autograd.Function):
    """Turns queries and keys by their positions; keeps only the angles."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return pointwise("rotate", _rotate)(projected, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return pointwise("rotate", _rotate)(grad, cosine, -sine), None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up; keeps only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return pointwise("swiglu", _swiglu)(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return pointwise("swiglu_back", _swiglu_back)(*ctx.saved_tensors, grad)


_POINTWISE: dict[str, Any] = {}
FUSE = True
"""Compile the functions that only move memory; matrix products and attention stay as they are."""


def pointwise(name: str, function: Any, *, dynamic: bool | None = True) -> Any:
    if not FUSE:
        return function
    if name not in _POINTWISE:
        _POINTWISE[name] = torch.compile(function, dynamic=dynamic)
    return _POINTWISE[name]


class LinearCrossEntropy(torch.autograd.Function):
    """Summed loss of a linear head, some thousand tokens at a time; logits never exist all at once.

    The gradient is made beside the loss, while the logits are there.
    """

    CHUNK = 8192

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(labels), LinearCrossEntropy.CHUNK):
            part = slice(start, start + LinearCrossEntropy.CHUNK)
            loss, grad_logits = pointwise("softmax_loss", _softmax_loss)(
                hidden[part] @ weight.T, labels[part]
            )
            total += loss
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            grad_weight += grad_logits.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (grad_hidden * grad).to(grad_hidden.dtype), (grad_weight * grad).to(grad_weight.dtype), None


def _softmax_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss (), and its gradient by the logits, of the logits' dtype."""
    counts = labels != -100
    target = torch.where(counts, labels, 0)[:, None]
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    loss = -(log_softmax.gather(1, target)[:, 0] * counts).sum()
    grad = log_softmax.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == target
    return loss, ((grad - is_target.float()) * counts[:, None]).to(logits.dtype)
