"""How an attention function is called: axis order, causality, grouped heads, how it tells packed rows apart.

All of it is read off the function's own parameters, so one description serves
``scaled_dot_product_attention``, ``flex_attention`` (compiled or not), torch's ``varlen_attn`` in each of its
versions, FlashAttention 2 and 3, and whatever has parameters of the same names.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from packer.errors import ConfigError

AxisOrder = Literal["bshd", "bhsd", "thd"]
"""Batch, sequence, heads, head dimension; heads before the sequence; or rows end to end, without a batch."""

_SDPA_PARAMETERS = frozenset({"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"})
_EDGES_AND_LONGEST = (
    ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    ("cu_seq_q", "cu_seq_k", "max_q", "max_k"),
)
_MASKS = ("block_mask", "attn_mask")


@dataclass(frozen=True, slots=True)
class AttentionFunction:
    """An attention function and how to call it on queries, keys and values ``(B, T, H, D)``."""

    function: Callable[..., Any]
    name: str
    """What messages call it."""
    axis_order: AxisOrder
    parameters: frozenset[str]
    bound: Mapping[str, Any]
    """Keyword arguments that a ``functools.partial`` has settled."""
    takes_groups: bool
    """Accepts fewer key/value heads than query heads."""

    @classmethod
    def describe(
        cls, function: Callable[..., Any], axis_order: AxisOrder | None = None
    ) -> "AttentionFunction":
        """Read off a function's parameters how to call it.

        Args:
            function: ``function(query, key, value, …)``, a module, or a partial of one.
            axis_order: For a function whose parameters do not give it away.

        Raises:
            ConfigError: The axis order is not known.
        """
        inner, bound = function, dict[str, Any]()
        while isinstance(inner, functools.partial):
            bound = inner.keywords | bound
            inner = inner.func
        name = getattr(inner, "__name__", type(inner).__name__)
        parameters = _parameters(inner)
        order = axis_order or _axis_order(parameters)
        if order is None:
            raise ConfigError(
                f"the parameters of {name} do not tell the order of its axes; pass axis_order: "
                "'bshd', 'bhsd', or 'thd' for rows end to end"
            )
        if order == "thd" and not any(names[0] in parameters for names in _EDGES_AND_LONGEST):
            raise ConfigError(
                f"{name} takes rows end to end (axis_order='thd') but neither cu_seqlens_q nor cu_seq_q, "
                "so it cannot tell them apart; give it one of these parameters"
            )
        return cls(
            function=function,
            name=name,
            axis_order=order,
            parameters=parameters,
            bound=bound,
            takes_groups=axis_order is not None or not parameters.isdisjoint({"enable_gqa", "softmax_scale"}),
        )

    def arguments(
        self,
        rows: torch.Size,
        device: torch.device,
        *,
        causal: bool,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        extra: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Keyword arguments for one call, checked before anything is sent or computed.

        Args:
            rows: (B, T) of the whole micro-batch.
            device: Where the attention runs.
            causal: Ask for causal attention, by whatever name the function has for it.
            cu_seqlens: Segment edges of a packed row, int32; None for rows of one sample each.
            max_seqlen: Length of the longest segment of a packed row.
            extra: What the caller gives the function, as it is.

        Raises:
            ConfigError: Nothing would tell the samples of a packed row apart, or hide the future.
        """
        given = {**self.bound, **extra}
        has_mask = any(given.get(mask) is not None for mask in _MASKS if mask in self.parameters)
        arguments = dict(extra)
        if self.axis_order == "thd":
            arguments |= self._edges_and_longest(rows, device, cu_seqlens, max_seqlen)
        elif cu_seqlens is not None and not has_mask:
            masks = [f"pass it a {mask} of the whole row, or " for mask in _MASKS if mask in self.parameters]
            raise ConfigError(
                f"{self.name} cannot tell the samples of a packed row apart, they would see each other; "
                f"{''.join(masks)}take torch's varlen_attn, flash_attn_varlen_func, flex_attention with a "
                "block_mask, or a padded plan"
            )
        if causal and not has_mask:
            if "block_mask" in self.parameters:
                raise ConfigError(
                    f"{self.name} is causal through its block_mask alone; pass one of the whole row, "
                    "or causal=False"
                )
            for name, value in (("is_causal", True), ("causal", True), ("window_size", (-1, 0))):
                if name in self.parameters:
                    arguments |= {} if name in given else {name: value}
                    break
        return arguments

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Mapping[str, Any]
    ) -> torch.Tensor:
        """Attention over whole rows: (B, T, H, D), twice (B, T, KV, D) → (B, T, H, Dv)."""
        group_size = query.shape[2] // key.shape[2]
        if group_size > 1 and not self.takes_groups:
            key, value = (tensor.repeat_interleave(group_size, dim=2) for tensor in (key, value))
        elif group_size > 1 and "enable_gqa" in self.parameters:
            arguments = {"enable_gqa": True, **arguments}
        tensors = (query, key, value)
        if self.axis_order == "thd":
            result = _tensor(self.function(*(tensor.flatten(0, 1) for tensor in tensors), **arguments))
            return result.view(*query.shape[:2], *result.shape[1:])
        if self.axis_order == "bhsd":
            return _tensor(self.function(*(x.transpose(1, 2) for x in tensors), **arguments)).transpose(1, 2)
        return _tensor(self.function(*tensors, **arguments))

    def _edges_and_longest(
        self, rows: torch.Size, device: torch.device, cu_seqlens: torch.Tensor | None, max_seqlen: int | None
    ) -> dict[str, Any]:
        num_rows, row_length = rows
        if cu_seqlens is None:
            cu_seqlens = row_length * torch.arange(num_rows + 1, dtype=torch.int32, device=device)
            max_seqlen = row_length
        elif num_rows != 1:
            raise ConfigError(
                f"cu_seqlens tells one packed row's samples apart, and there are {num_rows} rows; "
                "pass None for padded rows"
            )
        elif max_seqlen is None:
            raise ConfigError(f"{self.name} needs the longest segment of a packed row; pass max_seqlen")
        names = next(names for names in _EDGES_AND_LONGEST if names[0] in self.parameters)
        return dict(zip(names, (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), strict=True))


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    if function is torch.nn.functional.scaled_dot_product_attention:
        return _SDPA_PARAMETERS
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset()
    return frozenset(signature.parameters)


def _axis_order(parameters: frozenset[str]) -> AxisOrder | None:
    if any(names[0] in parameters for names in _EDGES_AND_LONGEST):
        return "thd"
    if any(mask in parameters for mask in _MASKS):
        return "bhsd"
    if {"softmax_scale", "causal"} <= parameters:
        return "bshd"
    return None


def _tensor(output: Any) -> torch.Tensor:
    """The attention itself, where the function also returns statistics."""
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result
