"""Attention masks from what a batch knows, for models that need one.

Most do not: a causal kernel needs none for right-padded rows, since no real token sees the padding behind it,
and a variable-length kernel takes ``cu_seqlens``. True means that a query (second-last axis) sees a key (last
axis).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from packer.errors import ConfigError
from packer.runtime.batches.batch import Batch


def causal_mask(batch: Mapping[str, Any]) -> Tensor:
    """Return the dense causal mask of a padded batch, cut to each sample's length.

    A query of the padding sees the sample's tokens, as the last of them does: a row without any key would
    make the softmax NaN, which spreads in the backward. Its output goes nowhere.

    Args:
        batch: A padded batch.

    Returns:
        Bool ``(B, S, S)``; add an axis for the heads.

    Raises:
        ConfigError: The batch is packed.
    """
    if "attention_mask" not in batch:
        raise ConfigError("causal_mask is for padded batches; take block_diagonal_mask or flex_block_mask")
    is_token: Tensor = batch["attention_mask"].bool()
    length = is_token.shape[1]
    is_past = torch.ones((length, length), dtype=torch.bool, device=is_token.device).tril()
    return is_past & is_token[:, None, :]


def block_diagonal_mask(batch: Mapping[str, Any]) -> Tensor:
    """Return the dense mask of a packed batch: causal within each sample, nothing between samples.

    Args:
        batch: A packed batch; the whole row.

    Returns:
        Bool ``(1, T, T)``; add an axis for the heads.

    Raises:
        ConfigError: The batch is padded.
    """
    sample_of = _sample_of_position(batch)
    is_same = sample_of[:, None] == sample_of[None, :]
    return is_same.tril()[None]


def flex_block_mask(
    batch: Mapping[str, Any], *, block_size: int = 128, compile_mask: bool = False
) -> BlockMask:
    """Return the same mask for ``flex_attention``, which skips the blocks between the samples.

    Args:
        batch: A packed batch; the whole row.
        block_size: Of the kernel.
        compile_mask: Build it in a compiled function, which does not hold the dense mask.

    Raises:
        ConfigError: The batch is padded.
    """
    sample_of = _sample_of_position(batch)

    def sees(batch_index: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sample_of[query] == sample_of[key]) & (query >= key)

    length = len(sample_of)
    return create_block_mask(
        sees,
        None,
        None,
        length,
        length,
        device=sample_of.device,
        BLOCK_SIZE=block_size,
        _compile=compile_mask,
    )


def _sample_of_position(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of the sample that each position belongs to: (T,)."""
    if "cu_seqlens" not in batch:
        raise ConfigError("this mask tells packed samples apart, and the batch is padded; take causal_mask")
    edges = batch["cu_seqlens"]
    # The batch of a rank that holds a slice knows how long the row is.
    length = batch.padded_seqlen if isinstance(batch, Batch) else batch["input_ids"].shape[1]
    # Edges behind a position, by binary search: no length comes back from the device, so nothing waits for
    # it.
    positions = torch.arange(length, device=edges.device, dtype=edges.dtype)
    return torch.searchsorted(edges, positions, right=True)
