"""Sizes of a run of ``train_gpu.py``."""

from dataclasses import dataclass

import torch
from gpu_decoder import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of a run."""

    shape: Shape
    max_tokens: int
    length_divisor: int
    target_tokens: int
    early_tokens: int
    """Where the loss is compared with the batches that are too slow to reach ``target_tokens``."""
    max_words: int
    sizes: tuple[int, ...]
    """Numbers of samples to try for the largest that fits."""
    short_sizes: tuple[int, ...]
    warm_up_updates: int
    device: str
    dtype: torch.dtype
    num_workers: int


FULL = Setting(
    shape=Shape(),
    max_tokens=32_768,
    length_divisor=1,
    target_tokens=6_500_000,
    early_tokens=3_000_000,
    max_words=20_000_000,
    sizes=(8, 10, 12, 16, 20, 24),
    short_sizes=(4, 8),
    warm_up_updates=8,
    device="cuda",
    dtype=torch.bfloat16,
    num_workers=4,
)
TINY = Setting(
    shape=Shape(vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48),
    max_tokens=512,
    length_divisor=64,
    target_tokens=12_000,
    early_tokens=6_000,
    max_words=300_000,
    sizes=(2, 3),
    short_sizes=(2,),
    warm_up_updates=2,
    device="cpu",
    dtype=torch.float32,
    num_workers=1,
)
