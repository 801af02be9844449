"""How fast does a GPU train on batches of different making? One run, one model, one length distribution.

Real tokens per second, peak memory, loss after equal tokens and the share of time that the GPU waits for
data, for

- rows: equal rows without padding, as long as the average token's sample: what the model can do at best;
- packed, padded: plans of ours, 32,768 tokens a micro-batch;
- grouped, fixed: batches of a fixed number of samples, sorted by length within megabatches as Hugging Face's
Trainer does, or
  just shuffled, at the largest number that surely fits; and fixed at 4 and 8 samples.

Every update takes about 32,768 real tokens, and all loaders use the same workers and the same copies to the
GPU.

    python benchmarks/train_gpu.py --out results.json            (one GPU; 8 minutes)
    python benchmarks/train_gpu.py --tiny --out results.json     (CPU, half a minute)
"""

import argparse
import gc
import json
import random
import re
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gpu_decoder
import numpy as np
import pyarrow.parquet as pq
import torch
from gpu_decoder import Decoder, Shape
from torch.utils.data import DataLoader

import packer
from packer.runtime.batches.batch import Batch
from packer.runtime.batches.collate import Collator, PlannedShape
from packer.runtime.batches.fields import Fields
from packer.runtime.loader.device import to_device
from packer.runtime.loader.progress import Place, Read

LENGTHS = Path(__file__).parent / "data" / "azure_llm_2023_lengths.parquet"
NUM_HELD_OUT = 256


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-fuse", action="store_true", help="run the pointwise functions uncompiled")
    parser.add_argument("--seconds", type=float, default=500, help="start no variant after this")
    arguments = parser.parse_args()
    setting = TINY if arguments.tiny else FULL
    gpu_decoder.FUSE = not (arguments.no_fuse or arguments.tiny)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(setting, Path(folder))
        print(f"data and plans: {time.perf_counter() - begin:.0f} s", flush=True)
        for name, run in bench.variants().items():
            if time.perf_counter() - begin > arguments.seconds:
                print(f"{name}: no time left")
                continue
            bench.results[name] = run()
            print(
                f"{name}: {json.dumps(bench.results[name])} at {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
            write(arguments.out, bench, time.perf_counter() - begin)
    print_table(bench.results)


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


def write(path: Path, bench: Bench, seconds: float) -> None:
    """Keep what is known so far."""
    on_gpu = bench.setting.device == "cuda"
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "parameters": sum(
            parameter.numel() for parameter in Decoder(bench.setting.shape, 8).to("meta").parameters()
        ),
        "setting": {name: str(value) for name, value in asdict(bench.setting).items()},
        "plans": {
            name: {
                "microbatches": plan.header["epochs"][0]["num_microbatches"],
                "padded_per_real": plan.header["epochs"][0]["num_padded_tokens"]
                / plan.header["epochs"][0]["num_tokens"],
            }
            for name, plan in bench.plans.items()
        },
        "seconds": seconds,
        "results": bench.results,
    }
    path.write_text(json.dumps(report, indent=1))


def print_table(results: dict[str, dict[str, Any]]) -> None:
    best = next((r["teraflops"] for name, r in results.items() if name.startswith("rows")), float("nan"))
    columns = ("tokens/s", "TFLOP/s", "of rows", "waits", "peak GB", "early loss", "loss")
    print(f"\n{'':22}" + "".join(f"{column:>11}" for column in columns))
    for name, result in results.items():
        if "teraflops" not in result:
            print(f"{name:22}{result['tokens_per_second']:11,.0f}")
            continue
        numbers = [
            f"{result['tokens_per_second']:,.0f}",
            f"{result['teraflops']:.1f}",
            f"{result['teraflops'] / best:.3f}",
            f"{result['wait_share']:.3%}",
            f"{result['peak_gigabytes']:.1f}",
            *(f"{result[loss]:.3f}" if loss in result else "" for loss in ("early_loss", "loss")),
        ]
        print(f"{name:22}" + "".join(f"{number:>11}" for number in numbers))


if __name__ == "__main__":
    main()
