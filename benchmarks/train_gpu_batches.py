"""What ``train_gpu.py`` trains on: real text in samples of given lengths, and updates made of them."""

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from train_gpu_setting import Setting

import packer
from packer.runtime.batches.batch import Batch
from packer.runtime.batches.collate import Collator, PlannedShape
from packer.runtime.batches.fields import Fields
from packer.runtime.loader.device import to_device
from packer.runtime.loader.progress import Place, Read


class Update(NamedTuple):
    """The micro-batches of one optimizer update."""

    num_tokens: int
    num_loss_tokens: int
    squared_seqlens: int
    """Sum of the samples' squared lengths: what attention costs."""
    batches: Iterable[Batch]


class SourceTokens:
    """Samples of given lengths, end to end in the Python sources installed here: real text, a word a
    token."""

    WORD = re.compile(rb"[A-Za-z]+|[0-9]|[ ]+|[^A-Za-z0-9 ]")

    def __init__(self, seqlens: np.ndarray, vocab_size: int, path: Path, max_words: int) -> None:
        self.edges = np.concatenate([[0], np.cumsum(seqlens, dtype=np.int64)])
        self.path = path
        folders = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")}
        files = sorted(file for folder in folders for file in folder.rglob("*.py"))
        random.Random(0).shuffle(files)
        words: list[bytes] = []
        for file in files:
            words += self.WORD.findall(file.read_bytes())
            if len(words) > max_words:
                break
        common = Counter(words).most_common(vocab_size - 1)
        number = {word: token for token, (word, _) in enumerate(common, start=1)}
        tokens = np.fromiter((number.get(word, 0) for word in words), np.int32, len(words))
        # Where there is less text than the lengths ask for, it is read again from the start.
        np.save(path, np.resize(tokens, self.edges[-1]))
        self._tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getitem__(self, sample_id: int) -> dict[str, np.ndarray]:
        if self._tokens is None:
            self._tokens = np.load(self.path, mmap_mode="r")
        return {"input_ids": self._tokens[self.edges[sample_id] : self.edges[sample_id + 1]]}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}


class Collate:
    """Pads a list of samples to the longest, into the tensors that our loader makes."""

    def __init__(self) -> None:
        self._collator = Collator()
        self._fields = Fields()

    def __call__(self, samples: Sequence[dict[str, np.ndarray]]) -> Batch:
        seqlens = np.array([len(sample["input_ids"]) for sample in samples], np.int32)
        shape = PlannedShape("padded", seqlens, -(-int(seqlens.max()) // 8) * 8, 1, False)
        return Batch(self._collator(samples, shape, self._fields).tensors)


def updates_of_plan(loader: packer.PlanLoader) -> Iterator[Update]:
    """Play a plan, one micro-batch an update."""
    rows = loader.plan.epoch(0)
    for step in loader:
        seqlens = rows.microbatch(step.index).seqlens.astype(np.int64)
        yield Update(step.num_tokens, step.num_loss_tokens, int((seqlens**2).sum()), step)


def updates_of_lists(
    dataset: Any, seqlens: np.ndarray, batches: Sequence[np.ndarray], setting: Setting
) -> Iterator[Update]:
    """Play ready lists of ids through torch's loader; as many batches an update as hold its tokens."""
    loader = DataLoader(
        dataset,
        batch_sampler=[ids.tolist() for ids in batches],
        collate_fn=Collate(),
        num_workers=setting.num_workers,
        pin_memory=setting.device == "cuda",
    )
    reads = (Read(Place(0, 0, index), batch) for index, batch in enumerate(loader))
    delivered = (read.outcome for read in to_device(reads, torch.device(setting.device)))
    first = 0
    while first < len(batches):
        last, tokens = first, 0
        while last < len(batches) and tokens < setting.max_tokens * 0.97:
            tokens += int(seqlens[batches[last]].sum())
            last += 1
        lengths = np.concatenate([seqlens[ids] for ids in batches[first:last]]).astype(np.int64)
        yield Update(
            int(lengths.sum()),
            int((lengths - 1).sum()),
            int((lengths**2).sum()),
            (next(delivered) for _ in range(last - first)),  # type: ignore[misc]
        )
        first = last


def fixed_batches(ids: np.ndarray, size: int) -> list[np.ndarray]:
    order = np.random.default_rng(1).permutation(ids)
    return list(order[: len(order) // size * size].reshape(-1, size))


def grouped_batches(ids: np.ndarray, seqlens: np.ndarray, size: int) -> list[np.ndarray]:
    """Shuffle, sort within megabatches of 50 batches, as Hugging Face's LengthGroupedSampler does."""
    order = np.random.default_rng(1).permutation(ids)
    span = max(1, min(len(order) // (size * 4), 50)) * size
    parts = [order[start : start + span] for start in range(0, len(order), span)]
    ordered = np.concatenate([part[np.argsort(-seqlens[part], kind="stable")] for part in parts])
    return list(ordered[: len(ordered) // size * size].reshape(-1, size))
