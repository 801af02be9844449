"""The variants of ``train_gpu.py``, each with its batches."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from train_gpu_batches import (
    SourceTokens,
    Update,
    fixed_batches,
    grouped_batches,
    updates_of_lists,
    updates_of_plan,
)
from train_gpu_setting import Setting
from train_gpu_training import Trainer

import packer
from packer.runtime.batches.batch import Batch

LENGTHS = Path(__file__).parent / "data" / "azure_llm_2023_lengths.parquet"
NUM_HELD_OUT = 256


class Bench:
    """Data, plans and variants of one run."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        seqlens = pq.read_table(LENGTHS)["length"].to_numpy().astype(np.int64)
        seqlens = np.maximum(seqlens // setting.length_divisor, 2)
        if setting.device == "cpu":
            seqlens = seqlens[:2000]
        self.seqlens = seqlens
        self.longest = -(-int(seqlens.max()) // 8) * 8
        self.dataset = SourceTokens(
            seqlens, setting.shape.vocab_size, folder / "tokens.npy", setting.max_words
        )
        order = np.random.default_rng(0).permutation(len(seqlens))
        self.held_out, self.train = np.sort(order[:NUM_HELD_OUT]), np.sort(order[NUM_HELD_OUT:])
        self.plans = {
            "padded": self._plan(self.train, layout="padded", window=256),
            "packed": self._plan(self.train, layout="packed"),
            "held out": self._plan(self.held_out, layout="packed", remainder="keep"),
        }
        # Equal rows as long as the sample of the average token: the same attention per token.
        self.row = max(8, round(float((seqlens**2).sum() / seqlens.sum()) / 8) * 8)
        self.results: dict[str, dict[str, Any]] = {}
        self.largest = 0

    def _plan(self, ids: np.ndarray, **options: Any) -> packer.Plan:
        config = packer.PlanConfig(
            max_tokens=self.setting.max_tokens, pad_multiple=8, sample_ids=ids, **options
        )
        return packer.make_plan(self.seqlens, config)

    def variants(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return what is measured, in order; the largest batch that fits is found on the way."""
        target, early = self.setting.target_tokens, self.setting.early_tokens
        return {
            f"rows of {self.row}": lambda: self._run(self._rows(), target // 5),
            "packed": lambda: self._run(self._planned("packed"), early, target),
            "padded": lambda: self._run(self._planned("padded"), early, target),
            "grouped, largest": lambda: self._sized("grouped", self._largest(), early, target),
            "fixed, largest": lambda: self._sized("fixed", self._largest(), early),
            "loader alone, packed": lambda: self._loader_alone("packed"),
            "loader alone, padded": lambda: self._loader_alone("padded"),
        } | {
            f"fixed, {size}": lambda size=size: self._sized("fixed", size, target // 10)
            for size in self.setting.short_sizes
        }

    def _run(self, updates: Iterator[Update], *targets: int) -> dict[str, Any]:
        """Train until each of the targets in turn; speed is that of the last stretch."""
        trainer = self._trainer()
        if self.setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses, result, before = [], {}, 0
        for target in targets:
            warm_up = self.setting.warm_up_updates if not losses else 0
            result = trainer.train(updates, target - before, limit_s=105, warm_up=warm_up)
            losses.append(trainer.evaluate(self._loader("held out")))
            before += result["tokens"]
        early = {"early_loss": losses[0]} if targets[0] == self.setting.early_tokens else {}
        late = {"loss": losses[-1]} if targets[-1] == self.setting.target_tokens else {}
        return result | {"tokens": before} | early | late

    def _trainer(self) -> Trainer:
        gc.collect()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
        return Trainer(self.setting, self.longest)

    def _loader(self, name: str) -> packer.PlanLoader:
        return packer.PlanLoader(
            self.plans[name], self.dataset, device=self.setting.device, num_workers=self.setting.num_workers
        )

    def _planned(self, name: str) -> Iterator[Update]:
        return updates_of_plan(self._loader(name))

    def _sized(self, kind: str, size: int, *targets: int) -> dict[str, Any]:
        make = {
            "fixed": fixed_batches,
            "grouped": lambda ids, size: grouped_batches(ids, self.seqlens, size),
        }[kind]
        batches = make(self.train, size)
        padded = sum(size * int(self.seqlens[ids].max()) for ids in batches)
        updates = updates_of_lists(self.dataset, self.seqlens, batches, self.setting)
        result = self._run(updates, *targets)
        real = sum(int(self.seqlens[ids].sum()) for ids in batches)
        return result | {"samples": size, "padded_per_real": padded / real}

    def _largest(self) -> int:
        """Return the largest batch of which every one surely fits."""
        for size in self.setting.sizes if not self.largest else ():
            if not self._trainer().fits(size, self.longest):
                break
            self.largest = size
        return self.largest

    def _rows(self) -> Iterator[Update]:
        """Endless equal rows, already on the device."""
        count = self.setting.max_tokens // self.row
        tokens = np.load(self.dataset.path, mmap_mode="r")
        positions = torch.arange(self.row, device=self.setting.device).repeat(count, 1)
        for index in range(len(tokens) // (count * self.row)):
            part = tokens[index * count * self.row : (index + 1) * count * self.row]
            ids = torch.from_numpy(part.reshape(count, self.row).astype(np.int64)).to(self.setting.device)
            batch = Batch({"input_ids": ids, "labels": ids, "position_ids": positions})
            yield Update(count * self.row, count * (self.row - 1), count * self.row**2, [batch])

    def _loader_alone(self, name: str) -> dict[str, Any]:
        """Tokens per second onto the device where nothing is computed."""
        synchronize = torch.cuda.synchronize if self.setting.device == "cuda" else nullcontext
        tokens = 0
        start = None
        for number, batch in enumerate(self._loader(name).microbatches()):
            if number == 20:  # the workers have started
                synchronize()
                start = time.perf_counter()
            tokens += batch.num_tokens if start is not None else 0
            if number == 320:
                break
        synchronize()
        assert start is not None
        seconds = time.perf_counter() - start
        return {
            "tokens_per_second": tokens / seconds,
            "milliseconds_per_microbatch": seconds / (number - 19) * 1e3,
        }
