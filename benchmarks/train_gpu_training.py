"""One model of ``train_gpu.py``: trained, timed, evaluated."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gpu_decoder import Decoder
from train_gpu_batches import Update
from train_gpu_setting import Setting

import packer
from packer.runtime.batches.batch import Batch


class Trainer:
    """One model, trained on one kind of batches."""

    def __init__(self, setting: Setting, longest: int) -> None:
        self.setting = setting
        self.on_gpu = setting.device == "cuda"
        torch.manual_seed(0)
        with torch.device(setting.device):
            self.model = Decoder(setting.shape, longest).to(setting.dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=self.on_gpu or None
        )
        self.num_updates = 0
        self.waits: list[tuple[Any, Any]] = []
        self.done: list[Any] = []

    def train(
        self, updates: Iterator[Update], target_tokens: int, limit_s: float, *, warm_up: int
    ) -> dict[str, Any]:
        """Go on until so many tokens of these updates or seconds; speed is that after the warm-up."""
        seen = counted = squared = 0
        self.waits.clear()
        start = time.perf_counter()
        for number, update in enumerate(updates, start=1):
            self.num_updates += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 6e-4 * min(1.0, self.num_updates / 20)
            self._update(update)
            seen += update.num_tokens
            counted += update.num_tokens
            squared += update.squared_seqlens
            if number == warm_up:
                self._wait()
                self.waits.clear()
                counted = squared = 0
                start = time.perf_counter()
            is_late = number > warm_up and time.perf_counter() - start > limit_s
            if seen >= target_tokens or is_late:
                break
        self._wait()
        seconds = time.perf_counter() - start
        shape = self.setting.shape
        flops = shape.dense_flops(counted) + shape.attention_flops(squared)
        waited = sum(asked.elapsed_time(got) for asked, got in self.waits) / 1000 if self.on_gpu else 0.0
        return {
            "updates": self.num_updates,
            "tokens": seen,
            "tokens_per_second": counted / seconds,
            "teraflops": flops / seconds / 1e12,
            "attention_share_of_flops": shape.attention_flops(squared) / flops,
            "wait_share": waited / seconds,
            "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9 if self.on_gpu else 0.0,
            "reserved_gigabytes": torch.cuda.max_memory_reserved() / 1e9 if self.on_gpu else 0.0,
        }

    def _update(self, update: Update) -> None:
        for batch in self._timed(update.batches):
            (self.model(batch) / update.num_loss_tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.on_gpu:  # the host runs two updates ahead, not more
            self.done.append(torch.cuda.current_stream().record_event())
            if len(self.done) > 2:
                self.done.pop(0).synchronize()

    def _timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Note, on the GPU's own clock, how long it stood between the last kernel before a batch and the
        batch."""
        iterator = iter(batches)
        while True:
            asked, got = (
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                if self.on_gpu
                else (None, None)
            )
            if asked is not None:
                asked.record()
            batch = next(iterator, None)
            if batch is None:
                return
            if got is not None:
                got.record()
                self.waits.append((asked, got))
            yield batch

    @torch.no_grad()
    def evaluate(self, loader: packer.PlanLoader) -> float:
        """Mean loss per token of held-out samples."""
        sums = [(self.model(batch), batch.num_loss_tokens) for batch in loader.microbatches()]
        return float(torch.stack([loss for loss, _ in sums]).sum()) / sum(count for _, count in sums)

    def fits(self, size: int, longest: int) -> bool:
        """Whether a batch of so many of the longest samples trains without running out of memory."""
        ids = torch.zeros((size, longest), dtype=torch.long, device=self.setting.device)
        positions = torch.arange(longest, device=self.setting.device).repeat(size, 1)
        try:
            self.model({"input_ids": ids, "labels": ids, "position_ids": positions}).backward()
            self.optimizer.step()
            self._wait()
        except torch.OutOfMemoryError:
            return False
        return True

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
