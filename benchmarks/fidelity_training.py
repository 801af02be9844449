"""Training, held-out loss and speed for ``fidelity_gpu.py``."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fidelity_data import Samples
from fidelity_steps import Composition
from gpu_decoder import Decoder, Shape
from torch import Tensor

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How every variant is trained."""

    shape: Shape
    dtype: torch.dtype
    learning_rate: float = 1e-3
    warm_up: float = 0.05
    """Share of the updates over which the rate rises; then it falls as a cosine."""
    timed_updates: int = 30


class Corpus:
    """All tokens on the device, and batches cut out of them."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.device = device
        self.seqlens = samples.seqlens.astype(np.int64)
        self._starts = samples.edges[:-1]
        self._tokens = torch.from_numpy(samples.tokens.astype(np.int32)).to(device)

    def packed(self, ids: np.ndarray) -> Batch:
        """``(1, T)``: the samples end to end, the first token of each not predicted."""
        lengths = self.seqlens[ids]
        edges = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)
        batch = self._batch(positions[None], np.repeat(self._starts[ids], lengths)[None], None)
        return batch | {
            "cu_seqlens": self._copy(edges.astype(np.int32)),
            "max_seqlen": int(lengths.max()),
        }

    def padded(self, ids: np.ndarray) -> Batch:
        """``(B, S)``: one sample a row, S a multiple of 8."""
        lengths = self.seqlens[ids]
        width = -(-int(lengths.max()) // 8) * 8
        positions = np.broadcast_to(np.arange(width), (len(ids), width))
        return self._batch(positions, self._starts[ids, None], positions < lengths[:, None])

    def num_loss_tokens(self, ids: np.ndarray) -> int:
        return int((self.seqlens[ids] - 1).sum())

    def _batch(self, positions: np.ndarray, starts: np.ndarray, is_real: np.ndarray | None) -> dict[str, Any]:
        index = starts + positions
        if is_real is not None:
            index = np.where(is_real, index, 0)
        ids = self._tokens[self._copy(index)].long()
        counts = positions > 0 if is_real is None else is_real & (positions > 0)
        labels = torch.where(self._copy(counts), ids, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": self._copy(positions)}

    def _copy(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


class Learner:
    """One model, trained on one composition."""

    def __init__(self, recipe: Recipe, corpus: Corpus, seed: int) -> None:
        self.recipe, self.corpus = recipe, corpus
        self.on_gpu = corpus.device.type == "cuda"
        torch.manual_seed(seed)
        with corpus.device:
            self.model = Decoder(recipe.shape, int(corpus.seqlens.max()) + 8).to(recipe.dtype)
        # Updates are smaller than what 16 bits tell apart, so the optimizer keeps the weights in 32.
        self._weights = list(self.model.parameters())
        self._masters = [weight.detach().float().clone().requires_grad_() for weight in self._weights]
        self.optimizer = torch.optim.AdamW(
            self._masters, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=self.on_gpu or None
        )

    def train(self, composition: Composition) -> float:
        """Take every step once; return the seconds.

        The samples of a step are computed end to end in one row. Its gradient is the sum of those of its
        micro-batches, so what is learnt depends on the composition of steps alone.
        """
        steps = [np.concatenate(step) for epoch in composition.epochs for step in epoch]
        # A copy waits for the kernels before it, so all are made ahead: 24 bytes a token.
        batches = [self.corpus.packed(ids) for ids in steps]
        start = time.perf_counter()
        for update, (batch, ids) in enumerate(zip(batches, steps, strict=True)):
            self._set_rate(update, len(steps))
            self._update([batch], self.corpus.num_loss_tokens(ids))
        self._wait()
        return time.perf_counter() - start

    def time_updates(self, composition: Composition) -> dict[str, float]:
        """Real tokens per second and peak memory on the variant's own micro-batches, which lie ready."""
        make = self.corpus.packed if composition.layout == "packed" else self.corpus.padded
        steps = composition.epochs[0]
        # From all over the epoch: megabatches go from long to short.
        spread = np.linspace(0, len(steps) - 1, min(self.recipe.timed_updates, len(steps)))
        chosen = [steps[number] for number in spread.astype(int)]
        batches = [[make(ids) for ids in step] for step in chosen]
        step_ids = [np.concatenate(step) for step in chosen]
        warm_up = min(5, len(chosen) - 1)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for number, (step, ids) in enumerate(zip(batches, step_ids, strict=True)):
            if number == warm_up:
                self._wait()
                start = time.perf_counter()
            self._update(step, self.corpus.num_loss_tokens(ids))
        self._wait()
        seconds = time.perf_counter() - start
        real = sum(int(self.corpus.seqlens[ids].sum()) for ids in step_ids[warm_up:])
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.on_gpu else 0.0
        return {"tokens_per_second": real / seconds, "peak_gigabytes": peak}

    @torch.no_grad()
    def evaluate(self, ids: np.ndarray, row_tokens: int) -> tuple[float, int]:
        """Sum of the losses of these samples, and how many tokens it counts."""
        sums = [self.model(self.corpus.packed(row)) for row in self._rows(ids, row_tokens)]
        return float(torch.stack(sums).double().sum()), self.corpus.num_loss_tokens(ids)

    def _rows(self, ids: np.ndarray, row_tokens: int) -> Iterator[np.ndarray]:
        row = (np.cumsum(self.corpus.seqlens[ids]) - 1) // row_tokens
        yield from (ids[row == number] for number in np.unique(row))

    def _update(self, batches: list[Batch], num_loss_tokens: int) -> None:
        for batch in batches:
            (self.model(batch) / num_loss_tokens).backward()
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)

    def _set_rate(self, update: int, num_updates: int) -> None:
        rising = (update + 1) / max(1, round(self.recipe.warm_up * num_updates))
        falling = (1 + math.cos(math.pi * update / num_updates)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * min(rising, falling)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def make_deterministic() -> None:
    """Let every kernel give the same bits each time; cuBLAS is told by the environment."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
